"""Runs a script of `tests.commands.scripts` bare, as `sonde run` does, and with a probe that it attaches by itself."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import sonde
from sonde.commands.run import RunOptions, environment_of
from tests.commands.scripts import ATTACH, STEP, whole
from tests.new_process import Ended, Python, as_python


@dataclass(frozen=True)
class Outcome:
    """How a script ended: status and outputs of the first rank, its weights, and the log in `folder`, if any."""

    status: int
    out: str
    err: str
    weights: Any
    folder: Path

    @property
    def numbers(self) -> list[float]:
        """The last window with a reading, and both parts of its noise scale."""
        last = self.run.readings[-1]
        parts = [last.metrics["gns/trace_cov"], last.metrics["gns/grad_sq"]]
        return [last.window, *(part for part in parts if part is not None)]

    @property
    def run(self) -> sonde.Run:
        """The log."""
        return sonde.read_run(self.folder)


def bare(script: str, folder: Path, *, ranks: int = 1, forks: bool = False) -> Outcome:
    """Without sonde. `forks` this process, and what it has imported."""
    return _outcome(script, folder / "bare", ranks=ranks, forks=forks)


def with_run(script: str, folder: Path, *, ranks: int = 1, forks: bool = False, **options: Any) -> Outcome:
    """As `sonde run` starts it, with these options."""
    given = RunOptions(**{"every": 1, "report": False, "out": folder / "run" / "log", **options})
    environment = environment_of(given, ["script.py"], {})
    before = ["-m", "tests.commands.as_run"]
    return _outcome(script, folder / "run", *before, ranks=ranks, forks=forks, environment=environment)


def explicit(
    script: str,
    folder: Path,
    *,
    ranks: int = 1,
    forks: bool = False,
    step: str = "probe.step()",
    attach: str = "sonde.attach(model, optimizer, ",
    **options: str,
) -> Outcome:
    """With a probe of its own, where the comments of the script say; `step`, `attach` and options are code."""
    given = {"unit": "'rows'", "units_per_piece": "'first dim'", "every": "1", "verbose": "False", **options}
    given = {name: code for name, code in given.items() if code}
    words = ", ".join(f"{name}={code}" for name, code in given.items())
    line = f"import sonde; probe = {attach}log={str(folder / 'explicit' / 'log')!r}, {words})"
    return _outcome(script.replace(ATTACH, line).replace(STEP, step), folder / "explicit", ranks=ranks, forks=forks)


def check_untouched(script: str, folder: Path, *, ranks: int = 1, forks: bool = False, **options: Any) -> Outcome:
    """Run it bare and with sonde: status, stdout and weights must be the same."""
    without = bare(script, folder, ranks=ranks, forks=forks)
    measured = with_run(script, folder, ranks=ranks, forks=forks, **options)
    assert (measured.status, measured.out) == (without.status, without.out), measured.err
    assert same_weights(measured.weights, without.weights)
    return measured


def _outcome(
    script: str,
    folder: Path,
    *before: str,
    ranks: int,
    forks: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    folder.mkdir(parents=True)
    file, weights = folder / "script.py", folder / "weights.pt"
    file.write_text(whole(script))
    arguments = [*before, str(file), str(weights), "--lr", "3"]
    variables = {**(environment or {}), "OMP_NUM_THREADS": "1"}
    if ranks > 1:
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
    of_ranks = [variables if ranks == 1 else variables | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)]
    with ExitStack() as stack:
        start = _Fork if forks else Python
        processes = [stack.enter_context(start(*arguments, folder=folder, environment=each)) for each in of_ranks]
        first, *others = [process.wait() for process in processes]
    for rank, other in enumerate(others, 1):
        (folder / f"err-{rank}").write_text(other.err)
    saved = torch.load(weights) if weights.exists() else None
    return Outcome(first.status, first.out, first.err, saved, folder / "log")


class _Fork:
    """A `Python` that is a fork of this process and has its imports: those of trainers take many seconds."""

    def __init__(self, *arguments: str, folder: Path, environment: Mapping[str, str]) -> None:
        self._outputs = [folder / f"{name}-of-{environment.get('RANK', '0')}" for name in ("out", "err")]
        self._pid = os.fork()
        if self._pid == 0:
            self._run(arguments, folder, environment)

    def _run(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        status = 1
        atexit._clear()  # what this process does at its end is its own: among it, to end the ranks of other tests
        try:
            for name, number in (("stdout", 1), ("stderr", 2)):
                setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115
            as_python(arguments, str(folder), dict(os.environ) | dict(environment), list(map(str, self._outputs)))
            status = 0
        except SystemExit as asked:
            status = int(asked.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def wait(self, seconds: float = 120.0) -> Ended:
        """Its end, which must come in this time."""
        deadline = time.monotonic() + seconds
        while (ended := os.waitpid(self._pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                raise AssertionError(f"it did not end within {seconds:g} s\n{self._outputs[1].read_text()}")
            time.sleep(0.01)
        self._pid = 0
        return Ended(os.waitstatus_to_exitcode(ended[1]), *(output.read_text() for output in self._outputs))

    def __enter__(self) -> _Fork:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def same_weights(a: Any, b: Any) -> bool:
    """Whether two files of weights hold the same, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
