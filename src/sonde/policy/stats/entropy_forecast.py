"""The forecast of an update's effect on the entropy, made of what first order says and of the measured truths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from sonde.policy.stats.attribution import Causes, Share, attribution_table, shares_by_prompt
from sonde.policy.stats.entropy_change import EntropyChange, EntropyObjective, Objective
from sonde.policy.stats.entropy_gradient import Responses, entropy_rate, entropy_rate_se
from sonde.policy.stats.importance import LEAST_ESS_FRACTION, MeasuredChange
from sonde.policy.stats.near_uniform import is_near_uniform, surprise_sd

Update = Literal["step", "gradient"]

LINEAR_BETWEEN = (0.8, 1.25)
"""Range of first-order over true change on fixed prefixes. Outside it, the step is too large to be linear."""
TOO_LARGE = "not to be trusted: the step is too large to be linear"
NEAR_UNIFORM = "not to be trusted: the policy is almost uniform, where the entropy has no slope"
_NO_CHANGE = 1e-6
"""Nats a token. Smaller differences are within the rounding of fp32 scores."""
_HARMLESS = 0.5
"""Standard errors. A deviation from first order that is smaller leaves the interval's coverage above 90 %."""


@dataclass(frozen=True)
class FirstOrder:
    """What first order says of an update.

    Attributes:
        change: the change of entropy.
        on_same_prefixes: the change of R on the same prefixes, in nats a token.
        bars_dot: X̄·Ȳ with update="gradient"; `change.delta` along a given step.
        derivatives: how derivatives were taken: "forward" or "central".
        doubt: why the derivatives are not to be trusted; empty if they are.
        causes: where the change comes from; None if not asked for.
    """

    change: EntropyChange
    on_same_prefixes: float
    bars_dot: float | None
    derivatives: str
    doubt: str = ""
    causes: Causes | None = None


@dataclass(frozen=True)
class Truths:
    """What an update does, measured.

    Attributes:
        on_same_prefixes: the change of R on the same prefixes, in nats a token.
        importance: the change by importance sampling.
        rollouts: the change by fresh rollouts; None without a sampler.
    """

    on_same_prefixes: float
    importance: MeasuredChange
    rollouts: MeasuredChange | None = None


@dataclass(frozen=True)
class FixedPrefixes:
    """The change of R on the same prefixes, as if the update changed no sampled token; in nats a token.

    Attributes:
        true: the measured change. It is exact: on given prefixes nothing is random.
        linear: the change to first order.
    """

    true: float
    linear: float

    @property
    def linear_over_true(self) -> float | None:
        """About 1 if the step is small enough; None if nothing changes."""
        return self.linear / self.true if self.true else None


@dataclass(frozen=True, kw_only=True)
class EntropyForecast:
    """What an update will do to the policy's entropy. A number that is unknown is None, and `reason` says why.

    Attributes:
        delta: the change to first order, in nats: a token with objective="per_token", a response with "sequence".
        se: its standard error.
        level: confidence level of its interval.
        low: lower end of its interval. The interval follows from the standard error. If the step is not linear, the
            interval also includes the deviation from first order on the same prefixes.
        high: upper end.
        reason: why a number is unknown, or why the forecast is not to be trusted; empty otherwise.
        is_valid: whether `reason` is empty: above all, whether the step is small enough for a first-order forecast.
        objective: which entropy is meant.
        update: which update is meant.
        entropy: R before the update, in nats a token.
        entropy_se: standard error of `entropy` over the evaluation prompts; None with fewer than 2.
        surprise_sd: scatter of −s_k around H_k before the update, in nats; almost 0 for a uniform policy.
        v_x: variance of `delta` from the evaluation prompts.
        v_y: variance of `delta` from the update prompts; 0 along a given step.
        double_count: the noise that v_x and v_y have in common; None if v_y leaves it out already.
        bars_dot: X̄·Ȳ with update="gradient"; `delta` along a given step.
        n_evaluation: number of evaluation prompts, B_E.
        n_update: number of update prompts whose causes are known, B_U; 0 along a step without them.
        fixed_prefixes: the truth on the same prefixes; None if not measured.
        importance: the truth by importance sampling; None if not measured.
        rollouts: the truth by fresh rollouts; None if not measured.
        shares: every evaluation prompt's part. The prompt that lowers entropy most comes first.
        causes: where the change comes from; None if not asked for.
        derivatives: how derivatives were taken: "forward" or "central".
        seconds: time spent, by phase.
        peak_bytes: growth of the process's peak memory; 0 if the peak did not grow, None if the system does not report
            it.
    """

    delta: float | None = None
    se: float | None = None
    level: float
    low: float | None = None
    high: float | None = None
    reason: str
    is_valid: bool
    objective: Objective
    update: Update
    entropy: float | None = None
    entropy_se: float | None = None
    surprise_sd: float | None = None
    v_x: float | None = None
    v_y: float | None = None
    double_count: float | None = None
    bars_dot: float | None = None
    n_evaluation: int = 0
    n_update: int = 0
    fixed_prefixes: FixedPrefixes | None = None
    importance: MeasuredChange | None = None
    rollouts: MeasuredChange | None = None
    shares: tuple[Share, ...] = ()
    causes: Causes | None = None
    derivatives: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None

    def metrics(self) -> dict[str, float | None]:
        """The forecast's numbers by metric name; None if unknown."""
        fixed, importance, rollouts = self.fixed_prefixes, self.importance, self.rollouts
        return {
            "entropy/per_token": self.entropy,
            "entropy/per_token_se": self.entropy_se,
            "entropy/surprise_sd": self.surprise_sd,
            "entropy/delta_forecast": self.delta,
            "entropy/delta_se": self.se,
            "entropy/delta_low": self.low,
            "entropy/delta_high": self.high,
            "entropy/delta_fixed_prefixes": fixed.true if fixed else None,
            "entropy/linear_over_true": fixed.linear_over_true if fixed else None,
            "entropy/delta_importance": importance.delta if importance and importance.is_known else None,
            "entropy/ess_fraction": importance.ess_fraction if importance else None,
            "entropy/delta_rollouts": rollouts.delta if rollouts else None,
            "entropy/delta_rollouts_se": rollouts.se if rollouts else None,
            "entropy/is_valid": float(self.is_valid),
            "cost/entropy_seconds": sum(self.seconds.values()),
        }

    def table(self, texts: Mapping[int, str] | None = None, *, n: int = 5) -> str:
        """The prompts that lower and that raise entropy most, and where the change comes from, as lines of text.

        Args:
            texts: the prompts' texts by their numbers, as `Rollouts.texts`.
            n: how many prompts at either end.
        """
        return attribution_table(self.shares, self.causes, texts or {}, n)

    def __str__(self) -> str:
        per = "a token" if self.objective == "per_token" else "a response"
        if self.delta is None or self.se is None:
            return f"entropy change unknown: {self.reason}"
        parts = [f"entropy {self.entropy:.3f} nats a token; forecast {self.delta:+.2e} ± {self.se:.1e} nats {per}"]
        if self.importance is not None:
            parts.append(f"importance sampling {self.importance}")
        if self.rollouts is not None:
            parts.append(f"fresh rollouts {self.rollouts}")
        return "; ".join([*parts, self.reason] if self.reason else parts)


def entropy_forecast(
    first_order: FirstOrder,
    truths: Truths | None,
    log_prob: Tensor,
    entropy: Tensor,
    responses: Responses,
    *,
    objective: EntropyObjective,
    update: Update,
    level: float,
    problem: str = "",
    seconds: Mapping[str, float],
    peak_bytes: int | None = None,
) -> EntropyForecast:
    """The forecast of an update, from what first order says of it and from the measured truths.

    Args:
        first_order: the change to first order.
        truths: the measured changes; None if the policy's scores are not finite after the step.
        log_prob: s_k before the update in nats, [responses, tokens].
        entropy: H_k before the update in nats, [responses, tokens].
        responses: the evaluation responses.
        objective: which entropy is meant.
        update: which update is meant.
        level: confidence level of the change's interval.
        problem: why the forecast is not to be trusted, if that is known already.
        seconds: time spent, by phase.
        peak_bytes: growth of the process's peak memory.
    """
    change, causes = first_order.change, first_order.causes
    rate, mean_length = entropy_rate(entropy, responses)
    # Truths on fixed prefixes are in nats a token: this factor makes them comparable with the change.
    tokens = mean_length if objective.is_sum_over_tokens else 1.0
    fixed = importance = None
    if truths is not None:
        fixed, importance = FixedPrefixes(truths.on_same_prefixes, first_order.on_same_prefixes), truths.importance
    se = None if change.se is None else change.se / tokens
    scatter = surprise_sd(log_prob, entropy, responses)
    reason = (
        change.reason
        or problem
        or ("the policy's scores are not finite after the step" if truths is None else "")
        or first_order.doubt
        or why_not_linear(fixed, importance, se, is_uniform=is_near_uniform(rate, scatter))
    )
    # A step that is not linear moves the truth to one side: without this, the interval would not hold it.
    bend = 0.0 if fixed is None else tokens * (fixed.true - fixed.linear)
    return EntropyForecast(
        delta=change.delta,
        se=change.se,
        level=level,
        low=None if change.low is None else change.low + min(bend, 0.0),
        high=None if change.high is None else change.high + max(bend, 0.0),
        reason=reason,
        is_valid=not reason,
        objective=objective.kind,
        update=update,
        entropy=rate,
        entropy_se=entropy_rate_se(entropy, responses),
        surprise_sd=scatter,
        v_x=change.v_x,
        v_y=change.v_y,
        double_count=change.double_count,
        bars_dot=first_order.bars_dot,
        n_evaluation=responses.n_prompts,
        n_update=len(causes.prompts) if causes is not None else 0,
        fixed_prefixes=fixed,
        importance=importance,
        rollouts=truths.rollouts if truths is not None else None,
        shares=shares_by_prompt(change, responses),
        causes=causes,
        derivatives=first_order.derivatives,
        seconds=seconds,
        peak_bytes=peak_bytes,
    )


def unknown(
    reason: str,
    objective: Objective,
    update: Update,
    *,
    entropy: float | None = None,
    entropy_se: float | None = None,
    surprise_sd: float | None = None,
) -> EntropyForecast:
    """A forecast that could not be made, perhaps with the entropy before the update."""
    return EntropyForecast(
        level=0.95,
        reason=reason,
        is_valid=False,
        objective=objective,
        update=update,
        entropy=entropy,
        entropy_se=entropy_se,
        surprise_sd=surprise_sd,
    )


def why_not_linear(
    fixed: FixedPrefixes | None, importance: MeasuredChange | None, se: float | None, *, is_uniform: bool = False
) -> str:
    """Why a first-order forecast of this step is not to be trusted; empty if it is to be trusted.

    Args:
        fixed: truth and first order on the same prefixes.
        importance: truth by importance sampling.
        se: the forecast's standard error, in nats a token. A deviation from first order below half of it is harmless.
        is_uniform: whether the policy is almost uniform. Then a smaller step is not the way out.
    """
    why = ""
    if importance is not None and not importance.is_known:
        why = (
            f"the effective sample size of the responses after it is {importance.ess_fraction:.0%} of their number, "
            f"and at least {LEAST_ESS_FRACTION:.0%} is needed"
        )
    harmless = max(_NO_CHANGE, 0.0 if se is None else _HARMLESS * se)
    if fixed is not None and abs(fixed.true - fixed.linear) > harmless:
        low, high = LINEAR_BETWEEN
        ratio = fixed.linear_over_true
        if ratio is None or not low <= ratio <= high:
            numbers = f"first order gives {fixed.linear:+.2e} nats a token, and the true change is {fixed.true:+.2e}"
            why = f"on the same prefixes, {numbers}"
    if why and is_uniform:
        return f"{NEAR_UNIFORM}: {why}: train on, and forecast later steps"
    return f"{TOO_LARGE}: {why}: use a smaller learning rate" if why else ""
