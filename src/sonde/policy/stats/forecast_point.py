"""One optimizer step of a run: the forecast of the entropy's change, the truth beside it, and when to trust it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from sonde.policy.stats.own_policy import OwnPolicyTest, SamplerTest

Per = Literal["token", "response"]

LINEAR_BETWEEN = (0.8, 1.25)
"""Range of first-order over true change on fixed prefixes. Outside it, the step is too large to be linear."""
TOO_LARGE = "not to be trusted: the step is too large"
"""The beginning of a reason."""
LEAST_SUPPORT = 0.2
"""Effective sample size over the number of responses that reach a position. Below it, the position has no support."""
MOST_UNSUPPORTED = 0.5
"""Largest part of the entropy that positions without support may carry."""
LEAST_MEAN_SUPPORT = 0.5
"""Smallest mean of the fraction over positions. Below it, intervals miss the change where few prompts carry it."""
_NEAR_UNIFORM = 0.1
"""Scatter of the surprise over the entropy. Below it, the entropy is within 5 % of the logarithm of the vocabulary, for
a vocabulary of 10 to 10⁵ tokens."""

Z = 1.959964
"""Standard errors from the centre of a normal distribution to the end of its 95 % interval."""

_NO_MEASUREMENT = 1e50
"""Nats. Numbers of this size come from weights that have overflowed, and their own squares would overflow."""

_ON_EVALUATION = ("evaluation_per_token", "evaluation_per_token_se", "evaluation_surprise_sd")
_ON_UPDATE = ("update_token_weighted", "update_token_weighted_se", "update_token_weighted_surprise_sd")
"""Metrics of the entropy, its standard error and the scatter around it, on either batch."""


@dataclass(frozen=True)
class ComparedLoss:
    """What one of several losses would do to the entropy, as a log has it; in nats, None where it is not known.

    Attributes:
        name: of the loss.
        change: the forecast of the change of entropy.
        change_se: its standard error.
        difference: the change minus that of the baseline; None for the baseline.
        low: lower end of the difference's 95 % interval.
        high: upper end.
        words: what this says.
        is_valid: whether it is to be trusted.
    """

    name: str
    change: float | None
    change_se: float | None
    difference: float | None
    low: float | None
    high: float | None
    words: str
    is_valid: bool


@dataclass(frozen=True)
class Point:
    """The measurements around one optimizer step.

    Attributes:
        step: the step's number, from 1.
        entropy: the policy's entropy before the step, in nats a token, on the evaluation responses; if these were not
            scored, on the responses that the step learns from; None if unknown.
        delta: the forecast of the step's change of entropy, in nats; None if unknown.
        low: lower end of the forecast's 95 % interval; None if unknown.
        high: upper end; None if unknown.
        is_valid: whether the forecast is to be trusted.
        truth: the measured change: by fresh rollouts if there were any, otherwise on the forecast's own responses, for
            a forecast to first order; None if it was not measured.
        truth_se: standard error of the truth; None if unknown.
        is_independent: whether the truth comes from fresh rollouts, and not from the responses of the forecast.
        per: the unit of `delta` and `truth`: nats per "token" or per "response".
        reason: why the forecast is unknown or not to be trusted; empty if it is to be trusted.
        ess_fraction: effective sample size of importance sampling over the responses; None if unknown.
        surprise_sd: scatter of −log π around the entropy, in nats; None if unknown.
        entropy_se: standard error of the entropy, over prompts; None if unknown.
        segment: which start of the run measured it, from 0.
        own_policy: whether the evaluation responses were the policy's own; None if not tested.
        sampler: how far their sampler was from the policy; None if its log-probabilities were not given.
        rounded_away: part of the step that parameters of 16 bits did not hold; None if unknown.
    """

    step: int
    entropy: float | None
    delta: float | None
    low: float | None
    high: float | None
    is_valid: bool
    truth: float | None
    truth_se: float | None
    is_independent: bool
    per: Per = "token"
    reason: str = ""
    ess_fraction: float | None = None
    surprise_sd: float | None = None
    entropy_se: float | None = None
    segment: int = 0
    own_policy: OwnPolicyTest | None = None
    sampler: SamplerTest | None = None
    rounded_away: float | None = None

    @property
    def is_near_uniform(self) -> bool:
        """Whether the policy is almost uniform, as at the start of a training from random weights."""
        return is_near_uniform(self.entropy, self.surprise_sd)

    @property
    def is_too_large(self) -> bool:
        """Whether the forecast is not valid because the step is too large."""
        return not self.is_valid and self.reason.startswith(TOO_LARGE)

    @property
    def has_truth(self) -> bool:
        """Whether the forecast, its interval and the truth are all known."""
        return self.delta is not None and self.low is not None and self.truth is not None

    @property
    def held(self) -> bool:
        """Whether the interval held the truth. The truth's own standard error widens the interval."""
        if self.delta is None or self.low is None or self.high is None or self.truth is None:
            return False
        end = self.low if self.truth < self.delta else self.high
        return abs(self.truth - self.delta) <= math.hypot(end - self.delta, Z * (self.truth_se or 0.0))


def forecast_point(
    step: int, metrics: Mapping[str, float | None], per: Per = "token", reason: str = "", segment: int = 0
) -> Point:
    """A point from a record's metrics; their names are in `EntropyChangeProbe.METRICS`."""

    def metric(name: str) -> float | None:
        value = metrics.get(f"entropy/{name}")
        return value if value is not None and abs(value) < _NO_MEASUREMENT else None  # nor is NaN below it

    is_independent = metric("delta_rollouts") is not None
    entropy, entropy_se, surprise_sd = map(metric, _ON_EVALUATION)
    if entropy is None:
        entropy, entropy_se, surprise_sd = map(metric, _ON_UPDATE)
    own_z, own_departure = metric("evaluation_own_policy_z"), metric("evaluation_own_policy_departure")
    z, departure, kl = metric("sampler_z"), metric("sampler_departure"), metric("sampler_kl")
    return Point(
        step=step,
        entropy=entropy,
        delta=metric("delta_forecast"),
        low=metric("delta_low"),
        high=metric("delta_high"),
        is_valid=metric("is_valid") == 1.0,
        # Without rollouts, a forecast to first order has the finite step on its own responses to compare with. A
        # forecast by the finite step has nothing.
        truth=metric("delta_rollouts") if is_independent else metric("delta_finite_step"),
        truth_se=metric("delta_rollouts_se") if is_independent else 0.0,
        is_independent=is_independent,
        per=per,
        reason=reason,
        ess_fraction=metric("ess_fraction"),
        surprise_sd=surprise_sd,
        entropy_se=entropy_se,
        segment=segment,
        own_policy=None if own_z is None or own_departure is None else OwnPolicyTest(own_z, own_departure),
        sampler=None if z is None or departure is None or kl is None else SamplerTest(z, departure, kl),
        rounded_away=metric("rounded_away"),
    )


def is_near_uniform(entropy: float | None, scatter: float | None) -> bool:
    """Whether the policy is almost uniform; False if a number is unknown.

    Args:
        entropy: in nats a token.
        scatter: `surprise_sd`, in nats. A policy that is certain of each token has a small scatter too, and no entropy.
    """
    return entropy is not None and scatter is not None and scatter < _NEAR_UNIFORM * entropy


@dataclass(frozen=True)
class Coverage:
    """How many intervals held the truth.

    Attributes:
        n: number of forecasts that were to be trusted and whose truth was measured on fresh rollouts.
        n_held: number of these whose interval held the truth.
        low: lower end of the 95 % interval of the true share; 0 without forecasts.
        high: upper end; 1 without forecasts.
    """

    n: int
    n_held: int
    low: float
    high: float

    @classmethod
    def of(cls, n: int, n_held: int) -> Self:
        """Coverage with Wilson's interval (1927): the true shares that `n_held` out of `n` does not contradict."""
        if not n:
            return cls(0, 0, 0.0, 1.0)
        centre = (n_held + Z**2 / 2) / (n + Z**2)
        half = Z / (n + Z**2) * math.sqrt(n_held * (n - n_held) / n + Z**2 / 4)
        return cls(n, n_held, max(centre - half, 0.0), min(centre + half, 1.0))

    @property
    def fraction(self) -> float | None:
        """n_held over n; None without forecasts."""
        return self.n_held / self.n if self.n else None


def coverage(points: Sequence[Point]) -> Coverage:
    """Coverage of the forecasts so far.

    Example:
        >>> held = Point(1, 1.0, -0.02, -0.03, -0.01, True, -0.025, 0.001, True)
        >>> coverage([held, held]).n_held
        2
    """
    judged = [p for p in points if is_judged(p)]
    return Coverage.of(len(judged), sum(p.held for p in judged))


def is_judged(point: Point) -> bool:
    """Whether a forecast was to be trusted and its truth was measured on fresh rollouts."""
    return point.is_valid and point.is_independent and point.has_truth


class StepsKept:
    """The measurements of a run, as they come in, without those that a restart undid.

    A new start of the run takes all steps again from its first measured step on, and so does a step number that falls:
    earlier measurements of these steps are of weights that no longer exist.
    """

    def __init__(self) -> None:
        self.points: list[Point] = []
        """In the order in which their steps were taken."""
        self.n_undone = 0
        """Measurements of steps that were taken again."""

    def add(self, point: Point) -> None:
        """Add the next measurement."""
        kept = self.points
        if kept and (point.segment != kept[-1].segment or point.step < kept[-1].step):
            while kept and kept[-1].step >= point.step:
                kept.pop()
                self.n_undone += 1
        kept.append(point)


def steps_kept(points: Sequence[Point]) -> StepsKept:
    """The measurements of a run that count.

    Args:
        points: in the order in which they were measured.

    Example:
        >>> def at(step: int, segment: int = 0) -> Point:
        ...     return Point(step, 1.0, None, None, None, False, None, None, False, segment=segment)
        >>> [point.step for point in steps_kept([at(10), at(20), at(30), at(30, 1), at(40, 1)]).points]
        [10, 20, 30, 40]
    """
    kept = StepsKept()
    for point in points:
        kept.add(point)
    return kept
