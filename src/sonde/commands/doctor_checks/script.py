"""`sonde doctor -- train.py …`: what `sonde run` would find in a script, which is stopped after its first steps."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sonde.commands.doctor_checks.check import Check
from sonde.commands.doctor_checks.processes import started
from sonde.commands.run import RunOptions, arguments_of, environment_of
from sonde.commands.run_script import NAMES_MODELS

_BETWEEN_LOOKS = 0.2
"""Seconds between looks at what the script has said."""
_AFTERWARDS = 3.0
"""Seconds after the first measured step, or a refusal, in which more may be said: of that step, of another model."""
_NOT_MEASURED = re.compile(
    r"(?:(?:not|nothing was) measured|measuring stops)\W+(.*?)(?:: ([^:]*?))?(?:\. The script .*)?"
)
_WINDOW = re.compile(r"(?P<n>[\d,]+) pieces? per window.*?, (?P<units>[\d.]+) .* in all.*")
_OF_SET_UP = re.compile(r"  (model|ranks|unit|steps|metric|note) +(.*)")
"""A line of what `sonde.attach` prints."""
_NOTHING_NEW = ("noise scale attached", "B_simple", "log ")


def script_checks(options: RunOptions, command: Sequence[str], seconds: float) -> Iterator[Check]:
    """Start a script as `sonde run` does, and stop it when a step of it was measured. No log of it is left.

    Args:
        options: of `sonde run`.
        command: the script with its arguments.
        seconds: after which the script is stopped in any case.
    """
    stops_at, is_judged, has_ended = time.monotonic() + seconds, False, False
    lines: list[str] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        options = dataclasses.replace(options, out=Path(place) / "log", every=1, report=False)
        environment = environment_of(options, command, os.environ) | {NAMES_MODELS: "1"}
        program, said = arguments_of(command, options.nproc), Path(place) / "said"
        with said.open("w") as file, started(program, environment, stdout=subprocess.DEVNULL, stderr=file) as process:
            while not has_ended and time.monotonic() < stops_at:
                time.sleep(_BETWEEN_LOOKS)
                has_ended = process.poll() is not None
                lines = said.read_text(errors="replace").splitlines()
                if not is_judged and any(map(_is_verdict, lines)):
                    is_judged, stops_at = True, min(stops_at, time.monotonic() + _AFTERWARDS)
    yield from filter(None, map(_check_of, lines))
    if not is_judged:
        last = next((line.strip() for line in reversed(lines) if line.strip() and not _check_of(line)), "")
        found, advice = f"no step was seen in {seconds:g} s. {last}", "pass a longer --seconds"
        if has_ended:
            found, advice = f"it ended with status {process.returncode} before a step. {last}", "run it without sonde"
        yield Check("script", "fails", found.strip(), advice)


def _is_verdict(line: str) -> bool:
    """Whether a line says that a step was measured, or why none is."""
    check = _check_of(line)
    return check is not None and (check.name == "script: step" or check.state == "fails")


def _check_of(line: str) -> Check | None:
    """The row that a line on stderr makes; None for a line of the script's own, or one that says nothing new."""
    if row := _OF_SET_UP.fullmatch(line):
        return Check(f"script: {row[1].replace('steps', 'optimizer')}", "ok", row[2])
    text = line.removeprefix("sonde: ").strip()
    if not line.startswith("sonde: ") or text.startswith(_NOTHING_NEW):
        return None
    if window := _WINDOW.fullmatch(text):
        each = float(window["units"]) / int(window["n"].replace(",", ""))
        return Check("script: step", "ok", f"{text}, {each:g} in a piece")
    if refused := _NOT_MEASURED.fullmatch(text):
        return Check("script", "fails", refused[1], refused[2] or "")
    return Check("script", "ok" if text.endswith(" is measured") else "warning", text)
