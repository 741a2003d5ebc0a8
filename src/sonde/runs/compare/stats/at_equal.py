"""Two curves at an equal place, and where a curve comes down to a loss: by interpolation, never beyond the points.

Curves are read over the logarithm of the place (units, steps or seconds): there, a falling loss is nearly straight from
one evaluation to the next, also where the next one is twice as far.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sonde.evidence.stats.loss_curves import Curve, falling, units_at
from sonde.stats.intervals import LEVEL, student_t_quantile
from sonde.wording import number

Points = Sequence[tuple[float, float]]
"""Places, positive and rising, each with a value."""

_NEAR = ((0.25, 10), (0.5, 5))
"""A line goes through the values of this last part, if there are so many; the next part if there are not."""
_BLOCKS = 5
"""Neighbouring values are averaged to so many points of the line: their errors may be correlated."""


@dataclass(frozen=True)
class Difference:
    """A value of one run minus that of another one.

    Attributes:
        value: the difference.
        low: lower end of its 95 % interval; None where there are too few values for an interval.
        high: upper end.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None:
            return f"about {number(self.value)}"
        return f"{number(self.value)} ({number(self.low)} to {number(self.high)})"


@dataclass(frozen=True)
class _Level:
    """A value at a place: its variance and degrees of freedom, None where too few values scatter about it."""

    value: float
    variance: float | None = None
    freedom: float = 0.0


def difference(ours: Points, theirs: Points) -> Difference | None:
    """The difference of two curves at the last place that both have reached.

    Through the last values of each curve before that place goes a straight line, whose scatter gives the interval.
    Where both have the same places, the line goes through the differences, so what both have in common cancels (the
    same batches in the same order). Where a curve has too few values there, the line between the two values around the
    place stands for it, and there is no interval.

    With independent errors, 97 % of the intervals hold. With errors whose neighbours correlate by 0.5, 95 % do of runs
    with 100 values, and 91 % with 20; at 0.8, 90 % and 73 % (`tests/runs/compare/test_at_equal.py`).

    Args:
        ours: values of one run, such as its losses.
        theirs: values of the other one.

    Returns:
        None where no place lies within both curves.

    Example:
        >>> ours, theirs = ([(i, level - math.log(i)) for i in range(1, n)] for level, n in ((2.5, 41), (2.0, 61)))
        >>> round(difference(ours, theirs).value, 6)
        0.5
    """
    if not ours or not theirs:
        return None
    place = min(ours[-1][0], theirs[-1][0])
    if place < max(ours[0][0], theirs[0][0]):
        return None
    known = dict(theirs)
    in_both = [(at, value - known[at]) for at, value in ours if at in known]
    if in_both and in_both[-1][0] == place and (level := _on_a_line(in_both, place)) is not None:
        return _with_interval(level)
    one, other = level_at(ours, place), level_at(theirs, place)
    if one.variance is None or other.variance is None:
        return Difference(one.value - other.value)
    variance, each = one.variance + other.variance, (one, other)
    # Welch and Satterthwaite's degrees of freedom of a sum of two variances.
    parts = sum((level.variance or 0.0) ** 2 / level.freedom for level in each)
    return _with_interval(_Level(one.value - other.value, variance, variance**2 / parts if parts else 1.0))


def _with_interval(level: _Level) -> Difference:
    half = student_t_quantile(0.5 + LEVEL / 2, level.freedom) * math.sqrt(level.variance or 0.0)
    return Difference(level.value, level.value - half, level.value + half)


def level_at(points: Points, place: float) -> _Level:
    """A curve at a place within its points: on the line through the values before it, or between its neighbours."""
    return _on_a_line(points, place) or _Level(_between(points, place))


def _on_a_line(points: Points, place: float) -> _Level | None:
    """The end of the line through the last values before a place; None where these are too few."""
    for part, fewest in _NEAR:
        near = [each for each in points if (1 - part) * place <= each[0] <= place]
        if len(near) >= fewest:
            ends = [k * len(near) // _BLOCKS for k in range(_BLOCKS + 1)]
            blocks = [near[a:b] for a, b in itertools.pairwise(ends)]
            x = [statistics.fmean(math.log(at / place) for at, _ in block) for block in blocks]
            return _end_of_line(x, [statistics.fmean(value for _, value in block) for block in blocks])
    return None


def _end_of_line(x: Sequence[float], y: Sequence[float]) -> _Level:
    """The line of least squares at x = 0, with its variance there."""
    slope, end = statistics.linear_regression(x, y)
    freedom, mean = len(x) - 2, statistics.fmean(x)
    scatter = sum((b - end - slope * a) ** 2 for a, b in zip(x, y, strict=True)) / freedom
    return _Level(end, scatter * (1 / len(x) + mean**2 / sum((a - mean) ** 2 for a in x)), freedom)


def _between(points: Points, place: float) -> float:
    after = bisect.bisect_left(points, place, key=lambda point: point[0])
    at, value = points[after]
    if at == place:
        return value
    before, value_before = points[after - 1]
    return value_before + (value - value_before) * math.log(place / before) / math.log(at / before)


def reached(losses: Points, loss: float) -> float | None:
    """The place at which a curve comes down to a loss, by the falling curve that is nearest to it.

    Args:
        losses: of a run.
        loss: that its curve has reached, but for the error of its last values.

    Returns:
        None where the curve begins below that loss.

    Example:
        >>> round(reached([(100, 4.0), (200, 3.0), (400, 2.0)], 3.5), 3)
        141.421
    """
    if level_at(losses, losses[-1][0]).value >= loss:  # it is just reached
        return losses[-1][0]
    curve = falling(Curve(tuple(math.log(at) for at, _ in losses), tuple(value for _, value in losses)))
    if (at := units_at(curve, max(loss, curve.losses[-1]))) is None:
        return None
    return math.exp(at)
