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
from sonde.evidence.shell_plan import check_names, fill, used_placeholders
from sonde.log.sinks import BRANCH_FOLDER, TRIAL
from sonde.wording import duration, number, plural, units

PLACEHOLDERS = ("batch", "micro_batch", "accumulation", "out")
_APART, _MOST_SIZES = 4, 5
"""Sizes are a factor of 4 apart."""
_WARM, _LEAST = 3, 3
"""First steps of a try that are not timed, and how many more a slow script must take."""
_WHOLE, _EVEN = 0.4, 0.75
"""Parts of the steps: so many take in equally much where data are not padded, and see each optimizer step once."""
_PROPORTIONAL, _ROUNDED = 1.6, 1.1
"""A step's data may be so many times more, or less, than its batch says: packed sequences have different lengths, or a
batch is cut into whole micro-batches."""
_FALLS = 0.75
"""A larger step that takes less than this part of a smaller one's time was timed on a busy machine."""
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
        fewest_steps: that are timed in these seconds, unless steps are slow. They are enough where the script ends.
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

    def is_enough(self, lines: Sequence[Mapping[str, Any]], *, is_over: bool = False) -> bool:
        """Whether steps, the first of which are not timed, are as many and as long as they need to be.

        Args:
            lines: of all steps so far.
            is_over: whether the script has ended well, so that these are all steps that it takes.
        """
        timed = [line["seconds"] for line in lines[_WARM:]]
        # The least of them tells: an evaluation between two steps does not make steps slow.
        is_slow = len(timed) >= _LEAST and min(timed) * self.fewest_steps >= self.seconds
        is_long = len(timed) >= self.enough_steps and sum(timed) >= self.least_seconds
        return (is_slow or len(timed) >= self.fewest_steps) and (is_over or is_long or sum(timed) >= self.seconds)


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
            "micro-batch goes: sonde advise RUN --try -- python train.py --batch {batch} --out {out}"
        )
    check_names(command, PLACEHOLDERS)
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
        say: takes a sentence before the first size, and after each.
        pace: how long each is tried; None: `PACE`.

    Raises:
        ValueError: for a script that fails, never steps, needs more memory than there is at the present size, or
            ignores its batch, and for times that fall where steps grow.
    """
    used, pace = used_placeholders(command), pace or PACE
    tried, end = dict[Size, list[_Step]](), math.inf
    if "out" not in used:
        say("The script may overwrite its own checkpoints: to keep them, have it save to {out}, a temporary folder")
    with tempfile.TemporaryDirectory(prefix="sonde-trial-") as place:
        for n_round in range(pace.rounds + 1):
            timings = _timings(tried)
            # Another program may have slowed down a size that takes longer than a larger one: both are tried once more.
            falling = {size for pair in _falling(timings) for size in pair}
            for size in sizes if n_round < pace.rounds else [size for size in sizes if size in falling]:
                if size.micro_batch >= end:
                    continue
                step = _tried(command, size, Path(place) / f"{n_round}-{size.batch}-{size.accumulation}", pace)
                if step is None or (len(tried) > 1 and _off({**tried, size: [step]}) < 1):
                    end = size.micro_batch
                    why = "out of memory" if step is None else "a step takes in less data than that"
                    say(f"{units(size.batch, unit)}: {why}, so nothing larger is tried")
                    continue
                tried.setdefault(size, []).append(step)
                backwards = size.accumulation * _backwards_of_piece(tried)
                _check_step(step, size, ranks, backwards if {"micro_batch", "accumulation"} & used else None)
                _check_data(tried)
                seconds, memory = duration(step["seconds"]), number(step["memory"] / 2**20)
                timing = _timings(tried)[size]
                micro = f" in micro-batches of {timing.micro_batch:,.15g}" * (timing.accumulation > 1)
                say(f"{units(size.batch, unit)}{micro}: {seconds} a step, {memory} MiB")
    if not tried:
        raise ValueError(f"{sizes[0].batch:,} {unit} do not fit into memory: try a smaller batch, or free memory")
    timings = _timings(tried)
    _check_rising(timings)
    *_, (last, timing) = timings.items()  # a script may cut batches in its own way
    return TimeCurve(tuple(timings.values()), end * timing.micro_batch / last.micro_batch)


_Step = Mapping[str, Any]
"""A line of the file of steps, or the median of several such lines."""


def _tried(command: Sequence[str], size: Size, place: Path, pace: Pace) -> _Step | None:
    """One try; None where memory ended."""
    place.mkdir()
    words = fill(command, {**vars(size), "out": place / "out"})
    environment = dict(os.environ) | {TRIAL: str(place / "steps"), BRANCH_FOLDER: str(place / "log")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ON_START), os.environ.get("PYTHONPATH")]))
    with (
        (place / "stdout").open("wb") as out,
        (place / "stderr").open("wb") as err,
        started(arguments_of(words, None), environment, stdout=out, stderr=err) as process,
    ):
        lines, status = _watched(process, place / "steps.0", pace), process.poll()
    if pace.is_enough(lines, is_over=status == 0):
        return _median_step(lines)
    said = "".join((place / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    if process.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL) or _OUT_OF_MEMORY.search(said):
        return None
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "without a word")
    n_steps = plural(len(lines) + bool(lines), "optimizer step")  # the first step begins the first line
    if status is None:
        what = f"took {n_steps} in {pace.patience:.0f} s: {last:.300}"
    elif status == 0:
        what = f"ended by itself after {n_steps} of {_WARM + pace.fewest_steps + 1}: have it train longer"
    else:
        what = f"ended with status {status}: {last:.300}"
    raise ValueError(f"the script, at a batch of {size.batch:,}, {what}")


def _watched(process: subprocess.Popen[bytes], file: Path, pace: Pace) -> list[dict[str, Any]]:
    """The lines of rank 0, until there are enough of them, the process ends, or patience does."""
    deadline, has_ended = time.monotonic() + pace.patience, False
    lines: list[dict[str, Any]] = []
    while time.monotonic() < deadline and not (has_ended or pace.is_enough(lines)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
        has_ended = process.poll() is not None  # before the last lines are read
        whole = file.read_text().splitlines(keepends=True) if file.exists() else []
        lines = [json.loads(line) for line in whole if line.endswith("\n")]
    return lines


def _median_step(lines: Sequence[_Step]) -> _Step:
    """The step that stands for all. Short steps at the end of an epoch are left out."""
    timed = lines[_WARM:]
    most = max(line["elements"] for line in timed)
    whole = [line for line in timed if line["elements"] == most]
    used = whole if len(whole) >= _WHOLE * len(timed) else timed
    step = {name: statistics.median(line[name] for line in used) for name in used[-1].keys() - {"sizes"}}
    step |= {"is_even": statistics.fmean(line["is_even"] for line in timed)}
    sizes = {key: [line["sizes"].get(key, 0) for line in used] for key in used[-1]["sizes"]}
    steady = {key for key, of in sizes.items() if of.count(max(of)) >= _WHOLE * len(of)}
    medians = {key: (statistics.median(of), key in steady) for key, of in sizes.items()}
    return step | {"sizes": medians, "memory": max(line["memory"] for line in lines)}


def _timings(tried: Mapping[Size, Sequence[_Step]]) -> dict[Size, Timing]:
    """The faster of each size's tries: what else a machine does only adds to a time."""
    timings = dict[Size, Timing]()
    for size, tries in tried.items():
        best, memory = min(tries, key=lambda step: step["seconds"]), max(step["memory"] for step in tries)
        ranks, pieces = int(best["ranks"]), int(best["backwards"]) // _backwards_of_piece(tried)
        accumulation = pieces or size.accumulation
        micro_batch = size.batch / ranks / accumulation
        timings[size] = Timing(micro_batch, accumulation, ranks, best["seconds"], best.get("update"), memory)
    return timings


def _backwards_of_piece(tried: Mapping[Size, Sequence[_Step]]) -> int:
    """Backwards of one micro-batch, as the log counts micro-batches: several where a script has several losses."""
    size, steps = next(iter(tried.items()))
    return max(int(steps[0]["backwards"] // size.accumulation), 1)


def _check_step(step: _Step, size: Size, ranks: int, backwards: int | None) -> None:
    """Refuse a step that is not one of the log: on other ranks, of several optimizers' paces, or cut otherwise.

    Args:
        step: the median step.
        size: that was asked for.
        ranks: of the log.
        backwards: that the step must have; None where the script chooses.
    """
    if step["ranks"] != ranks:
        raise ValueError(
            f"the trial ran on {plural(int(step['ranks']), 'rank')}, and the log is of {ranks}: start the script as "
            f"for the log, such as with torchrun --nproc-per-node {ranks}"
        )
    if step["is_even"] < _EVEN:
        raise ValueError(
            "the script's optimizers do not step equally often, so which of them ends a step is not known: compare "
            "runs of your own with sonde advise RUN RUN"
        )
    if backwards and step["backwards"] not in (0, backwards):
        raise ValueError(
            f"a step took {plural(int(step['backwards']), 'backward')} for {size.accumulation} micro-batches: put "
            "{accumulation} where the script reads their number, or start it as for the log"
        )


def _check_data(tried: dict[Size, list[_Step]]) -> None:
    """Refuse a script whose steps do not take in data in proportion to the batch that it was given."""
    if not all(steps[0]["elements"] for steps in tried.values()):
        raise ValueError(
            "the script calls no torch module with data, so whether it uses its batch cannot be told: call the model "
            "as model(data), outside of compiled functions, or compare runs of your own with sonde advise RUN RUN"
        )
    if (off := _off(tried)) != 1:
        small, large = (size.batch for size in _ends(tried))
        raise ValueError(
            f"a step at a batch of {large:,} takes in {number(off * large / small)} times the data of one at "
            f"{small:,}, where {number(large / small)} times are expected: the script ignores its batch, its data set "
            "is smaller, or it counts otherwise. {batch} is all units of a step, on all ranks, and {micro_batch} those "
            "of one backward on one rank"
        )


def _off(tried: Mapping[Size, Sequence[_Step]]) -> float:
    """How many times too much data the largest batch takes in, beside the smallest; 1 where it is about right.

    It is right if any dim of what the model is called with is in proportion: a mask, or sequences' length, is not.
    """
    (small, few), (large, many) = ((size, tried[size][0]) for size in _ends(tried))
    found = list[float]()
    for key, (n, is_steady) in many["sizes"].items():
        of_few, was_steady = few["sizes"].get(key, (0, False))
        most = _ROUNDED if is_steady and was_steady else _PROPORTIONAL
        found.append(n / max(of_few, 1) / (large.batch / small.batch))
        if 1 / most < found[-1] < most:
            return 1.0
    return max(found, default=0.0)


def _ends(tried: Mapping[Size, Sequence[_Step]]) -> tuple[Size, Size]:
    sizes = sorted(tried, key=lambda size: size.batch)
    return sizes[0], sizes[-1]


def _falling(timings: Mapping[Size, Timing]) -> list[tuple[Size, Size]]:
    """Sizes of which the second took less time, with at least as many micro-batches that are at least as large."""
    return [
        (small, large)
        for (small, one), (large, other) in itertools.permutations(timings.items(), 2)
        if one.micro_batch <= other.micro_batch and one.accumulation <= other.accumulation
        if other.seconds < _FALLS * one.seconds
    ]


def _check_rising(timings: Mapping[Size, Timing]) -> None:
    for small, large in _falling(timings):
        less, more = (duration(timings[size].seconds) for size in (large, small))
        raise ValueError(
            f"a step of {large.batch:,} took {less}, and one of {small.batch:,} took {more}: the machine is busy, or "
            "the script does other work at each size. Try again when the machine is idle"
        )
