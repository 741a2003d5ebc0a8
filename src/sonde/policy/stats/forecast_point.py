"""One optimizer step of a run: the forecast of the entropy's change, and the measured truth beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sonde.policy.stats.entropy_forecast import TOO_LARGE
from sonde.policy.stats.importance import Per
from sonde.policy.stats.near_uniform import is_near_uniform
from sonde.policy.stats.own_policy import OwnPolicyTest, SamplerTest

Z = 1.959964
"""Standard errors from the centre of a normal distribution to the end of its 95 % interval."""

_NO_MEASUREMENT = 1e50
"""Nats. Numbers of this size come from weights that have overflowed, and their own squares would overflow."""

_ON_EVALUATION = ("evaluation_per_token", "evaluation_per_token_se", "evaluation_surprise_sd")
_ON_UPDATE = ("update_token_weighted", "update_token_weighted_se", "update_token_weighted_surprise_sd")
"""Metrics of the entropy, its standard error and the scatter around it, on either batch."""


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
