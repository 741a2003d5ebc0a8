"""How long an optimizer step takes, over the size of its micro-batches: as measured, between sizes, and beyond them.

A step of A micro-batches of m units on each rank takes A·f(m) + o seconds: f is what a micro-batch takes, o what a step
takes beside them, the optimizer's update above all. f is proportional to m only on a device that is full. On one that
is not, a larger micro-batch takes hardly longer. So f is measured at several sizes, and interpolated between them: a
line through a few sizes misses by up to 76 %, since caches end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sonde.decision.law import Range, exactly

Basis = Literal["measured", "interpolated", "modelled", "bounds"]
"""How a time is known: of such steps; between measured sizes; of as many ranks as were not measured, which are taken to
wait for nothing; or only for a device that is not full, and for one that is."""
_NEARLY = 0.1
"""A size that is off a whole number by no more than this part is lowered by short windows."""
_SAME_SIZE = 1.05
"""Micro-batches within this factor are the same: an epoch's last windows lower an average a little."""
_APART = 1.5
"""One step with so many times the data of another tells what both take beside it: with less, noise would say more."""


@dataclass(frozen=True)
class Timing:
    """How long steps took.

    Attributes:
        micro_batch: units of one micro-batch on one rank.
        accumulation: micro-batches that each rank takes one after the other in a step.
        ranks: data-parallel ranks.
        seconds: of one step.
        beside: seconds of these that micro-batches do not take, as the optimizer's update; None where not known.
        memory: most bytes that one rank's device held; None where not known.
    """

    micro_batch: float
    accumulation: int
    ranks: int
    seconds: float
    beside: float | None = None
    memory: float | None = None

    def __post_init__(self) -> None:
        sizes = (self.micro_batch, self.accumulation, self.ranks, self.seconds)
        parts = [each for each in (self.beside, self.memory) if each is not None]
        if not (all(map(math.isfinite, (*sizes, *parts))) and min(sizes) > 0 and min(parts, default=0) >= 0):
            raise ValueError(f"sizes and seconds of a step must be positive and finite, got {self}")

    @property
    def batch(self) -> float:
        """Units of one step."""
        return self.micro_batch * self.accumulation * self.ranks


@dataclass(frozen=True)
class TimeCurve:
    """The time of a step over its micro-batches.

    Attributes:
        timings: at least one, of one model on one kind of device.
        too_large: the smallest micro-batch that memory, or the data set, had no room for; infinite where all fitted.
    """

    timings: tuple[Timing, ...]
    too_large: float = math.inf

    def __post_init__(self) -> None:
        if not (self.timings and self.too_large > 0):
            raise ValueError(f"a time curve needs a timing, and an end above 0, got {self}")

    @property
    def is_tried(self) -> bool:
        """Whether there are several sizes, so that nothing is said beyond them."""
        sizes = [each.micro_batch for each in self.timings]
        return max(sizes) > _SAME_SIZE * min(sizes)

    @property
    def is_of_trial(self) -> bool:
        """Whether steps were timed by themselves, and not from one reading of a log to the next."""
        return any(each.beside is not None for each in self.timings)

    @property
    def largest(self) -> float:
        """The largest micro-batch that may be planned with."""
        fitted = [each.micro_batch for each in self.timings if each.micro_batch < self.too_large]
        return max(fitted, default=1.0) if self.is_tried or math.isfinite(self.too_large) else math.inf

    def of_step(self, micro_batch: float, accumulation: int, ranks: int) -> tuple[Range, Basis]:
        """Seconds of a step, and how they are known.

        Ranks wait for nothing: on a number of ranks that was not timed, a step takes as long as on another.

        Args:
            micro_batch: units of one micro-batch on one rank.
            accumulation: micro-batches that each rank takes in a step.
            ranks: data-parallel ranks.
        """
        timings = self._on(ranks)
        is_on_these = timings[0].ranks == ranks
        for each in timings:
            if each.accumulation == accumulation and _alike(each.micro_batch, micro_batch):
                return exactly(each.seconds), "measured" if is_on_these else "modelled"
        ends = [
            accumulation * of_micro + beside
            for beside in _beside(timings)
            for of_micro in _of_micro_batch(timings, micro_batch, beside)
        ]
        if max(ends) - min(ends) > 1e-9 * max(ends):
            return Range(None, min(ends), max(ends)), "bounds"
        return exactly(max(ends)), "interpolated" if is_on_these else "modelled"

    def times(self, factor: float) -> TimeCurve:
        """The same where everything takes so many times as long."""

        def of(each: Timing) -> Timing:
            beside = None if each.beside is None else each.beside * factor
            return replace(each, seconds=each.seconds * factor, beside=beside)

        return replace(self, timings=tuple(map(of, self.timings)))

    def _on(self, ranks: int) -> Sequence[Timing]:
        """The timings on so many ranks, or else on the number of ranks that is nearest."""
        nearest = min({each.ranks for each in self.timings}, key=lambda n: abs(math.log(n / ranks)))
        return [each for each in self.timings if each.ranks == nearest]


def nearly_whole(size: float) -> float:
    """A size of micro-batches as a whole number, if it is nearly one."""
    return float(round(size)) if abs(size - round(size)) <= _NEARLY * size and round(size) else size


def _alike(size: float, other: float) -> bool:
    return max(size, other) <= _SAME_SIZE * min(size, other)


def _beside(timings: Sequence[Timing]) -> tuple[float, ...]:
    """Seconds of a step beside its micro-batches: one number where they are known, or else the least and the most.

    Where steps were timed whole, two of them bound these seconds: with r times the data in micro-batches that are no
    smaller, the micro-batches take r times as long at most. In micro-batches of one size, they take just that.
    """
    known = sorted(each.beside for each in timings if each.beside is not None)
    most = min(each.seconds for each in timings)
    bounds, exact = [most], list[float]()
    for less, more in itertools.permutations(timings, 2):
        r = more.micro_batch * more.accumulation / (less.micro_batch * less.accumulation)
        if r > _APART and less.micro_batch <= _SAME_SIZE * more.micro_batch:
            bound = (r * less.seconds - more.seconds) / (r - 1)
            (exact if _alike(less.micro_batch, more.micro_batch) else bounds).append(bound)
    if known := known or exact:
        return (min(max(min(known), 0.0), most),)  # a busy machine only adds to it
    return 0.0, max(min(bounds), 0.0)


def _of_micro_batch(timings: Sequence[Timing], micro_batch: float, beside: float) -> tuple[float, ...]:
    """Seconds of a micro-batch: one number between measured sizes; beyond them, those of an empty and a full device.

    Args:
        timings: of one number of ranks.
        micro_batch: units.
        beside: seconds of a step beside its micro-batches.
    """
    by_size: dict[float, list[float]] = {}
    for each in sorted(timings, key=lambda t: t.micro_batch):
        size = next((known for known in by_size if _alike(known, each.micro_batch)), each.micro_batch)
        by_size.setdefault(size, []).append(max(each.seconds - beside, 0.0) / each.accumulation)
    points = [(size, sum(seconds) / len(seconds)) for size, seconds in by_size.items()]
    for (size, seconds), (larger, of_larger) in itertools.pairwise(points):
        if size <= micro_batch <= larger:
            return (seconds + (of_larger - seconds) * (micro_batch - size) / (larger - size),)
    nearest, seconds = points[0] if micro_batch < points[0][0] else points[-1]
    return (seconds,) if _alike(nearest, micro_batch) else (seconds, seconds * micro_batch / nearest)
