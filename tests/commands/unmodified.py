"""Runs a script of `tests.commands.scripts` bare, as `sonde run` does, and with a probe that it attaches by itself."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import sonde
from sonde.commands.run import environment_of
from sonde.commands.run_options import RunOptions
from tests.commands.scripts import ATTACH, STEP
from tests.new_process import Python


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


def bare(script: str, folder: Path, *, ranks: int = 1) -> Outcome:
    """Without sonde."""
    return _outcome(script, folder / "bare", ranks=ranks)


def with_run(script: str, folder: Path, *, ranks: int = 1, **options: Any) -> Outcome:
    """As `sonde run` starts it, with these options."""
    given = RunOptions(**{"every": 1, "report": False, **options, "out": folder / "run" / "log"})
    environment = environment_of(given, ["script.py"], {})
    return _outcome(script, folder / "run", "-m", "tests.commands.as_run", ranks=ranks, environment=environment)


def explicit(script: str, folder: Path, *, ranks: int = 1, step: str = "probe.step()", **options: str) -> Outcome:
    """With a probe of its own, where the comments of the script say; `step` and options are code."""
    given = {"unit": "'rows'", "units_per_piece": "'first dim'", "every": "1", "verbose": "False", **options}
    words = ", ".join(f"{name}={code}" for name, code in given.items())
    attach = f"import sonde; probe = sonde.attach(model, optimizer, log={str(folder / 'explicit' / 'log')!r}, {words})"
    return _outcome(script.replace(ATTACH, attach).replace(STEP, step), folder / "explicit", ranks=ranks)


def check_untouched(script: str, folder: Path, *, ranks: int = 1, **options: Any) -> Outcome:
    """Run it bare and with sonde: status, stdout and weights must be the same."""
    without, measured = bare(script, folder, ranks=ranks), with_run(script, folder, ranks=ranks, **options)
    assert (measured.status, measured.out) == (without.status, without.out), measured.err
    assert same_weights(measured.weights, without.weights)
    return measured


def _outcome(script: str, folder: Path, *before: str, ranks: int, environment: dict[str, str] | None = None) -> Outcome:
    folder.mkdir(parents=True)
    file, weights = folder / "script.py", folder / "weights.pt"
    file.write_text(script)
    arguments: Sequence[str] = [*before, str(file), str(weights), "--lr", "3"]
    variables = {**(environment or {}), "OMP_NUM_THREADS": "1"}
    if ranks > 1:
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(Python(*arguments, folder=folder, environment={**variables, "RANK": str(rank)}))
            for rank in range(ranks)
        ]
        first, *_ = [process.wait() for process in processes]
    saved = torch.load(weights) if weights.exists() else None
    return Outcome(first.status, first.out, first.err, saved, folder / "log")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def same_weights(a: Any, b: Any) -> bool:
    """Whether two files of weights hold the same, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
