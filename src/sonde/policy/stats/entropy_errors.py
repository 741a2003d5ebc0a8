"""How far measured entropies may be wrong: by their own standard errors, their scatter, and correlated neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from sonde.policy.stats.forecast_point import StepsKept

REGION = 100
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


def entropy_errors(kept: StepsKept, values: Sequence[float]) -> Errors | None:
    """The errors of a run's entropies; None if no standard error was logged.

    A measurement without a standard error, as that of one prompt, has the median of the others. Scatter is how far each
    measurement lies from the line between its neighbours. The median counts, since the beginning of a run may bend for
    good reason.
    """
    n = len(values)
    known = [p.entropy_se for p in kept.points if p.entropy_se is not None]
    if not known:
        return None
    each = [median(known) if p.entropy_se is None else p.entropy_se for p in kept.points]
    region = min(max(n // 3, _SHORTEST_REGION), REGION)
    ends = (range(min(region, n)), range(max(n - region, 0), n))
    both = sorted({*ends[0], *ends[1]})
    near = [_bends(kept, values, each, 1, indices) for indices in (both, *ends)]
    if min(map(len, near)) < _FEWEST_BENDS:
        return Errors(each)
    correlation = _correlation(near[0], _bends(kept, values, each, 2, both))
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
