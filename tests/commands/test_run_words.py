"""What a user of `sonde run` reads: tracebacks of the script alone, and remedies that a script's user can follow."""

from __future__ import annotations

import ast
import io
import logging
import re
from pathlib import Path

import pytest

import sonde
from sonde.batch_size.taps.problems import HOW_TO_COUNT
from sonde.commands.run_script.words import REMEDIES, in_words_of_run, say_in_words_of_run
from tests.commands.scripts import START
from tests.commands.unmodified import bare, with_run

ERRORS = (
    START
    + """
import traceback

model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

def forward():
    model(torch.randn(8, 5))

def clip():
    nn.utils.clip_grad_norm_(model.parameters(), "a")

def closure():
    raise OSError("in the closure")

def closure_in_step():
    optimizer.step(closure)

def empty():
    torch.optim.SGD([], lr=0.1)

def cause():
    try:
        clip()
    except TypeError as error:
        raise ValueError("after the clip") from error

def recursion():
    recursion()

sys.stderr = sys.stdout
for make in (forward, clip, closure_in_step, empty, cause, recursion):
    try:
        make()
    except Exception:
        print(f"== {make.__name__}")
        sys.excepthook(*sys.exc_info())
sys.stderr = sys.__stderr__
print("== printed by the script")
try:
    torch.optim.SGD([], lr=0.1)
except ValueError:
    traceback.print_exc(file=sys.stdout)
x, y = batch()
nn.functional.mse_loss(model(x), y).backward()
optimizer.step()
torch.save(model.state_dict(), sys.argv[1])
"""
)


def test_a_traceback_that_ends_the_script_has_the_scripts_frames_alone(tmp_path: Path) -> None:
    without, measured = bare(ERRORS, tmp_path), with_run(ERRORS, tmp_path)
    names = [_named(outcome.out, tmp_path) for outcome in (without, measured)]
    makers = ["forward", "clip", "closure_in_step", "empty", "cause", "recursion"]
    assert [list(each) for each in names] == [[*makers, "printed by the script"]] * 2
    for make in makers:
        assert len(names[0][make]) > 3
        assert names[1][make] == names[0][make], make
    assert "in watched_init" in "".join(names[1]["printed by the script"])


def _named(out: str, folder: Path) -> dict[str, list[str]]:
    """Tracebacks by what raised them, without the frames of torch's modules, which differ where a module has hooks."""
    named = {}
    for part in out.split("== ")[1:]:
        name, *lines = part.splitlines()
        text = re.sub(r"repeated \d+ more", "repeated many more", "\n".join(lines))
        frames = re.split(r"\n(?=  File )", text)
        kept = [frame for frame in frames if "torch/nn/modules/module.py" not in frame]
        named[name] = [re.sub(rf"{re.escape(str(folder))}/(bare|run)", "", frame) for frame in kept]
    return named


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
