"""How long an optimizer step takes, over the size of its micro-batches: as measured, between sizes, and beyond them.

A step of A micro-batches of m units on each rank takes A·f(m) + o seconds: f is what a micro-batch takes, o what a step
takes beside them, the optimizer's update above all. f is proportional to m only on a device that is full. On one that
is not, a larger micro-batch takes hardly longer. So f is measured at several sizes, and interpolated between them: a
line through a few sizes misses by up to 76 %, since caches end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sonde.decision.law import Range, exactly

Basis = Literal["measured", "interpolated", "modelled", "bounds"]
"""How a time is known: of such steps; between measured sizes; of as many ranks as were not measured, which are taken to
wait for nothing; or only for a device that is not full, and for one that is."""
SCHEMA = 1
"""Of the file of a trial."""
_SAME_SIZE = 1.05
"""Micro-batches within this factor are the same: an epoch's last windows lower an average a little."""


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

    @property
    def batch(self) -> float:
        """Units of one step."""
        return self.micro_batch * self.accumulation * self.ranks


@dataclass(frozen=True)
class TimeCurve:
    """The time of a step over its micro-batches.

    Attributes:
        timings: at least one, of one model on one kind of device.
        too_large: the smallest micro-batch that did not fit into memory; infinite where all did.
    """

    timings: tuple[Timing, ...]
    too_large: float = math.inf

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

    def of_step(self, micro_batch: float, accumulation: int, ranks: int) -> Range:
        """Seconds of a step.

        Ranks wait for nothing: on a number of ranks that was not timed, a step takes as long as on another.

        Args:
            micro_batch: units of one micro-batch on one rank.
            accumulation: micro-batches that each rank takes in a step.
            ranks: data-parallel ranks.
        """
        timings = self._on(ranks)
        for each in timings:
            if each.accumulation == accumulation and _alike(each.micro_batch, micro_batch):
                return exactly(each.seconds)
        ends = [
            accumulation * of_micro + beside
            for beside in _beside(timings)
            for of_micro in _of_micro_batch(timings, micro_batch, beside)
        ]
        is_known = max(ends) - min(ends) <= 1e-9 * max(ends)
        return Range(max(ends) if is_known else None, min(ends), max(ends))

    def basis(self, micro_batch: float, accumulation: int, ranks: int) -> Basis:
        """How the seconds of such a step are known."""
        if self.of_step(micro_batch, accumulation, ranks).middle is None:
            return "bounds"
        timings = self._on(ranks)
        if timings[0].ranks != ranks:
            return "modelled"
        same = (t for t in timings if t.accumulation == accumulation and _alike(t.micro_batch, micro_batch))
        return "measured" if any(same) else "interpolated"

    def _on(self, ranks: int) -> Sequence[Timing]:
        """The timings on so many ranks, or else on the number of ranks that is nearest."""
        nearest = min({each.ranks for each in self.timings}, key=lambda n: abs(math.log(n / ranks)))
        return [each for each in self.timings if each.ranks == nearest]


def curve_as_json(curve: TimeCurve) -> dict[str, Any]:
    """A curve for a file."""
    too_large = curve.too_large if math.isfinite(curve.too_large) else None
    return {"schema": SCHEMA, "timings": [vars(each) for each in curve.timings], "too_large": too_large}


def curve_of_json(known: Mapping[str, Any]) -> TimeCurve:
    """A curve from a file.

    Raises:
        ValueError: for what is no such file.
    """
    try:
        timings = tuple(Timing(**each) for each in known["timings"])
        too_large = math.inf if known["too_large"] is None else float(known["too_large"])
        if known["schema"] != SCHEMA or not timings or not all(map(_is_sound, timings)) or not too_large > 0:
            raise ValueError(f"schema {known['schema']}, {len(timings)} timings")
        return TimeCurve(timings, too_large)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _is_sound(timing: Timing) -> bool:
    sizes = (timing.micro_batch, timing.accumulation, timing.ranks, timing.seconds)
    parts = [each for each in (timing.beside, timing.memory) if each is not None]
    return all(0 < each < math.inf for each in sizes) and all(0 <= each < math.inf for each in parts)


def _alike(size: float, other: float) -> bool:
    return max(size, other) <= _SAME_SIZE * min(size, other)


def _beside(timings: Sequence[Timing]) -> tuple[float, ...]:
    """Seconds of a step beside its micro-batches: one number where they are known, or else the least and the most."""
    known = sorted(each.beside for each in timings if each.beside is not None)
    if not known:
        # Two accumulations of one size tell both parts: s = A·f + o.
        known = sorted(
            (b.accumulation * a.seconds - a.accumulation * b.seconds) / (b.accumulation - a.accumulation)
            for a in timings
            for b in timings
            if a.accumulation < b.accumulation and _alike(a.micro_batch, b.micro_batch)
        )
    least = min(each.seconds for each in timings)
    return (min(max(known[0], 0.0), least),) if known else (0.0, least)  # a busy machine only adds to it


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
