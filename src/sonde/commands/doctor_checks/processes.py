"""Processes that sonde starts: self-tests, where a crash is a row, and scripts that are tried. All are ended."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sonde.commands.doctor_checks.check import REPORT_IT, Check
from sonde.evidence.shell_run import end_processes

_PATIENCE = 120.0
"""Seconds in which torch must be imported, and a group of tests must end. On two idle cores it takes a twentieth."""
_GRACE = 40.0
"""Seconds that a script has to end after SIGTERM. torchrun gives its workers 30, which are in sessions of their own."""


@contextlib.contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str] | None = None, **files: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, so that Ctrl-C reaches this process alone; ended on exit.

    Args:
        command: of the process.
        environment: of the process; by default that of this one.
        **files: `stdout` and `stderr`, as for `subprocess.Popen`.
    """
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, **files)
    try:
        yield process
    finally:
        end_processes([process], _GRACE)


def self_tests(group: str, n_ranks: int = 1, *, patience: float = _PATIENCE) -> Iterator[Check]:
    """The rows of a group of self-tests, in processes of their own.

    Args:
        group: "alone" or "ranks".
        n_ranks: processes that run the group together.
        patience: seconds in which the group must end.
    """
    name = f"self-tests ({group})"
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as ranks:
        rows, said = (ranks.enter_context((Path(place) / file).open("w+")) for file in ("rows", "said"))
        for rank in reversed(range(n_ranks)):
            words = ("sonde.commands.doctor_checks.self_tests", group, str(rank), f"{place}/store")
            stdout = subprocess.DEVNULL if rank else rows
            process = ranks.enter_context(started([sys.executable, "-m", *words], stdout=stdout, stderr=said))
        try:
            status = process.wait(patience)
            said.seek(0)
            why = f"its process ended with status {status}: {said.read().strip().rpartition(chr(10))[2]}"
        except subprocess.TimeoutExpired:
            status, why = None, f"no answer within {patience:g} s"
        rows.seek(0)
        for message in map(json.loads, rows):
            if isinstance(message, str):  # the test that begins
                name = message
            else:
                yield Check(**message)
    if status != 0:
        yield Check(name, "fails", f"{why}. The tests after it did not run", REPORT_IT)
