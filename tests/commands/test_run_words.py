"""What a user of `sonde run` reads: remedies that a script's user can follow."""

from __future__ import annotations

import ast
import io
import logging
from pathlib import Path

import pytest

import sonde
from sonde.batch_size.taps.problems import HOW_TO_COUNT
from sonde.commands.run_script.words import REMEDIES, in_words_of_run, say_in_words_of_run


def test_every_remedy_replaces_something_that_sonde_says() -> None:
    said = " ".join(_constants())
    text = said
    for remedy, instead in REMEDIES.items():
        assert remedy in text, remedy
        text = text.replace(remedy, instead)


def _constants() -> list[str]:
    """The texts in sonde's sources, f-strings without what they insert."""
    texts = []
    root = Path(sonde.__file__).parent
    for file in [*(root / "batch_size").rglob("*.py"), *(root / "integrations").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_messages_name_options_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the script turns all loggers off that it has not made."""
    logger, stream = logging.getLogger("sonde"), io.StringIO()
    monkeypatch.setattr("sonde.console._chosen", None)
    monkeypatch.setattr("sonde.console._in_words", str)
    before = logger.__class__, logger.handlers, logger.propagate, logger.disabled
    say_in_words_of_run(stream)
    try:
        logger.disabled = True
        logging.disable()
        logger.error("sonde: windows are too short: %s", "raise budget=, or put more work into each window")
    finally:
        logging.disable(logging.NOTSET)
        logger.__class__, logger.handlers, logger.propagate, logger.disabled = before
    assert stream.getvalue() == "sonde: windows are too short: raise --budget, or put more work into each step\n"
    assert in_words_of_run(f"It is not clear. {HOW_TO_COUNT}").startswith(
        "It is not clear. Pass --units-from: a number"
    )
