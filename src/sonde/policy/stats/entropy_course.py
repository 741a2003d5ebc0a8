"""How a policy's entropy has changed since the start of its run, whether it still changes, and how sure both are."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from sonde.policy.stats.forecast_point import Point, Z
from sonde.stats.intervals import student_t_quantile

Trend = Literal["holds", "falling", "fallen", "rising", "risen", "unknown"]

HOLDS_WITHIN = 0.15
"""Largest change, as a fraction, of an entropy that holds. It matters little: responses stay about as diverse, and the
policy can still learn about as much."""
CHANGED_BY = 0.1
"""Smallest change, as a fraction, that is called a fall or a rise. Below it, one interval in twenty that misses 0 by
chance would still make a verdict."""
NO_CHANGE = 0.01
"""Nats a token. Smaller changes count as none, whatever the entropy is."""
COLLAPSED_BELOW = 0.1
"""Fraction of the level at the start below which a policy hardly explores."""
_HALF_THE_PACE = 0.5
"""A fall goes on if the pace of the last third is at least this fraction of the pace of the whole run."""
_STILL_MOVES = 0.25
"""A change in the last third goes on if at least this fraction of it falls into the later half of the third."""
_PACE_FROM = 6
"""Smallest number of measurements that show a pace: the scatter of 5 changes. With fewer, ends of intervals are far."""
_WALKS = 0.1
"""Part of the scatter between neighbours that standard errors do not explain, at least: a few changes show it badly."""
_SINGLE_BELOW = 10
_ONE_IN = 10
_FEWEST, _MOST = 3, 5
"""A level is the mean of a tenth of all measurements, but of 3 at least and of 5 at most. More would show a collapse
later. A run of fewer than 10 measurements has single measurements as levels."""
_REGION = 100
"""Measurements at each end of a run that errors are judged by, at most."""
_SHORTEST_REGION = 12
_FEWEST_BENDS = 8
"""At each end, from which neighbours show how errors are correlated."""
_ENLARGED_FROM = 30
"""Measurements from which scatter enlarges standard errors. With fewer, a bend of the course looks like scatter."""
_STRONGEST_CORRELATION = 0.75
"""Correlation of neighbouring errors that is allowed for at most. Without a limit, chance widens intervals of short
runs."""
_MEDIAN_OF_CHI_SQUARED = 0.4549
"""With one degree of freedom."""
_SMALLEST_ERROR = 0.1
"""Fraction of the median error of a level's measurements that each counts with at least, in weights."""


@dataclass(frozen=True)
class Level:
    """The mean of a few neighbouring measurements, weighted by their standard errors.

    Attributes:
        nats: nats a token.
        se: its standard error; None if unknown.
        label: its steps, in words.
        n: number of measurements.
    """

    nats: float
    se: float | None
    label: str
    n: int


@dataclass(frozen=True)
class Change:
    """A change of the entropy, with its 95 % interval.

    Attributes:
        nats: nats a token.
        half: half of the interval's width; None if unknown.
        of: the entropy that the change is compared with, in nats a token. It is negative for some continuous
            distributions; its size counts.
    """

    nats: float
    half: float | None
    of: float

    @property
    def low(self) -> float | None:
        """Lower end of the interval in nats; None if unknown."""
        return None if self.half is None else self.nats - self.half

    @property
    def high(self) -> float | None:
        """Upper end."""
        return None if self.half is None else self.nats + self.half

    @property
    def is_small(self) -> bool:
        """Whether a change by more than `HOLDS_WITHIN` is excluded."""
        return self.half is not None and abs(self.nats) + self.half <= max(HOLDS_WITHIN * abs(self.of), NO_CHANGE)

    @property
    def sign(self) -> int:
        """−1 or 1 if the entropy certainly fell or rose, by more than `NO_CHANGE`; otherwise 0."""
        is_certain = self.half is not None and abs(self.nats) > max(self.half, NO_CHANGE)
        return int(math.copysign(1, self.nats)) if is_certain else 0

    def exceeds(self, fraction: float) -> bool:
        """Whether the change is larger than a fraction of the entropy that it is compared with."""
        return abs(self.nats) > fraction * abs(self.of)


@dataclass(frozen=True)
class Pace:
    """How fast an entropy falls, as a fraction of itself, over the last third of the steps.

    Attributes:
        log_per_step: the mean change of its logarithm in a step, below 0.
        half: half of the width of its 95 % interval, by the scatter from one measurement to the next.
        n_steps: the steps that show it.
        earliest: steps from now in which it has halved at the earliest, on the 97.5 % level: if the pace goes on, and
            scatters from step to step as it did. There is no latest: a fall may end (`benchmarks/entropy_pace.py`).
    """

    log_per_step: float
    half: float
    n_steps: int
    earliest: float

    @property
    def halves_in(self) -> float:
        """Steps in which this pace halves the entropy."""
        return math.log(2.0) / -self.log_per_step

    @property
    def fall_per_step(self) -> tuple[float, float, float]:
        """The fraction that is lost in each step, and both ends of its 95 % interval."""
        at, half = self.log_per_step, self.half
        return -math.expm1(at), -math.expm1(at + half), -math.expm1(at - half)


@dataclass(frozen=True)
class Course:
    """The course of the entropy.

    Attributes:
        start: the level at the beginning of the run.
        now: the level at its end.
        whole: the change from the start to now.
        recent: the change from the level at the beginning of the last third of the steps to now.
        n_recent: steps of the last third; more if measurements are few.
        still_moves: whether the change of the last third went on in the later half of the third.
        n_steps: steps from the first measurement to the last.
        first: the first measurement.
        pace: how fast the entropy falls; None unless the fall of the last third is clear from its scatter.
    """

    start: Level
    now: Level
    whole: Change
    recent: Change
    n_recent: int
    still_moves: bool
    n_steps: int
    first: Point
    pace: Pace | None

    @property
    def trend(self) -> Trend:
        """Where the entropy goes now; if it goes nowhere, where it has gone."""
        going = self.recent.sign if self.still_moves else 0
        if going and (self.recent.exceeds(HOLDS_WITHIN) or self._goes_on(going)):
            return "falling" if going < 0 else "rising"
        if self.whole.is_small:
            return "holds"
        if (gone := self.whole.sign) and self.whole.exceeds(CHANGED_BY):
            return "fallen" if gone < 0 else "risen"
        return "unknown"

    @property
    def has_collapsed(self) -> bool:
        """Whether the present level is certainly below `COLLAPSED_BELOW` of the level at the start.

        The levels themselves decide if no standard errors were logged.
        """
        if self.is_continuous:
            return False
        half = Z * math.hypot(self.now.se or 0.0, COLLAPSED_BELOW * (self.start.se or 0.0))
        return self.now.nats + half < COLLAPSED_BELOW * self.start.nats

    @property
    def is_continuous(self) -> bool:
        """Whether a level is negative: only continuous distributions have such an entropy, and no 0 to collapse to."""
        return self.start.nats <= 0 or self.now.nats < 0

    def _goes_on(self, going: int) -> bool:
        pace, pace_of_run = abs(self.recent.nats) * self.n_steps, abs(self.whole.nats) * self.n_recent
        has_changed = self.whole.sign == going and self.whole.exceeds(CHANGED_BY) and not self.whole.is_small
        return has_changed and pace >= _HALF_THE_PACE * pace_of_run


def entropy_course(points: Sequence[Point]) -> Course:
    """The course of the entropy.

    Args:
        points: at least two measurements with an entropy, none of which a restart undid.

    Example:
        >>> def point(step: int, entropy: float) -> Point:
        ...     return Point(step, entropy, None, None, None, False, None, None, False, entropy_se=0.02)
        >>> entropy_course([point(1, 2.7), point(28, 1.2), point(56, 0.4)]).trend
        'falling'
    """
    values = [p.entropy or 0.0 for p in points]
    steps = [p.step for p in points]
    n = len(values)
    errors = entropy_errors(points, values)
    k = measurements_in_level(n)
    start, now = _level(points, values, errors, 0, k), _level(points, values, errors, n - k, n)
    last = steps[-1]
    third = bisect_left(steps, last - (last - steps[0]) / 3)
    begins = max(min(third, n - 2 * k), 0)
    before = _level(points, values, errors, begins, begins + k)
    recent = _change(before, now)
    halfway = (begins + n - k) // 2
    later = now.nats - _level(points, values, errors, halfway, halfway + k).nats
    still_moves = halfway < begins + k or later * recent.nats >= _STILL_MOVES * recent.nats**2
    return Course(
        start,
        now,
        _change(start, now),
        recent,
        max(last - steps[begins], 1),
        still_moves,
        max(last - steps[0], 1),
        points[0],
        _falling_pace(points[max(min(third, n - _PACE_FROM), 0) :], now.n),
    )


def _falling_pace(points: Sequence[Point], n_level: int) -> Pace | None:
    """The pace of some measurements, if the logarithm of the entropy certainly falls.

    The logarithm is a random walk with a drift, and each measurement adds its own error to it. The walk's variance a
    step is that of the changes between neighbours, less what their standard errors explain.

    Args:
        points: the measurements.
        n_level: how many of them make the present level.
    """
    x = [p.step for p in points]
    n, span = len(x), x[-1] - x[0]
    if n < _PACE_FROM or min(p.entropy or 0.0 for p in points) <= 0.0 or len(set(x)) < n:
        return None
    y = [math.log(p.entropy or 1.0) for p in points]
    noise = [((p.entropy_se or 0.0) / (p.entropy or 1.0)) ** 2 for p in points]
    centre, mean = sum(x) / n, sum(y) / n
    spread = sum((at - centre) ** 2 for at in x)
    drift = sum((at - centre) * (value - mean) for at, value in zip(x, y, strict=True)) / spread
    steps = [b - a for a, b in pairwise(x)]
    seen = sum((b - a - drift * d) ** 2 / d for (a, b), d in zip(pairwise(y), steps, strict=True)) / (n - 2)
    explained = sum((a + b) / d for (a, b), d in zip(pairwise(noise), steps, strict=True)) / (n - 1)
    walk, error = max(seen - explained, _WALKS * seen), sum(noise) / n
    # Of the slope of least squares: 6/5 of the variance of a walk's mean step, and that of independent errors.
    quantile, variance = student_t_quantile(0.975, n - 2), 1.2 * walk / span + error / spread
    half = quantile * math.sqrt(variance)
    if drift + half >= 0.0:
        return None

    # The lower end of the interval of the logarithm's change reaches −log 2 after τ steps, the smaller root of
    # (drift·τ + log 2)² = quantile²·(walk·τ + variance·τ² + error/n_level).
    a, b = drift**2 - half**2, drift * math.log(2.0) - quantile**2 * walk / 2
    c = math.log(2.0) ** 2 - quantile**2 * error / n_level
    return Pace(drift, half, span, max((-b - math.sqrt(b**2 - a * c)) / a, 0.0))


def measurements_in_level(n: int) -> int:
    """How many of n measurements make a level.

    Example:
        >>> [measurements_in_level(n) for n in (2, 9, 10, 40, 1000)]
        [1, 1, 3, 4, 5]
    """
    return 1 if n < _SINGLE_BELOW else max(_FEWEST, min(n // _ONE_IN, _MOST))


def _level(points: Sequence[Point], values: Sequence[float], errors: Errors | None, begin: int, end: int) -> Level:
    """The level of the measurements from `begin` to before `end`. The later half of a run has the errors of its end."""
    first, last = points[begin].step, points[end - 1].step
    label = f"at step {last:,}" if first == last else f"at steps {first:,} to {last:,}"
    if errors is None:
        return Level(sum(values[begin:end]) / (end - begin), None, label, end - begin)
    factor = errors.first if begin + end <= len(values) else errors.last
    return Level(*errors.mean(values, begin, end, factor), label, end - begin)


def _change(start: Level, end: Level) -> Change:
    half = None if start.se is None or end.se is None else Z * math.hypot(start.se, end.se)
    return Change(end.nats - start.nats, half, start.nats)


@dataclass(frozen=True)
class Errors:
    """How far each measurement may be wrong.

    Attributes:
        each: standard errors in nats a token.
        first: factor on the standard errors at the start of the run.
        last: the factor at its end.
        correlation: of the errors of neighbouring measurements.
    """

    each: Sequence[float]
    first: float = 1.0
    last: float = 1.0
    correlation: float = 0.0

    def mean(self, values: Sequence[float], begin: int, end: int, factor: float) -> tuple[float, float]:
        """The weighted mean of `values[begin:end]` with its standard error, in nats.

        Args:
            values: all entropies of the run.
            begin: index of the first measurement.
            end: index after the last measurement.
            factor: `first` or `last`.
        """
        own, each = values[begin:end], self.each[begin:end]
        floor = max(_SMALLEST_ERROR * median(each), min(each))
        weights = [(floor / max(error, floor)) ** 2 if floor else 1.0 for error in each]
        total = sum(weights)
        nats = sum(w * value for w, value in zip(weights, own, strict=True)) / total
        independent = math.hypot(*(w * error for w, error in zip(weights, each, strict=True))) / total
        return nats, factor * independent * math.sqrt(variance_factor(self.correlation, len(own)))


def entropy_errors(points: Sequence[Point], values: Sequence[float]) -> Errors | None:
    """The errors of a run's entropies; None if no standard error was logged.

    A measurement without a standard error, as that of one prompt, has the median of the others. Scatter is how far each
    measurement lies from the line between its neighbours. The median counts, since the beginning of a run may bend for
    good reason.
    """
    n = len(values)
    known = [p.entropy_se for p in points if p.entropy_se is not None]
    if not known:
        return None
    each = [median(known) if p.entropy_se is None else p.entropy_se for p in points]
    region = min(max(n // 3, _SHORTEST_REGION), _REGION)
    ends = (range(min(region, n)), range(max(n - region, 0), n))
    both = sorted({*ends[0], *ends[1]})
    near = [_bends(points, values, each, 1, indices) for indices in (both, *ends)]
    if min(map(len, near)) < _FEWEST_BENDS:
        return Errors(each)
    correlation = _correlation(near[0], _bends(points, values, each, 2, both))
    if n < _ENLARGED_FROM:
        return Errors(each, correlation=correlation)
    first, last = (math.sqrt(median(b) / _MEDIAN_OF_CHI_SQUARED / _bend(correlation)) for b in near[1:])
    return Errors(each, max(first, 1.0), max(last, 1.0), correlation)


def variance_factor(correlation: float, n: int) -> float:
    """The variance of a mean of n, over the variance for independent errors.

    The errors follow an autoregression of first order: at a distance of j, their correlation is ρʲ.

    Example:
        >>> variance_factor(0.0, 5), variance_factor(0.5, 2)
        (1.0, 1.5)
    """
    return 1 + 2 * sum((1 - j / n) * correlation**j for j in range(1, n))


def _bends(
    points: Sequence[Point], values: Sequence[float], errors: Sequence[float], gap: int, indices: Sequence[int]
) -> list[float]:
    """How far values lie from the line between neighbours, squared, over the variance of this distance."""
    bends = []
    for i in indices:
        if i < gap or i + gap >= len(values):
            continue
        before, here, after = points[i - gap].step, points[i].step, points[i + gap].step
        if before == after:
            continue
        t = (here - before) / (after - before)
        distance = values[i] - (1 - t) * values[i - gap] - t * values[i + gap]
        variance = errors[i] ** 2 + ((1 - t) * errors[i - gap]) ** 2 + (t * errors[i + gap]) ** 2
        bends.append(distance**2 / variance if variance else 0.0)
    return bends


def _bend(correlation: float) -> float:
    """The variance of a bend between direct neighbours, over the variance for independent errors: γ₀, γ₁ and γ₂."""
    return 1 - 4 / 3 * correlation + correlation**2 / 3


def _correlation(near: Sequence[float], far: Sequence[float]) -> float:
    """The correlation of neighbours at which bends over two measurements exceed bends over one as they do."""
    if not far or not (smaller := median(near)):
        return 0.0
    ratio, low, high = median(far) / smaller, 0.0, _STRONGEST_CORRELATION
    for _ in range(20):  # the ratio grows with the correlation
        middle = (low + high) / 2
        low, high = (middle, high) if _bend(middle**2) < ratio * _bend(middle) else (low, middle)
    return low
