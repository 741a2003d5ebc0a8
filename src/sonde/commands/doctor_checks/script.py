"""`sonde doctor -- train.py …`: what `sonde run` finds in a script, by its log. The script is stopped soon after."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sonde.commands.doctor_checks.check import Check
from sonde.commands.doctor_checks.processes import started
from sonde.commands.run import RunOptions, arguments_of, environment_of
from sonde.commands.run_script import NOT_MEASURED
from sonde.runs.reader import read_run
from sonde.wording import plural

_BETWEEN_LOOKS = 0.2
"""Seconds between looks at the script's logs and at its stderr."""
_AFTERWARDS = 3.0
"""Seconds after the first measured step, or a refusal, in which more may be found: in another model, say."""


def script_checks(options: RunOptions, command: Sequence[str], seconds: float) -> Iterator[Check]:
    """Start a script as `sonde run` does, and stop it when a step of it was measured. No log of it is left.

    Args:
        options: of `sonde run`.
        command: the script with its arguments.
        seconds: after which the script is stopped in any case.
    """
    stops_at, is_judged, has_ended = time.monotonic() + seconds, False, False
    other, rows = "", list[Check]()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        options = dataclasses.replace(options, out=Path(place) / "log", every=1, report=False)
        environment = environment_of(options, command, os.environ, for_doctor=True)
        program, stderr = arguments_of(command, options.nproc), Path(place) / "stderr"
        with stderr.open("w") as file, started(program, environment, stdout=subprocess.DEVNULL, stderr=file) as process:
            while not has_ended and time.monotonic() < stops_at:
                time.sleep(_BETWEEN_LOOKS)
                has_ended = process.poll() is not None
                rows = [row for log in sorted(Path(place).glob("log*")) for row in _rows_of(log)]
                for line in filter(str.strip, stderr.read_text(errors="replace").splitlines()):
                    if (said := line.removeprefix("sonde: ")) == line:
                        other = line.strip()
                    else:
                        rows.append(Check("script", "fails" if NOT_MEASURED in said else "warning", said))
                if not is_judged and any(row.name == "script: step" or row.state == "fails" for row in rows):
                    is_judged, stops_at = True, min(stops_at, time.monotonic() + _AFTERWARDS)
    yield from rows
    if not is_judged:
        found, advice = f"no step was seen in {seconds:g} s. {other}", "pass a longer --seconds"
        if has_ended:
            found, advice = f"it ended with status {process.returncode} before a step. {other}", "run it without sonde"
        yield Check("script", "fails", found.strip(), advice)


def _rows_of(log: Path) -> Iterator[Check]:
    """The rows that the log of a model makes: of its header, and of its first reading."""
    from sonde.commands.run_script.words import in_words_of_run  # imports torch, which a doctor may be without

    with contextlib.suppress(OSError, ValueError):  # it is being written
        if not (run := read_run(log)).readings:
            return
        setup, unit, first = run.header.setup, run.header.unit, run.readings[0]
        model = f"{setup['wrapper']}, {plural(setup['parameters'], 'trainable parameter')} on {setup['device']}"
        yield Check("script: model", "ok", f"{model}, {plural(setup['ranks'], 'data-parallel rank')}")
        yield Check("script: optimizer", "ok", f"{setup['optimizer']}, {setup['trainer']}")
        counted = f": {setup['units_by_forward']}" if setup["units_by_forward"] else ""
        yield Check("script: unit", "ok", in_words_of_run(unit + counted))
        n, n_units = first.pieces["per_window"], first.metrics["gns/units_per_window"]
        if first.dropped or not n_units:
            yield Check("script: step", "fails", f"{NOT_MEASURED}: {', '.join(first.dropped) or first.reason}")
        else:
            window = f"{plural(n, 'piece')} per window, {n_units:g} {unit} in all, {n_units / n:g} in a piece"
            yield Check("script: step", "ok", window)
