"""How far measured entropies may be wrong: by their own standard errors, their scatter, and correlated neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from sonde.policy.stats.forecast_point import StepsKept, Z
from sonde.stats.intervals import student_t_quantile

SCATTER_FROM = 10
"""Measurements from which their own scatter says how far each is wrong, in a log without standard errors."""
REGION = 100
"""Measurements at each end of a run that errors are judged by, at most."""
_SHORTEST_REGION = 12
_ENLARGED_FROM = 30
"""Measurements from which scatter enlarges standard errors. With fewer, a bend of the course looks like scatter."""
_STRONGEST_CORRELATION = 0.75
"""Correlation of neighbouring errors that is allowed for at most. Without a limit, chance widens intervals of short
runs."""
_INDEPENDENT_BENDS = 0.5
"""Part of the bends that counts as independent: neighbouring bends share measurements."""
_MEDIAN_OF_CHI_SQUARED = 0.4549
"""With one degree of freedom."""
_OUTLIER = 3.0
"""Times the usual scatter at which the scatter of a level's own measurements counts instead."""
_SMALLEST_ERROR = 0.1
"""Fraction of the median error of a level's measurements that each counts with at least, in weights."""


@dataclass(frozen=True)
class Errors:
    """How far each measurement may be wrong.

    Attributes:
        each: standard errors in nats a token; all 1 if none were logged.
        first: factor on the standard errors at the start of the run.
        last: the factor at its end.
        correlation: of the errors of neighbouring measurements.
        quantile: standard errors from the centre of a 95 % interval to its end.
        are_logged: whether the standard errors were logged.
    """

    each: Sequence[float]
    first: float
    last: float
    correlation: float
    quantile: float
    are_logged: bool

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
        if not self.are_logged and (scatter := _scatter_around_line(own)) > _OUTLIER * factor:
            factor = scatter
        return nats, factor * independent * math.sqrt(variance_factor(self.correlation, len(own)))


def entropy_errors(kept: StepsKept, values: Sequence[float]) -> Errors | None:
    """The errors of a run's entropies; None if they are not known.

    Scatter is how far each measurement lies from the line between its neighbours. The median counts, since the
    beginning of a run may bend for good reason.
    """
    n = len(values)
    known = [p.entropy_se for p in kept.points if p.entropy_se is not None]
    are_logged = len(known) == n
    each = known if are_logged else [1.0] * n
    region = min(max(n // 3, _SHORTEST_REGION), REGION)
    ends = (range(min(region, n)), range(max(n - region, 0), n))
    both = sorted({*ends[0], *ends[1]})
    near = [_bends(kept, values, each, 1, indices) for indices in (both, *ends)]
    if min(map(len, near)) < SCATTER_FROM - 2:
        return Errors(each, 1.0, 1.0, 0.0, Z, are_logged) if are_logged else None
    far = _bends(kept, values, each, 2, both)
    correlation = _correlation(near[0], far)
    first, last = (math.sqrt(median(b) / _MEDIAN_OF_CHI_SQUARED / _bend(correlation)) for b in near[1:])
    if are_logged:
        is_enlarged = n >= _ENLARGED_FROM
        first, last = (max(factor, 1.0) if is_enlarged else 1.0 for factor in (first, last))
        return Errors(each, first, last, correlation, Z, are_logged)
    quantile = student_t_quantile(0.975, _INDEPENDENT_BENDS * len(near[1]))
    return Errors(each, first, last, correlation, quantile, are_logged)


def variance_factor(correlation: float, n: int) -> float:
    """The variance of a mean of n, over the variance for independent errors.

    The errors follow an autoregression of first order: at a distance of j, their correlation is ρʲ.

    Example:
        >>> variance_factor(0.0, 5), variance_factor(0.5, 2)
        (1.0, 1.5)
    """
    return 1 + 2 * sum((1 - j / n) * correlation**j for j in range(1, n))


def _bends(
    kept: StepsKept, values: Sequence[float], errors: Sequence[float], gap: int, indices: Sequence[int]
) -> list[float]:
    """How far values lie from the line between neighbours, squared, over the variance of this distance."""
    bends = []
    for i in indices:
        if i < gap or i + gap >= len(values):
            continue
        before, here, after = kept.positions[i - gap], kept.positions[i], kept.positions[i + gap]
        if kept.starts[i - gap] != kept.starts[i + gap] or before == after:  # the restart may have changed the weights
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


def _scatter_around_line(values: Sequence[float]) -> float:
    """Root mean square distance from the line of least squares, by degrees of freedom; 0 for fewer than 3 values."""
    n = len(values)
    if n < 3:
        return 0.0
    centre, mean = (n - 1) / 2, sum(values) / n
    slope = sum((i - centre) * value for i, value in enumerate(values)) / (n * (n * n - 1) / 12)
    return math.sqrt(sum((v - mean - slope * (i - centre)) ** 2 for i, v in enumerate(values)) / (n - 2))
