"""Confidence intervals for a ratio of two means."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from sonde.wording import estimate

Status = Literal["resolved", "lower_bound", "upper_bound", "unresolved"]
LEVEL = 0.95
"""Confidence level of the intervals in a log."""


@dataclass(frozen=True)
class RatioInterval:
    """A confidence interval for the ratio of two non-negative expectations.

    Attributes:
        status: "resolved": the interval is [low, high]. "lower_bound": the denominator cannot yet be distinguished
            from 0, so only ratio > low is known and `high` is infinite. "upper_bound": the numerator cannot yet be
            distinguished from 0, so only ratio < high is known and `low` is 0. "unresolved": every ratio is compatible
            with the data.
        low: lower end; None when unresolved.
        high: upper end, `math.inf` for a lower bound; None when unresolved.
        reason: why the ratio is not resolved; empty when it is.
        ratio: the estimate; None unless it is resolved.
        log_error: standard error of the log of the estimate; None where it is not known.
    """

    status: Status
    low: float | None
    high: float | None
    reason: str = ""
    ratio: float | None = None
    log_error: float | None = None

    def times(self, factor: float) -> RatioInterval:
        """The same ratio in a unit of another size."""
        low, high, ratio = (None if end is None else end * factor for end in (self.low, self.high, self.ratio))
        return RatioInterval(self.status, low, high, self.reason, ratio, self.log_error)

    @property
    def in_words(self) -> str:
        """The estimate with its interval, or the bound that is known."""
        return estimate(self.status, self.ratio, self.low, self.high)


def unresolved(reason: str) -> RatioInterval:
    """Nothing is known of a ratio, for a reason."""
    return RatioInterval("unresolved", None, None, reason)


def logged_interval(metrics: Mapping[str, float | None], name: str) -> RatioInterval:
    """The interval of a noise scale whose estimate is the metric `name` and whose ends are `name` + "_low", "_high".

    A log holds no infinity: the unknown end of a bound is None. The estimate is None unless both ends are known.

    Example:
        >>> metrics = {"gns_prompts/b_simple": None, "gns_prompts/b_simple_low": 0.0, "gns_prompts/b_simple_high": 12.0}
        >>> logged_interval(metrics, "gns_prompts/b_simple").status
        'upper_bound'
    """
    low, high = (metrics.get(f"{name}_{end}") for end in ("low", "high"))
    if low is None:
        return unresolved("")
    if metrics.get(name) is not None:
        return RatioInterval("resolved", low, high, ratio=metrics[name])
    if high is None:
        return RatioInterval("lower_bound", low, math.inf)
    return RatioInterval("upper_bound", low, high)


TOO_FEW_WINDOWS = unresolved("too few windows for an interval: measure more")


def fieller_interval(
    numerator: float,
    denominator: float,
    *,
    var_numerator: float,
    var_denominator: float,
    covariance: float,
    n_samples: float,
    level: float = 0.95,
) -> RatioInterval:
    """Fieller's interval for E[X]/E[Y] from two sample means, their covariance matrix and the number of samples.

    It is the set of ratios R for which the mean of X − R·Y does not differ from 0 by Student's t. Unlike the delta
    method or the jackknife it stays honest when E[Y] can hardly be distinguished from 0: it then opens to one side, or
    to both.

    Args:
        numerator: mean of X.
        denominator: mean of Y.
        var_numerator: variance *of the mean* of X, not of one sample.
        var_denominator: variance of the mean of Y.
        covariance: covariance of the two means.
        n_samples: effective number of samples, 1/Σω² for weights ω that sum to 1; at least 2.
        level: confidence level, strictly between 0 and 1.

    Returns:
        A `RatioInterval`. Both expectations are taken to be non-negative, so its ends are too.

    Raises:
        ValueError: when `level` or `n_samples` is outside its range, or a moment is not finite.

    Reference:
        E. C. Fieller, "Some problems in interval estimation", J. R. Stat. Soc. B 16 (1954) 175–185.

    Example:
        >>> i = fieller_interval(8.0, 2.0, var_numerator=0.01, var_denominator=0.01, covariance=0.0, n_samples=100)
        >>> i.status, round(i.low, 2), round(i.high, 2)
        ('resolved', 3.63, 4.45)
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}: use 0.95 for a 95 % interval")
    if not n_samples >= 2:
        raise ValueError(f"need at least 2 effective samples for an interval, got {n_samples:g}: measure more windows")
    moments = (numerator, denominator, var_numerator, var_denominator, covariance)
    if not all(map(math.isfinite, moments)):
        raise ValueError(
            f"the means and their covariances must be finite, got {moments}: drop non-finite windows first"
        )

    t_sq = student_t_quantile(0.5 + level / 2, n_samples - 1) ** 2
    # The accepted ratios solve  a R² − 2 b R + c ≤ 0.
    a = denominator**2 - t_sq * var_denominator
    b = numerator * denominator - t_sq * covariance
    c = numerator**2 - t_sq * var_numerator
    discriminant = b * b - a * c
    numerator_resolved, denominator_resolved = c > 0, a > 0

    if denominator_resolved and denominator < 0:
        return unresolved("the denominator is negative beyond its error")
    if denominator_resolved:
        root = math.sqrt(max(discriminant, 0.0))
        low, high = max((b - root) / a, 0.0), max((b + root) / a, 0.0)
        if not numerator_resolved:
            return RatioInterval("upper_bound", 0.0, high, "the numerator cannot yet be distinguished from 0")
        return RatioInterval("resolved", low, high, ratio=numerator / denominator)
    if not numerator_resolved:
        return unresolved("neither numerator nor denominator can yet be distinguished from 0: measure more windows")
    # a ≤ 0 < c: one root on each side of 0, and every ratio beyond the positive one is accepted.
    # 2c/(b + √…) is that root written so that a = 0 needs no case of its own.
    scale = b + math.sqrt(discriminant)
    low = c / scale if scale > 0 else math.inf
    if not math.isfinite(low):
        return unresolved("the denominator is negative as far as it is known: measure more windows")
    reason = "the denominator cannot yet be distinguished from 0: measure more windows"
    return RatioInterval("lower_bound", low, math.inf, reason)


def signed_ratio_interval(
    numerator: float,
    denominator: float,
    *,
    var_numerator: float,
    var_denominator: float,
    covariance: float,
    n_samples: float,
    level: float = 0.95,
) -> RatioInterval:
    """`fieller_interval` for a numerator of either sign. The denominator's expectation is taken to be positive.

    Args:
        numerator: mean of X.
        denominator: mean of Y.
        var_numerator: variance of the mean of X.
        var_denominator: variance of the mean of Y.
        covariance: covariance of the two means.
        n_samples: effective number of samples; at least 2.
        level: confidence level.

    Returns:
        A `RatioInterval`. It is "resolved" whenever the denominator is, so it may hold 0. Otherwise "lower_bound" says
        that the ratio is above `low`, and "upper_bound" that it is below `high`, with `low` infinite then.

    Raises:
        ValueError: as `fieller_interval`.

    Example:
        >>> moments = {"var_numerator": 0.01, "var_denominator": 0.01, "covariance": 0.0, "n_samples": 100}
        >>> i = signed_ratio_interval(-8.0, 2.0, **moments)
        >>> i.status, round(i.low, 2), round(i.high, 2)
        ('resolved', -4.45, -3.63)
        >>> i = signed_ratio_interval(0.1, 2.0, **moments)
        >>> i.status, round(i.low, 2), round(i.high, 2)
        ('resolved', -0.05, 0.15)
    """
    sign = -1.0 if numerator < 0 else 1.0
    moments = {"var_numerator": var_numerator, "var_denominator": var_denominator, "covariance": sign * covariance}
    found = fieller_interval(abs(numerator), denominator, **moments, n_samples=n_samples, level=level)
    low, high = found.low, found.high
    if found.status == "upper_bound":  # only the denominator is resolved: the other end is below 0
        t_sq = student_t_quantile(0.5 + level / 2, n_samples - 1) ** 2
        assert high is not None
        a, c = denominator**2 - t_sq * var_denominator, numerator**2 - t_sq * var_numerator
        low = c / (a * high) if high else 0.0  # the product of both ends is c/a
        low, high = sorted((sign * low, sign * high))
        return RatioInterval("resolved", low, high, ratio=numerator / denominator)
    if low is None or high is None or sign > 0:
        return found
    status: Status = "upper_bound" if found.status == "lower_bound" else found.status
    return RatioInterval(status, -high, -low, found.reason, None if found.ratio is None else -found.ratio)


@functools.lru_cache(maxsize=256)  # every group of a reading asks for the same one
def student_t_quantile(probability: float, dof: float) -> float:
    """The quantile of Student's t; `dof` may be fractional or infinite.

    Args:
        probability: strictly between 0 and 1.
        dof: degrees of freedom, from 0.1 up: below, quantiles leave the range of numbers.

    Raises:
        ValueError: outside these ranges.

    Example:
        >>> round(student_t_quantile(0.975, 9), 4)
        2.2622
    """
    if not 0 < probability < 1 or not dof >= 0.1:
        raise ValueError(f"need 0 < probability < 1 and dof ≥ 0.1, got {probability} and {dof}")
    if probability == 0.5:
        return 0.0
    if probability < 0.5:
        return -student_t_quantile(1 - probability, dof)
    if dof > 1e7:  # the difference from the normal is below 1e-7 there
        return NormalDist().inv_cdf(probability)

    # P(T > t) = I_x(dof/2, 1/2) / 2 with x = dof/(dof + t²). It is convex, so Newton's steps from 0 never go too far.
    log_scale = math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2) - 0.5 * math.log(dof * math.pi)
    t, step = 0.0, 1.0
    while step > 1e-13 * t:
        tail = 0.5 * _regularized_beta(dof / 2, 0.5, dof / (dof + t * t))
        density = math.exp(log_scale - (dof + 1) / 2 * math.log1p(t * t / dof))
        step = (tail - (1 - probability)) / density
        t += step
    return t


def _regularized_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b) by its continued fraction (DLMF 8.17.22), evaluated with Lentz's method."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only below this point: use the reflection
        return 1.0 - _regularized_beta(b, a, 1.0 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny = 1e-300
    c, d = 1.0, 1.0 / max(1.0 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for coefficient in (even, odd):
            d = 1.0 / (1.0 + coefficient * d or tiny)
            c = 1.0 + coefficient / c or tiny
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return math.exp(log_front) * fraction / a
