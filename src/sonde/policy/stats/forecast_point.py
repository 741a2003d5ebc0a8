"""What was measured around one optimizer step: the forecast of the entropy's change, and the truth beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sonde.policy.stats.entropy_forecast import TOO_LARGE
from sonde.policy.stats.importance import Per

_Z = 1.959964


@dataclass(frozen=True)
class Point:
    """What was measured around one optimizer step; NaN where something is not known.

    Attributes:
        step: its number, from 1.
        entropy: of the policy before it, in nats a token.
        delta: the forecast of what the step does to it, in nats.
        low: lower end of the forecast's 95 % interval.
        high: upper end.
        is_valid: whether the step was small enough for a first-order forecast.
        truth: what the step did, by fresh rollouts where there were any, otherwise by importance sampling.
        truth_se: its standard error.
        is_independent: whether truth is of responses of its own, rather than of those that the forecast was made on.
        per: what `delta` and `truth` are of, "token" or "response".
        reason: why the forecast is unknown or not to be trusted; empty when it is.
    """

    step: int
    entropy: float
    delta: float
    low: float
    high: float
    is_valid: bool
    truth: float
    truth_se: float
    is_independent: bool
    per: Per = "token"
    reason: str = ""

    @property
    def is_too_large(self) -> bool:
        """Whether the step is too large to be linear, rather than something else being wrong."""
        return not self.is_valid and self.reason.startswith(TOO_LARGE)

    @property
    def has_truth(self) -> bool:
        """Whether forecast and truth are both known."""
        return math.isfinite(self.delta) and math.isfinite(self.low) and math.isfinite(self.truth)

    @property
    def held(self) -> bool:
        """Whether the interval held the truth, whose own standard error widens it."""
        end = self.low if self.truth < self.delta else self.high
        doubt = _Z * (self.truth_se if math.isfinite(self.truth_se) else 0.0)
        return abs(self.truth - self.delta) <= math.hypot(end - self.delta, doubt)


def forecast_point(step: int, metrics: Mapping[str, float | None], per: Per = "token", reason: str = "") -> Point:
    """A point from metrics by their names; see `records.METRICS`."""

    def known(name: str) -> float:
        value = metrics.get(f"entropy/{name}")
        return math.nan if value is None else value

    is_independent = math.isfinite(known("delta_rollouts"))
    return Point(
        step=step,
        entropy=known("per_token"),
        delta=known("delta_forecast"),
        low=known("delta_low"),
        high=known("delta_high"),
        is_valid=known("is_valid") == 1.0,
        truth=known("delta_rollouts") if is_independent else known("delta_importance"),
        truth_se=known("delta_rollouts_se") if is_independent else 0.0,
        is_independent=is_independent,
        per=per,
        reason=reason,
    )
