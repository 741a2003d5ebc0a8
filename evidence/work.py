"""Pieces of work, each done once: their results, one line each, in a file for each study."""

from __future__ import annotations

import json
import math
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
DIGITS = 5
"""Significant digits that are kept of each number."""

Arguments = Mapping[str, Any]
"""What a piece of work is called with: JSON values by name."""


@dataclass(frozen=True)
class Study:
    """One question, answered by pieces of work that do not depend on each other.

    Attributes:
        name: of the study, and of the file of its results.
        pieces: the arguments of each piece; given True, tiny pieces that run every line.
        run: does one piece: a function of a module, called with its arguments, which returns JSON values.
        is_timed: whether it measures time, so that no other piece may run beside it.
    """

    name: str
    pieces: Callable[[bool], Sequence[Arguments]]
    run: Callable[..., Mapping[str, Any]]
    is_timed: bool = False


@dataclass(frozen=True)
class Done:
    """A piece that was done.

    Attributes:
        arguments: of the piece.
        result: as it returned it, with numbers shortened.
        seconds: that it took, on one core.
        commit: of the code; a "+" follows where files were changed.
    """

    arguments: Arguments
    result: Mapping[str, Any]
    seconds: float
    commit: str


class Store:
    """The results of all studies, in a folder. One process writes at a time.

    Args:
        folder: with a file for each study.
    """

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder

    def read(self, study: str) -> list[Done]:
        """All pieces of a study that were done. A last line that was cut off is left out."""
        file = self.folder / f"{study}.jsonl"
        text = file.read_text() if file.exists() else ""
        return [Done(**json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def append(self, study: str, done: Done) -> None:
        """Add a piece, after what was cut off is removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{study}.jsonl"
        text = file.read_bytes() if file.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            file.write_bytes(whole)
        with file.open("ab") as lines:
            lines.write(json.dumps(vars(done), separators=(",", ":")).encode() + b"\n")


def shortened(value: Any) -> Any:
    """JSON values with 5 significant digits; None for numbers that are not finite.

    Example:
        >>> shortened({"loss": [0.123456789, math.inf], "n": 1234567})
        {'loss': [0.12346, None], 'n': 1234567}
    """
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: shortened(each) for name, each in value.items()}
    return [*map(shortened, value)] if isinstance(value, list | tuple) else value


def do(study: Study, arguments: Arguments, commit: str) -> Done:
    """Do one piece, in this process."""
    start = time.process_time()
    result = study.run(**arguments)
    return Done(arguments, shortened(result), shortened(time.process_time() - start), commit)


def commit_of(folder: Path) -> str:
    """The commit of a checkout, with a "+" where files other than results were changed; empty outside git."""
    try:
        head, changed = (
            subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False).stdout.strip()
            for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--", "*.py"))
        )
    except FileNotFoundError:  # a bare machine has no git
        return ""
    return head + "+" * bool(changed)


def to_do(
    studies: Sequence[Study], store: Store, *, smoke: bool = False, only: Sequence[str] = ()
) -> list[tuple[Study, Arguments]]:
    """The pieces that were not done yet, study by study; only those that have these words as arguments."""
    waiting = []
    for study in studies:
        done = [piece.arguments for piece in store.read(study.name)]
        planned = [piece for piece in study.pieces(smoke) if {*only} <= {*map(str, piece.values())}]
        waiting += [(study, arguments) for arguments in planned if arguments not in done]
    return waiting


def work_off(
    waiting: Sequence[tuple[Study, Arguments]], store: Store, jobs: int, say: Callable[[str], None]
) -> list[str]:
    """Do pieces and keep each result at once. A piece that fails does not stop the others.

    Args:
        waiting: as `to_do` lists them.
        store: where results go.
        jobs: processes, of one thread each; with 1, this process does all.
        say: takes a line of progress after each piece.

    Returns:
        A line for each piece that failed.
    """
    failed, names = [], {study.name for study, _ in waiting}
    took = {name: [piece.seconds for piece in store.read(name)] for name in names}
    left = [study.name for study, _ in waiting]
    for study, arguments, done in _results(waiting, jobs, commit_of(Path(__file__).parent)):
        left.remove(study.name)
        if isinstance(done, Exception):
            failed.append(f"{study.name} {json.dumps(arguments)}: {type(done).__name__}: {done}")
            say(failed[-1])
            continue
        store.append(study.name, done)
        took[study.name].append(done.seconds)
        rest = time_left(left, took) / jobs
        say(f"{study.name} {_in_short(arguments)}: {done.seconds:.0f} s; {len(left)} left, about {rest / 60:.0f} min")
    return failed


def time_left(left: Sequence[str], took: Mapping[str, Sequence[float]]) -> float:
    """Seconds of one core for pieces of these studies: each as its study's mean so far, or as the mean of all."""
    known = {name: statistics.fmean(seconds) for name, seconds in took.items() if seconds}
    overall = statistics.fmean(known.values()) if known else 0.0
    return sum(known.get(name, overall) for name in left)


def _results(
    waiting: Sequence[tuple[Study, Arguments]], jobs: int, commit: str
) -> Iterator[tuple[Study, Arguments, Done | Exception]]:
    if jobs == 1:
        torch.set_num_threads(1)
        for study, arguments in waiting:
            try:
                yield study, arguments, do(study, arguments, commit)
            except Exception as error:
                yield study, arguments, error
        return
    # A worker ends at Ctrl-C without a word, also while it starts: it inherits that the signal is held back, until
    # `_begin_worker` lets it through. The pieces under way are done anew next time.
    with ProcessPoolExecutor(jobs, get_context("spawn"), _begin_worker) as pool:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        running: dict[Future[Done], tuple[Study, Arguments]] = {
            pool.submit(do, study, arguments, commit): (study, arguments) for study, arguments in waiting
        }
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    fault = future.exception()
                    if fault is not None and not isinstance(fault, Exception):
                        raise fault
                    yield *running.pop(future), fault or future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(1)


def _in_short(arguments: Arguments) -> str:
    return " ".join(map(str, arguments.values()))
