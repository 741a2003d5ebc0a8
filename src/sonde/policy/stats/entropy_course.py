"""How a policy's entropy has changed since the start of its run, where it is going, and how sure both are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from sonde.policy.stats.forecast_point import Point, Z
from sonde.policy.stats.steps_kept import StepsKept, steps_kept
from sonde.stats.intervals import student_t_quantile

Trend = Literal["holds", "falling", "fallen", "rising", "risen", "unknown"]

HOLDS_WITHIN = 0.15
"""Largest change, as a fraction, of an entropy that holds. A change within it moves neither the diversity of responses
nor the room to learn much; a verdict that allowed more (it was a half) called a fall by 45 % no fall."""
CHANGED_BY = 0.1
"""Smallest change, as a fraction, that is called a fall or a rise. Below it, one interval in twenty that misses 0 by
chance would still make a verdict."""
NO_CHANGE = 0.01
"""Nats a token. Smaller changes count as none, whatever the entropy is."""
SCATTER_FROM = 10
"""Measurements from which their own scatter says how far each is wrong. With fewer, a bend of the course may look like
scatter, so their standard errors count."""
_HALF_THE_PACE = 0.5
"""A fall goes on if the pace of the last third is at least this fraction of the pace of the whole run."""
_FIRST_LINE = 4
"""Measurements in the shortest line that gives a level; the next has twice as many."""
_AGREES = 2.5
"""Standard errors within which a line agrees with the shorter one before it."""
_LEAST_SCALE = 0.3
"""Fraction of its standard error that a measurement has as an error at least. If each step is measured on the same
prompts, measurements hardly scatter, but all of them share the error of these prompts."""
_MEDIAN_OF_CHI_SQUARED = 0.4549
"""With one degree of freedom."""


@dataclass(frozen=True)
class Level:
    """The entropy at one end of the run: the end of a line through all measurements that agree with the outermost one.

    Attributes:
        nats: nats a token.
        se: its standard error; None if unknown.
        label: the outermost step, in words.
        n: number of measurements on the line.
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
        of: the entropy that the change is compared with, in nats a token.
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
        return self.half is not None and abs(self.nats) + self.half <= max(HOLDS_WITHIN * self.of, NO_CHANGE)

    @property
    def sign(self) -> int:
        """−1 or 1 if the entropy certainly fell or rose, by more than `NO_CHANGE`; otherwise 0."""
        is_certain = self.half is not None and abs(self.nats) > max(self.half, NO_CHANGE)
        return int(math.copysign(1, self.nats)) if is_certain else 0

    def exceeds(self, fraction: float) -> bool:
        """Whether the change is larger than a fraction of the entropy that it is compared with."""
        return abs(self.nats) > fraction * self.of


@dataclass(frozen=True)
class Course:
    """The course of the entropy.

    Attributes:
        start: the level at the beginning of the run.
        now: the level at its end.
        whole: the change from the start to now.
        ahead: the change in the next `n_ahead` steps, if the straight line through the last third goes on.
        n_ahead: as many steps as the last third has; more than a third of the run if measurements are few.
        n_steps: steps from the first measurement to the last.
        kept: the measurements that count.
    """

    start: Level
    now: Level
    whole: Change
    ahead: Change
    n_ahead: int
    n_steps: int
    kept: StepsKept

    @property
    def trend(self) -> Trend:
        """Where the entropy goes now; if it goes nowhere, where it has gone."""
        if (going := self.ahead.sign) and (self.ahead.exceeds(HOLDS_WITHIN) or self._goes_on(going)):
            return "falling" if going < 0 else "rising"
        if self.whole.is_small:
            return "holds"
        if (gone := self.whole.sign) and self.whole.exceeds(CHANGED_BY):
            return "fallen" if gone < 0 else "risen"
        return "unknown"

    def _goes_on(self, going: int) -> bool:
        pace, pace_of_run = abs(self.ahead.nats) * self.n_steps, abs(self.whole.nats) * self.n_ahead
        has_changed = self.whole.sign == going and self.whole.exceeds(CHANGED_BY) and not self.whole.is_small
        return has_changed and pace >= _HALF_THE_PACE * pace_of_run


def entropy_course(points: Sequence[Point]) -> Course:
    """The course of the entropy.

    Args:
        points: at least two with an entropy, in the order in which they were measured.

    Example:
        >>> def point(step: int, entropy: float) -> Point:
        ...     return Point(step, entropy, None, None, None, False, None, None, False, entropy_se=0.02)
        >>> entropy_course([point(1, 2.7), point(28, 1.2), point(56, 0.4)]).trend
        'falling'
    """
    kept = steps_kept([p for p in points if p.entropy is not None])
    values = [p.entropy or 0.0 for p in kept.points]
    errors = _standard_errors(kept, values)
    backwards = _Errors(errors.each[::-1], errors.quantile) if errors else None
    start, now = _level(values, errors, kept.label(0)), _level(values[::-1], backwards, kept.label(-1))
    half = errors.quantile * math.hypot(start.se or 0.0, now.se or 0.0) if errors else None
    ahead, n_ahead = _ahead(kept.positions, values, errors, now.nats)
    n_steps = max(kept.positions[-1] - kept.positions[0], 1)
    return Course(start, now, Change(now.nats - start.nats, half, start.nats), ahead, n_ahead, n_steps, kept)


@dataclass(frozen=True)
class _Errors:
    """How far each measurement may be wrong.

    Attributes:
        each: standard errors, in nats a token.
        quantile: standard errors from the centre of a 95 % interval to its end.
    """

    each: list[float]
    quantile: float


def _standard_errors(kept: StepsKept, values: Sequence[float]) -> _Errors | None:
    """The error of each measurement; None if it is unknown.

    A few measurements have the standard errors that were measured with them. Many measurements show their errors by how
    far each lies from the line between its neighbours. The standard errors, or the entropies themselves in a log
    without standard errors, then only say which measurements have larger errors than others.
    """
    known = [p.entropy_se for p in kept.points if p.entropy_se is not None]
    has_errors = len(known) == len(values)
    each = known if has_errors else [max(value, NO_CHANGE) for value in values]
    bends = _squared_bends(kept, values, each)
    if len(bends) < SCATTER_FROM - 2:
        return _Errors(known, Z) if has_errors else None
    # The median, since the beginning of a run may bend for good reason. Neighbouring bends share measurements: about a
    # third of them is independent.
    scale = math.sqrt(median(bends) / _MEDIAN_OF_CHI_SQUARED)
    if has_errors:
        scale = max(scale, _LEAST_SCALE)
    return _Errors([scale * error for error in each], student_t_quantile(0.975, len(bends) / 3))


def _squared_bends(kept: StepsKept, values: Sequence[float], errors: Sequence[float]) -> list[float]:
    """How far each value lies from the line between its neighbours, squared, over the variance of this distance."""
    bends = []
    for i in range(1, len(values) - 1):
        before, here, after = kept.positions[i - 1 : i + 2]
        if kept.starts[i - 1] != kept.starts[i + 1] or before == after:  # the restart may have changed the weights
            continue
        t = (here - before) / (after - before)
        distance = values[i] - (1 - t) * values[i - 1] - t * values[i + 1]
        variance = errors[i] ** 2 + ((1 - t) * errors[i - 1]) ** 2 + (t * errors[i + 1]) ** 2
        bends.append(distance**2 / variance if variance else 0.0)
    return bends


def _level(values: Sequence[float], errors: _Errors | None, label: str) -> Level:
    """The first value; or the beginning of a line through the first few values, of as many as agree with it."""
    if errors is None:
        return Level(values[0], None, label, 1)
    level, se = Level(values[0], errors.each[0], label, 1), errors.each[0]
    most = max(len(values) // 3, min(len(values) // 2, 2 * _FIRST_LINE))  # a third of the run; half of a short run
    n = min(_FIRST_LINE, most)
    while level.n < n and n >= 3:
        centre, spread = (n - 1) / 2, n * (n * n - 1) / 12
        weights = [1 / n - centre * (i - centre) / spread for i in range(n)]
        nats = sum(w * value for w, value in zip(weights, values, strict=False))
        wider_se = math.hypot(*(w * error for w, error in zip(weights, errors.each, strict=False)))
        # The shorter line uses some of the same values: its extra variance is the difference of the two variances.
        if abs(nats - level.nats) > _AGREES * math.sqrt(abs(se**2 - wider_se**2)):
            break
        level, se, n = Level(nats, wider_se, label, n), wider_se, min(2 * n, most)
    return level


def _ahead(positions: Sequence[int], values: Sequence[float], errors: _Errors | None, now: float) -> tuple[Change, int]:
    """The change that the straight line through the last third of the steps says for as many steps again."""
    last = positions[-1]
    third = last - (last - positions[0]) / 3
    begins = max(min(next(i for i, x in enumerate(positions) if x >= third), len(values) - 3), 0)
    x, y = positions[begins:], values[begins:]
    n_ahead, centre = max(last - x[0], 1), fmean(x)
    spread = sum((a - centre) ** 2 for a in x)
    slope = sum((a - centre) * b for a, b in zip(x, y, strict=True)) / spread if spread else 0.0
    half = None
    if errors is not None and spread:
        own = errors.each[begins:]
        half = errors.quantile * n_ahead * math.hypot(*((a - centre) * e for a, e in zip(x, own, strict=True))) / spread
    return Change(max(slope * n_ahead, -now), half, now), n_ahead  # an entropy cannot fall below 0
