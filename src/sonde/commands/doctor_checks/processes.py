"""Processes that a doctor starts: those of self-tests, where a crash is a row, and of the script. All are ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from sonde.commands.doctor_checks.check import REPORT_IT, Check
from sonde.commands.run import existing_part
from sonde.evidence.shell_run import end_processes

LOGS = ".sonde-doctor-"
"""Begins the name of a folder with a test's log; the process of this doctor follows."""
_PATIENCE = 60.0
"""Seconds in which torch must be imported, and each test must end. On two idle cores all tests take a tenth of it."""
_GRACE = 40.0
"""Seconds that a script has to end after SIGTERM. torchrun gives its workers 30, which are in sessions of their own."""


@contextlib.contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str] | None = None, **files: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, so that Ctrl-C reaches this process alone; ended on exit.

    Args:
        command: of the process.
        environment: of the process; by default that of this one.
        **files: `stdout` and `stderr`, as for `subprocess.Popen`.
    """
    options: Any = {"stdin": subprocess.DEVNULL, "text": True, "errors": "replace", "start_new_session": True}
    process = subprocess.Popen(command, env=environment, **files, **options)
    try:
        yield process
    finally:
        end_processes([process], _GRACE)


def lines_within(stream: IO[str] | None, seconds_left: Callable[[], float]) -> Iterator[str]:
    """The lines of a process as they come.

    Args:
        stream: of the process, a pipe.
        seconds_left: returns the seconds in which the next line must come.

    Raises:
        queue.Empty: when it does not.
    """
    assert stream is not None
    arrived: queue.Queue[str] = queue.Queue()

    def read() -> None:
        with stream:
            for line in stream:
                arrived.put(line)
        arrived.put("")

    threading.Thread(target=read, daemon=True).start()
    while line := arrived.get(timeout=max(seconds_left(), 0.0)):
        yield line


def self_tests(group: str, folder: Path, n_ranks: int = 1, *, patience: float = _PATIENCE) -> Iterator[Check]:
    """The rows of a group of self-tests, in processes of their own.

    Args:
        group: "alone" or "ranks".
        folder: for logs.
        n_ranks: processes that run the group together.
        patience: seconds in which a test must end.
    """
    name = f"self-tests ({group})"
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as ranks:
        ranks.callback(_remove_left, existing_part(folder))
        said = ranks.enter_context((Path(place) / "said").open("w+"))
        for rank in reversed(range(n_ranks)):
            words = ("sonde.commands.doctor_checks.self_tests", group, str(folder), str(rank), f"{place}/store")
            stdout = subprocess.DEVNULL if rank else subprocess.PIPE
            process = ranks.enter_context(started([sys.executable, "-m", *words], stdout=stdout, stderr=said))
        try:
            for line in lines_within(process.stdout, lambda: patience):
                if isinstance(message := json.loads(line), str):
                    name = message
                else:
                    yield Check(**message)
            if not (status := process.wait(patience)):
                return
            said.seek(0)
            why = f"its process ended with status {status}: {said.read().strip().rpartition(chr(10))[2]}"
        except (queue.Empty, subprocess.TimeoutExpired):
            why = f"no answer within {patience:g} s"
    yield Check(name, "fails", f"{why}. The tests after it did not run", REPORT_IT)


def _remove_left(folder: Path) -> None:
    """Remove what a test has left in the folder of logs when its process was killed."""
    for left in folder.glob(f"{LOGS}{os.getpid()}-*"):
        shutil.rmtree(left, ignore_errors=True)
