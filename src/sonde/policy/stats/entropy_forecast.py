"""What is said of an update: the forecast of its entropy change, its truths, whether to trust it, and its causes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sonde.policy.stats.attribution import Causes, Share, attribution_table
from sonde.policy.stats.importance import MeasuredChange

Objective = Literal["per_token", "sequence"]
Update = Literal["step", "gradient"]

LINEAR_BETWEEN = (0.8, 1.25)
"""First-order over true change on fixed prefixes: outside, the step is too large to be linear."""
LEAST_ESS_FRACTION = 0.5
"""Effective sample size over responses: below, responses to θ no longer stand for those to θ⁺."""
TOO_LARGE = "not to be trusted: the step is too large to be linear"
_NO_CHANGE = 1e-6
"""Nats a token: differences below it are within the rounding of fp32 scores."""
_HARMLESS = 0.5
"""Standard errors: what is not linear by less than that leaves the interval's coverage above 90 %."""


@dataclass(frozen=True)
class FixedPrefixes:
    """The change of R if the update changed no token that is sampled, in nats a token.

    Attributes:
        true: measured, exactly: on these prefixes nothing is left to chance.
        linear: to first order.
    """

    true: float
    linear: float

    @property
    def linear_over_true(self) -> float:
        """About 1 where the step is small enough; NaN where nothing changes."""
        return self.linear / self.true if self.true else math.nan


@dataclass(frozen=True)
class EntropyForecast:
    """What an update will do to the policy's entropy.

    Attributes:
        delta: to first order, in nats: a token with objective="per_token", a response with "sequence". NaN where
            unknown.
        se: its standard error.
        level: of confidence of its interval.
        low: lower end of its interval: by the standard error, and on to where the step is not linear by what first
            order misses on the same prefixes.
        high: upper end.
        reason: why something is unknown, or why it is not to be trusted; empty when neither.
        is_valid: whether the step is small enough for a first-order forecast, by the truths that were measured.
        objective: what entropy is meant.
        update: what update.
        entropy: R before it, in nats a token.
        v_x: variance of `delta` from the evaluation prompts.
        v_y: variance from the update prompts; 0 along a given step.
        double_count: what both hold of the same noise; NaN where v_y leaves it out.
        bars_dot: X̄·Ȳ with update="gradient"; `delta` along a given step.
        n_evaluation: evaluation prompts, B_E.
        n_update: update prompts, B_U; 0 along a given step.
        fixed_prefixes: truth on the same prefixes; None where it was not measured.
        importance: truth by importance sampling.
        rollouts: truth by fresh rollouts.
        shares: every evaluation prompt's part, the one that lowers entropy most first.
        causes: where the change comes from, where that was asked.
        derivatives: "forward" or "central": how derivatives were taken.
        seconds: by phase.
        peak_bytes: by how much the process's peak memory grew; 0 where it stayed below what it was; None where the
            system does not say.
    """

    delta: float
    se: float
    level: float
    low: float
    high: float
    reason: str
    is_valid: bool
    objective: Objective
    update: Update
    entropy: float
    v_x: float
    v_y: float
    double_count: float
    bars_dot: float
    n_evaluation: int
    n_update: int
    fixed_prefixes: FixedPrefixes | None
    importance: MeasuredChange | None
    rollouts: MeasuredChange | None
    shares: tuple[Share, ...]
    causes: Causes | None
    derivatives: str
    seconds: Mapping[str, float]
    peak_bytes: int | None

    def metrics(self) -> dict[str, float | None]:
        """By metric name; None where unknown."""
        fixed, importance, rollouts = self.fixed_prefixes, self.importance, self.rollouts
        numbers = {
            "entropy/per_token": self.entropy,
            "entropy/delta_forecast": self.delta,
            "entropy/delta_se": self.se,
            "entropy/delta_low": self.low,
            "entropy/delta_high": self.high,
            "entropy/delta_fixed_prefixes": fixed.true if fixed else math.nan,
            "entropy/linear_over_true": fixed.linear_over_true if fixed else math.nan,
            "entropy/delta_importance": importance.delta if importance else math.nan,
            "entropy/ess_fraction": importance.ess_fraction if importance else math.nan,
            "entropy/delta_rollouts": rollouts.delta if rollouts else math.nan,
            "entropy/delta_rollouts_se": rollouts.se if rollouts else math.nan,
            "entropy/is_valid": float(self.is_valid),
            "cost/entropy_seconds": sum(self.seconds.values()),
        }
        return {name: None if math.isnan(value) else value for name, value in numbers.items()}

    def table(self, texts: Mapping[int, str] | None = None, *, n: int = 5) -> str:
        """The prompts that lower and that raise entropy most, and where the change comes from, as lines of text.

        Args:
            texts: of prompts, by their numbers, as `Rollouts.texts`.
            n: prompts at either end.
        """
        return attribution_table(self.shares, self.causes, texts or {}, n)

    def __str__(self) -> str:
        per = "a token" if self.objective == "per_token" else "a response"
        if math.isnan(self.se):
            return f"entropy change unknown: {self.reason}"
        said = f"entropy {self.entropy:.3f} nats a token; forecast {self.delta:+.2e} ± {self.se:.1e} nats {per}"
        truths = [f"importance sampling {m.delta:+.2e} ± {m.se:.1e}" for m in (self.importance,) if m]
        truths += [f"fresh rollouts {m.delta:+.2e} ± {m.se:.1e}" for m in (self.rollouts,) if m]
        return "; ".join([said, *truths, *([self.reason] if self.reason else [])])


def unknown(reason: str, objective: Objective, update: Update) -> EntropyForecast:
    """A forecast that could not be made."""
    nan = math.nan
    return EntropyForecast(
        delta=nan,
        se=nan,
        level=0.95,
        low=nan,
        high=nan,
        reason=reason,
        is_valid=False,
        objective=objective,
        update=update,
        entropy=nan,
        v_x=nan,
        v_y=nan,
        double_count=nan,
        bars_dot=nan,
        n_evaluation=0,
        n_update=0,
        fixed_prefixes=None,
        importance=None,
        rollouts=None,
        shares=(),
        causes=None,
        derivatives="",
        seconds={},
        peak_bytes=None,
    )


def why_not_linear(fixed: FixedPrefixes | None, importance: MeasuredChange | None, se: float) -> str:
    """Why a first-order forecast of this step is not to be trusted; empty when it is.

    Args:
        fixed: truth and first order on the same prefixes.
        importance: truth by importance sampling.
        se: the forecast's standard error, in nats a token: what is not linear by less than half of it does no harm.
    """
    harmless = max(_NO_CHANGE, 0.0 if math.isnan(se) else _HARMLESS * se)
    if fixed is not None and abs(fixed.true - fixed.linear) > harmless:
        low, high = LINEAR_BETWEEN
        if not low <= fixed.linear_over_true <= high:
            return (
                f"{TOO_LARGE}: on the same prefixes first order says {fixed.linear:+.2e} nats a token and the truth is "
                f"{fixed.true:+.2e}"
            )
    if importance is not None and importance.ess_fraction < LEAST_ESS_FRACTION:
        return (
            f"{TOO_LARGE}: of the responses {importance.ess_fraction:.0%} stand for what the policy samples after it "
            f"(effective sample size), and {LEAST_ESS_FRACTION:.0%} are needed"
        )
    return ""
