"""Starts a script at some batch sizes, for some seconds each, and makes the time curve of its steps."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sonde.commands.doctor_checks.processes import started
from sonde.commands.run import ON_START, arguments_of
from sonde.decision.facts import Facts
from sonde.decision.law import Range
from sonde.decision.time_curve import TimeCurve, Timing
from sonde.evidence.shell_plan import used_placeholders
from sonde.log.sinks import BRANCH_FOLDER, TRIAL
from sonde.wording import duration, number, plural

PLACEHOLDERS = ("batch", "micro_batch", "accumulation", "out")
_APART, _MOST_SIZES = 4, 5
"""Sizes are a factor of 4 apart."""
_WARM, _LEAST = 3, 2
"""First steps of a try that are not timed, and how many more a slow script must take."""
_PROPORTIONAL = 1.6
"""A step's data may be so many times more, or less, than its batch says: sequences are padded to different lengths."""
_FALLS = 0.75
"""A larger micro-batch that takes less than this part of a smaller one's time was timed on a busy machine."""
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|MemoryError|Signal 9 \(SIGKILL\)", re.IGNORECASE
)
"""The last is what torchrun says of a rank that the system killed."""


@dataclass(frozen=True)
class Pace:
    """How long sizes are tried.

    Attributes:
        rounds: tries of each size: a machine may be busy for a while.
        seconds: of steps, after which a try ends.
        fewest_steps: that are timed in these seconds, unless steps are slow.
        enough_steps: with so many steps, a try ends after `least_seconds`.
        least_seconds: see there.
        patience: seconds in which a try must be over: a script may import much, load data and compile.
    """

    rounds: int = 2
    seconds: float = 10.0
    fewest_steps: int = 8
    enough_steps: int = 40
    least_seconds: float = 2.0
    patience: float = 180.0

    def is_enough(self, lines: Sequence[Mapping[str, Any]]) -> bool:
        """Whether steps, the first of which are not timed, are as many and as long as they need to be."""
        timed = lines[_WARM:]
        seconds = sum(line["seconds"] for line in timed)
        is_long = seconds >= self.least_seconds and len(timed) >= self.enough_steps
        return len(timed) >= self.fewest_steps and (is_long or seconds >= self.seconds)


PACE = Pace()


@dataclass(frozen=True)
class Size:
    """A step that is tried.

    Attributes:
        batch: units of one step on all ranks.
        micro_batch: units of one micro-batch on one rank.
        accumulation: micro-batches that each rank takes.
    """

    batch: int
    micro_batch: int
    accumulation: int


def check_command(command: Sequence[str]) -> None:
    """Refuse a command that cannot be tried.

    Raises:
        ValueError: without a placeholder for the size, and for a command that is not there.
    """
    used = used_placeholders(command)
    if not {"batch", "micro_batch"} & used:
        raise ValueError(
            "a trial needs {batch} in the script's arguments, or {micro_batch}, where the size of a step or of a "
            "micro-batch goes: sonde advise RUN --try -- python train.py --batch {batch}"
        )
    if unknown := used_placeholders(command) - set(PLACEHOLDERS):
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise ValueError(f"a trial has {known}, got {{{min(unknown)}}}: give the script a value there")
    arguments_of(command, None)


def sizes_of(facts: Facts, critical: Range, command: Sequence[str]) -> list[Size]:
    """What is tried, smallest first: the present size, and others a factor of 4 apart up to 4 times B_crit.

    Args:
        facts: of the training.
        critical: the critical batch size.
        command: of the script, which may set micro-batches by themselves.
    """
    batch, ranks = max(round(facts.batch or 1.0), 1), facts.ranks
    ends = [end for end in (critical.low, critical.middle, critical.high) if end is not None and 0 < end < math.inf]
    most = _APART * max(critical.middle or 0.0, min(ends, default=batch), batch)
    batches = [batch]
    if critical.low < batch and batch >= _APART * ranks:
        batches.insert(0, batch // _APART)
    while len(batches) < _MOST_SIZES and batches[-1] * _APART <= most:
        batches.append(batches[-1] * _APART)
    used = used_placeholders(command)
    if "micro_batch" not in used:
        sizes = [Size(each, round(each / ranks / facts.accumulation), facts.accumulation) for each in batches]
        return [size for size in sizes if size.micro_batch]
    # A script that is told of micro-batches alone accumulates as it did.
    kept = 1 if {"batch", "accumulation"} & used else facts.accumulation
    micro_batches = dict.fromkeys(max(each // ranks // kept, 1) for each in batches)
    sizes = [Size(micro * kept * ranks, micro, kept) for micro in micro_batches]
    as_it_is = Size(batch, max(round(facts.micro_batch), 1), facts.accumulation)
    return sizes if as_it_is in sizes else [as_it_is, *sizes]


def try_sizes(
    command: Sequence[str],
    sizes: Sequence[Size],
    *,
    unit: str,
    ranks: int,
    say: Callable[[str], object],
    pace: Pace | None = None,
) -> TimeCurve:
    """Train at each size for some seconds, in processes of their own, and time the steps.

    Args:
        command: of the script, with placeholders.
        sizes: what is tried, smallest first.
        unit: plural name of the unit.
        ranks: data-parallel ranks of the log.
        say: takes a sentence after each size.
        pace: how long each is tried; None: `PACE`.

    Raises:
        ValueError: for a script that fails, never steps, needs more memory than there is at the present size, or
            ignores its batch, and for times that fall where micro-batches grow.
    """
    tried: dict[Size, list[_Steps]] = {}
    too_large, pace = math.inf, pace or PACE
    with tempfile.TemporaryDirectory(prefix="sonde-trial-") as place:
        for n_round in range(pace.rounds):
            for size in sizes:
                if size.micro_batch >= too_large:
                    continue
                steps = _tried(command, size, Path(place) / f"{n_round}-{size.batch}-{size.accumulation}", pace)
                if steps is None:
                    too_large = min(too_large, size.micro_batch)
                    say(f"{size.batch:,} {unit}: out of memory, so nothing larger is tried")
                    continue
                _check_ranks(steps.ranks, ranks)
                tried.setdefault(size, []).append(steps)
                _check_data(tried)
                per_step = duration(statistics.median(steps.seconds))
                say(f"{size.batch:,} {unit}: {per_step} a step, {number(steps.memory / 2**20)} MiB")
    if not tried:
        raise ValueError(f"{sizes[0].batch:,} {unit} do not fit into memory: try a smaller batch, or free memory")
    curve = TimeCurve(tuple(_timing(size, all_of) for size, all_of in tried.items()), too_large)
    _check_rising(curve)
    return curve


@dataclass(frozen=True)
class _Steps:
    """The steps of one try: seconds of each, and what is the same for all."""

    seconds: list[float]
    update: float | None
    backwards: int
    elements: float
    ranks: int
    memory: float


def _tried(command: Sequence[str], size: Size, place: Path, pace: Pace) -> _Steps | None:
    """One try; None where memory ended."""
    place.mkdir()
    values = {**vars(size), "out": place / "out"}
    words = [_filled(word, values) for word in command]
    environment = dict(os.environ) | {TRIAL: str(place / "steps"), BRANCH_FOLDER: str(place / "log")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ON_START), os.environ.get("PYTHONPATH")]))
    begun = time.monotonic()
    with (
        (place / "stdout").open("wb") as out,
        (place / "stderr").open("wb") as err,
        started(arguments_of(words, None), environment, stdout=out, stderr=err) as process,
    ):
        lines, waited = _watched(process, place / "steps.0", pace), time.monotonic() - begun
        has_ended = process.poll() is not None
    is_slow = len(lines) >= _WARM + _LEAST and sum(line["seconds"] for line in lines) >= pace.seconds
    if pace.is_enough(lines) or (is_slow and not has_ended):
        return _steps(lines)
    said = "".join((place / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    if process.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL) or _OUT_OF_MEMORY.search(said):
        return None
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "without a word")
    if not has_ended:
        what = f"took {plural(len(lines), 'optimizer step')} in {waited:.0f} s: {last:.300}"
    elif process.returncode == 0:
        what = f"ended by itself after {plural(len(lines), 'step')}, before its steps were timed: have it train longer"
    else:
        what = f"ended with status {process.returncode}: {last:.300}"
    raise ValueError(f"the script, at a batch of {size.batch:,}, {what}")


def _filled(word: str, values: dict[str, Any]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word


def _watched(process: subprocess.Popen[bytes], file: Path, pace: Pace) -> list[dict[str, Any]]:
    """The lines of rank 0, until there are enough of them, the process ends, or patience does."""
    deadline, has_begun = time.monotonic() + pace.patience, False
    lines: list[dict[str, Any]] = []
    while time.monotonic() < deadline and not pace.is_enough(lines):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
        has_ended = process.poll() is not None  # before the last lines are read
        whole = file.read_text().splitlines(keepends=True) if file.exists() else []
        lines = [json.loads(line) for line in whole if line.endswith("\n")]
        if lines and not has_begun:  # from the first step on, a try has its own time; slow steps have more of it
            has_begun, slow = True, 2 * (_WARM + _LEAST) * lines[0]["seconds"]
            deadline = min(deadline, time.monotonic() + max(2 * pace.seconds, slow))
        if has_ended:
            break
    return lines


def _steps(lines: Sequence[dict[str, Any]]) -> _Steps:
    timed, counted = lines[_WARM:], [line["elements"] for line in lines if line["elements"] is not None]
    updates = [line["update"] for line in timed if line["update"] is not None]
    return _Steps(
        [line["seconds"] for line in timed],
        statistics.median(updates) if updates else None,
        round(statistics.median(line["backwards"] for line in lines)),
        statistics.fmean(counted),
        int(lines[-1]["ranks"]),
        max(line["memory"] for line in lines),
    )


def _timing(size: Size, tries: Sequence[_Steps]) -> Timing:
    """The faster of the tries: what else a machine does only adds to a time."""
    best = min(tries, key=lambda steps: statistics.median(steps.seconds))
    seconds, accumulation = statistics.median(best.seconds), max(best.backwards, 1)
    micro = size.batch / best.ranks / accumulation
    return Timing(micro, accumulation, best.ranks, seconds, best.update, max(steps.memory for steps in tries))


def _check_ranks(found: int, ranks: int) -> None:
    if found != ranks:
        raise ValueError(
            f"the trial ran on {plural(found, 'rank')}, and the log is of {ranks}: start the script as for the log, "
            f"such as with torchrun --nproc-per-node {ranks}"
        )


def _check_data(tried: dict[Size, list[_Steps]]) -> None:
    """Refuse a script whose steps do not take in data in proportion to the batch that it was given."""
    known = sorted((size.batch, steps[0].elements) for size, steps in tried.items())
    if not known[0][1]:
        raise ValueError(
            "the script calls no torch module with data, so whether it uses its batch cannot be told: call the model "
            "as model(data), or compare runs of your own with sonde advise RUN RUN"
        )
    if known[-1][0] == known[0][0]:
        return
    (small, few), (large, many) = known[0], known[-1]
    if many <= few * 1.01:
        raise ValueError(
            f"the script ignores its batch: a step at {large:,} takes in as much data as one at {small:,}. Put "
            "{batch} where the script reads the size of a step, or {micro_batch} where it reads that of a micro-batch"
        )
    off = (many / few) / (large / small)
    if not 1 / _PROPORTIONAL < off < _PROPORTIONAL:
        raise ValueError(
            f"a step at a batch of {large:,} takes in {number(many / few)} times the data of one at {small:,}, where "
            f"{number(large / small)} times are expected: {{batch}} is all units of a step, on all ranks, and "
            "{micro_batch} those of one backward on one rank. Is the data set smaller than the batch?"
        )


def _check_rising(curve: TimeCurve) -> None:
    """Refuse a larger micro-batch that took less time than the next smaller one."""
    ranks, sizes = curve.timings[0].ranks, sorted({each.micro_batch for each in curve.timings})
    for small, large in itertools.pairwise(sizes):
        of_small, of_large = (curve.of_step(size, 1, ranks)[0].likely for size in (small, large))
        if of_large < _FALLS * of_small:
            raise ValueError(
                f"a micro-batch of {large:g} took {duration(of_large)}, less than one of {small:g}, "
                f"{duration(of_small)}: other programs were running, or the script does other work at each size. Try "
                "again when the machine is idle"
            )
