"""How two runs differ: a ratio of noise scales at each point, from where on it differs from 1, and means of values.

Readings of one run are correlated: a noise scale is the level of a filter. So the interval of a ratio comes from the
two intervals at one point, and never from the scatter of many points. It covers the error of measuring these two runs.
How far another seed would be is not in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sonde.stats.intervals import LEVEL, RatioInterval, student_t_quantile, unresolved
from sonde.wording import number

PART = 0.25
"""Values are compared over this last part of what two runs have in common."""
_BLOCKS = (5, 4, 3)
"""Blocks of that part, as many as have values of both runs."""

Series = Sequence[tuple[float, float]]
"""Positions, rising, each with a value."""


def ratio_between(numerator: RatioInterval, denominator: RatioInterval) -> RatioInterval:
    """The ratio of the noise scales of two independent runs.

    In logs, the distances from an estimate to its ends add up as the sides of a right triangle, each side of the
    interval by itself. Where only a bound is known of one, the ends are divided: such an interval is rather too wide.

    Args:
        numerator: one noise scale, as far as it is known, at 95 %.
        denominator: the other one.

    Reference:
        Zou and Donner, "Construction of confidence limits about effect measures: a general approach", Statistics in
        Medicine 27 (2008) 1693–1702.

    Example:
        >>> one, other = RatioInterval("resolved", 90, 160, ratio=120), RatioInterval("resolved", 50, 72, ratio=60)
        >>> found = ratio_between(one, other)
        >>> found.ratio, round(found.low, 2), round(found.high, 2)
        (2.0, 1.42, 2.81)
    """
    if numerator.low is None or numerator.high is None or denominator.low is None or denominator.high is None:
        return unresolved("a noise scale is not known yet")
    if numerator.ratio and denominator.ratio and numerator.low > 0 and denominator.low > 0:
        ratio = numerator.ratio / denominator.ratio
        down = math.hypot(math.log(numerator.ratio / numerator.low), math.log(denominator.high / denominator.ratio))
        up = math.hypot(math.log(numerator.high / numerator.ratio), math.log(denominator.ratio / denominator.low))
        return RatioInterval("resolved", ratio * math.exp(-down), ratio * math.exp(up), ratio=ratio)
    low = numerator.low / denominator.high if denominator.high else 0.0
    high = numerator.high / denominator.low if denominator.low else math.inf
    if low > 0:
        return RatioInterval("lower_bound", low, math.inf, "only a bound is known of a noise scale")
    if high < math.inf:
        return RatioInterval("upper_bound", 0.0, high, "only a bound is known of a noise scale")
    return unresolved("only bounds are known of the noise scales")


def side_of_1(ratio: RatioInterval) -> int:
    """1 if the interval lies above 1, −1 if it lies below, 0 if it contains 1 or nothing is known."""
    if ratio.low is None or ratio.high is None:
        return 0
    return (ratio.low > 1) - (ratio.high < 1)


def last_stretch(ratios: Sequence[RatioInterval]) -> int | None:
    """Where the last stretch begins in which every interval excludes 1, all on one side.

    Each interval holds at 95 % by itself. A stretch reaches up to the last ratio, so runs that do not differ have a
    stretch in 5 % of all cases at most, whatever their number of readings. How long it is is known less well.

    Args:
        ratios: from point to point.

    Returns:
        The index of its first ratio; None where the last interval contains 1.
    """
    if not ratios or not (side := side_of_1(ratios[-1])):
        return None
    return next((i + 1 for i in reversed(range(len(ratios))) if side_of_1(ratios[i]) != side), 0)


@dataclass(frozen=True)
class Difference:
    """The mean of a value in one run minus that in another, or over it.

    Attributes:
        value: the difference, or the ratio.
        low: lower end of its 95 % interval.
        high: upper end.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{number(self.value)} ({number(self.low)} to {number(self.high)})"


def mean_difference(ours: Series, theirs: Series) -> Difference | None:
    """The difference of two means over the last quarter of what two runs have in common.

    The quarter is cut in blocks. Each block has a mean of either run. Student's t over the differences of the blocks
    gives the interval: what both have in common cancels, and errors that last for less than a block do not count twice.
    Of 50 readings in the quarter, 95 % of the intervals hold if errors are independent, 93 % if neighbours correlate by
    0.5, and 79 % at 0.8, where errors last as long as a block (`tests/runs/compare/test_differences.py`).

    Args:
        ours: values of one run, such as its losses.
        theirs: values of the other one.

    Returns:
        None where fewer than 3 blocks have values of both.

    Example:
        >>> ours, theirs = ([(float(i), level + 0.1 * (i % 2)) for i in range(1, 65)] for level in (2.0, 1.5))
        >>> round(mean_difference(ours, theirs).value, 6)
        0.5
    """
    if not ours or not theirs:
        return None
    end = min(ours[-1][0], theirs[-1][0])
    for n in _BLOCKS:
        pairs = list(zip(_block_means(ours, end, n), _block_means(theirs, end, n), strict=True))
        differences = [a - b for a, b in pairs if a is not None and b is not None]
        if len(differences) == n:
            mean = statistics.fmean(differences)
            half = student_t_quantile(0.5 + LEVEL / 2, n - 1) * statistics.stdev(differences) / math.sqrt(n)
            return Difference(mean, mean - half, mean + half)
    return None


def _block_means(series: Series, end: float, n: int) -> list[float | None]:
    """The mean of each of n blocks of the last quarter before a position; None where a block has no value."""
    blocks: list[list[float]] = [[] for _ in range(n)]
    start = (1 - PART) * end
    for at, value in series:
        if start < at <= end:
            blocks[min(math.ceil(n * (at - start) / (end - start)), n) - 1].append(value)
    return [statistics.fmean(block) if block else None for block in blocks]
