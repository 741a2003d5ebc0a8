"""The forecast of an update's effect on the entropy, made of scores before and after it, and perhaps derivatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from sonde.policy.stats.attribution import Causes, Share, attribution_table, shares_by_prompt
from sonde.policy.stats.columns import OF_FORECAST
from sonde.policy.stats.entropy_change import EntropyChange, EntropyObjective, Objective, with_error
from sonde.policy.stats.entropy_gradient import Responses, Scores, surprise_sd, weighted_entropy_rate
from sonde.policy.stats.forecast_point import LEAST_SUPPORT, LINEAR_BETWEEN, TOO_LARGE, is_near_uniform
from sonde.policy.stats.importance import MeasuredChange, Support
from sonde.policy.stats.own_policy import OwnPolicyTest, SamplerTest
from sonde.policy.stats.token_positions import AtPositions, entropy_by_position
from sonde.stats.columns import taken
from sonde.stats.intervals import LEVEL
from sonde.wording import percent

Update = Literal["step", "gradient"]


UNIFORM_MOVES_FAR = "not to be trusted: the policy is almost uniform, and the step takes it too far"
NEAR_UNIFORM = "not to be trusted: the policy is almost uniform, where the entropy has no slope"
_NO_CHANGE = 1e-6
"""Nats a token. Smaller differences are within the rounding of fp32 scores."""
_HARMLESS = 0.5
"""Standard errors. A deviation from first order that is smaller leaves the interval's coverage above 90 %."""
_NOT_FINITE_AFTER = "the policy's scores are not finite after the step"


@dataclass(frozen=True)
class FixedPrefixes:
    """The change of R on the same prefixes, as if the update changed no sampled token; in nats a token.

    Attributes:
        true: the measured change. It is exact: on given prefixes nothing is random. None if it was not measured.
        linear: the change to first order; None if no derivative was taken.
    """

    true: float | None
    linear: float | None = None

    @property
    def linear_over_true(self) -> float | None:
        """About 1 if the step is small enough to be linear; None if nothing changes or no derivative was taken."""
        return self.linear / self.true if self.true and self.linear is not None else None


@dataclass(frozen=True)
class Estimate:
    """A change with its error, in nats.

    Attributes:
        delta: the change.
        se: its standard error; None if unknown.
        low: lower end of its interval; None if unknown.
        high: upper end; None if unknown.
    """

    delta: float
    se: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        return with_error(self.delta, self.se)


@dataclass(frozen=True, kw_only=True)
class EntropyForecast:
    """What an update will do to the policy's entropy. A number that is unknown is None, and `reason` says why.

    Attributes:
        delta: the change in nats: a token with objective="per_token", a response with "sequence". With update="step",
            it is that of the finite step; with "gradient", that to first order.
        se: its standard error.
        level: confidence level of its interval.
        low: lower end of its interval. With update="gradient", the interval also includes the deviation from first
            order on the same prefixes.
        high: upper end.
        reason: why a number is unknown, or why the forecast is not to be trusted; empty otherwise.
        objective: which entropy is meant.
        update: which update is meant.
        entropy: R before the update, in nats a token.
        entropy_se: standard error of `entropy` over the evaluation prompts; None with fewer than 2.
        surprise_sd: scatter of −s_k around H_k before the update, in nats; almost 0 for a uniform policy.
        own_policy: whether the evaluation responses are the policy's own; None if they came with `log_prob=`.
        sampler: how far the sampler of the evaluation responses is from the policy; None without `log_prob=`.
        finite_step: the change by the finite step. With update="gradient", that of the real step in `around_step`.
        support: how well the responses represent the policy after the step.
        first_order: the change to first order; None if no derivative was taken.
        doubt: why `first_order` and `causes` are not to be trusted; empty if they are.
        sharpening: the part of `delta` from distributions that change at the same prefixes; None if unknown.
        drift: the part of `delta` from prefixes and lengths that become more or less likely; None if unknown.
        v_x: variance of `delta` from the evaluation prompts.
        v_y: variance of `delta` from the update prompts; 0 along a given step.
        bars_dot: X̄·Ȳ with update="gradient"; the change to first order along a given step, if it was taken.
        n_evaluation: number of evaluation prompts, B_E.
        n_update: number of update prompts, B_U; 0 if they were not passed.
        fixed_prefixes: the truth on the same prefixes; None if not measured.
        importance: the change by weights of whole responses; None if not measured.
        rollouts: the truth by fresh rollouts; None if not measured.
        by_position: quantiles of the tokens' entropies by their position in the response, before the update.
        shares: every evaluation prompt's part of `delta`. The prompt that lowers entropy most comes first.
        causes: where the change to first order comes from; None if not asked for.
        coefficient_to_hold: what was measured beside, as by `sonde.contrib.hold_entropy`; None if nothing was.
        precision: in which arithmetic responses were scored: "float32", or as the "model" computes.
        why_precision: why not in 32 bits, if they were to be; empty if they were.
        rounded_away: part of the step, by its norm, that parameters of 16 bits do not hold after the optimizer's
            rounding; 0 for parameters of 32 bits, None if unknown.
        seconds: time spent, by phase.
    """

    delta: float | None = None
    se: float | None = None
    level: float = LEVEL
    low: float | None = None
    high: float | None = None
    reason: str
    objective: Objective
    update: Update
    entropy: float | None = None
    entropy_se: float | None = None
    surprise_sd: float | None = None
    own_policy: OwnPolicyTest | None = None
    sampler: SamplerTest | None = None
    finite_step: Estimate | None = None
    support: Support | None = None
    first_order: Estimate | None = None
    doubt: str = ""
    sharpening: float | None = None
    drift: float | None = None
    v_x: float | None = None
    v_y: float | None = None
    bars_dot: float | None = None
    n_evaluation: int = 0
    n_update: int = 0
    fixed_prefixes: FixedPrefixes | None = None
    importance: MeasuredChange | None = None
    rollouts: MeasuredChange | None = None
    by_position: tuple[AtPositions, ...] = ()
    shares: tuple[Share, ...] = ()
    causes: Causes | None = None
    coefficient_to_hold: Any = None
    precision: str = ""
    why_precision: str = ""
    rounded_away: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_valid(self) -> bool:
        """Whether `reason` is empty."""
        return not self.reason

    @property
    def frac_var(self) -> float | None:
        """The variance of `delta` over its square: 0.01 for a standard error of a tenth; None if unknown."""
        return None if self.se is None or not self.delta else (self.se / self.delta) ** 2

    def after_sampling(self, seconds: float) -> EntropyForecast:
        """The same, with the seconds that drawing its evaluation responses took."""
        return replace(self, seconds={"sampling": seconds, **self.seconds})

    def metrics(self) -> dict[str, float | None]:
        """The forecast's numbers by metric name; None if unknown."""
        return taken(OF_FORECAST, self)

    def table(self, texts: Mapping[int, str] | None = None, *, n: int = 5) -> str:
        """The prompts that lower and that raise entropy most, and where the change comes from, as lines of text.

        Args:
            texts: the prompts' texts by their numbers, as `Rollouts.texts`.
            n: how many prompts at either end.

        Raises:
            ValueError: for texts that are no mapping.
        """
        if texts is not None and not isinstance(texts, Mapping):
            raise ValueError(
                f"texts must map the prompts' numbers to their texts, got a {type(texts).__name__}: pass Rollouts.texts"
            )
        return attribution_table(self.shares, self.causes, texts or {}, n)

    def __str__(self) -> str:
        per = "a token" if self.objective == "per_token" else "a response"
        if self.delta is None:
            return f"entropy change unknown: {self.reason}"
        parts = [f"entropy {self.entropy:.3f} nats a token; forecast {with_error(self.delta, self.se)} nats {per}"]
        if self.update == "gradient" and self.finite_step is not None:
            parts.append(f"the step {self.finite_step}")
        if self.update == "step" and self.first_order is not None:
            parts.append(f"first order {self.first_order}")
        if self.rollouts is not None:
            parts.append(f"fresh rollouts {self.rollouts}")
        if self.sampler is not None:
            parts.append(f"KL of sampler and policy {self.sampler.kl:.1e} nats a token")
        if self.coefficient_to_hold is not None:
            parts.append(str(self.coefficient_to_hold))
        return "; ".join([*parts, self.reason] if self.reason else parts)


def before_update(
    scores: Scores,
    objective: EntropyObjective,
    update: Update,
    *,
    sampled_log_prob: Tensor | None = None,
    prefix_weights: Tensor | None = None,
) -> EntropyForecast:
    """What the evaluation responses say of the policy before an update: a forecast without the change.

    Args:
        scores: of the evaluation responses, at θ.
        objective: which entropy is meant.
        update: which update is meant.
        sampled_log_prob: log-probabilities of another policy that sampled them, [responses, tokens]; None if they are
            the policy's own.
        prefix_weights: by `prefix_weights`, of such responses.
    """
    s, h, responses = scores.log_prob, scores.entropy, scores.responses
    entropy, entropy_se = weighted_entropy_rate(h, responses, prefix_weights)
    return EntropyForecast(
        reason="",
        objective=objective.kind,
        update=update,
        entropy=entropy,
        entropy_se=entropy_se,
        surprise_sd=surprise_sd(s, h, responses),
        own_policy=OwnPolicyTest.of(s, h, responses) if sampled_log_prob is None else None,
        sampler=None if sampled_log_prob is None else SamplerTest.of(s, sampled_log_prob, responses),
        by_position=entropy_by_position(h, responses),
    )


def with_change(
    found: EntropyForecast,
    name: Literal["first_order", "finite_step"],
    change: EntropyChange,
    responses: Responses,
    **more: Any,
) -> EntropyForecast:
    """A forecast with a change of its update, which is its headline if it is of the kind that is forecast.

    Args:
        found: what is known so far.
        name: of the field.
        change: to first order, or by the finite step.
        responses: the evaluation responses.
        **more: other fields.
    """
    more[name] = Estimate(change.delta, change.se, change.low, change.high)
    found = replace(found, **more)
    if (name == "finite_step") != (found.update == "step"):
        return found
    same = ("delta", "se", "low", "high", "reason", "sharpening", "drift", "v_x", "v_y")
    return replace(found, shares=shares_by_prompt(change, responses), **{n: getattr(change, n) for n in same})


def judged(found: EntropyForecast, responses: Responses, objective: EntropyObjective) -> EntropyForecast:
    """The forecast with the first reason not to trust it.

    Args:
        found: by `before_update` and `with_change`; without `finite_step` if scores are not finite after the step. With
            update="gradient", it has `first_order`.
        responses: the evaluation responses.
        objective: which entropy is meant.
    """
    causes, fixed = found.causes, found.fixed_prefixes
    is_uniform, bend = is_near_uniform(found.entropy, found.surprise_sd), 0.0
    reasons = [found.reason, _NOT_FINITE_AFTER if found.finite_step is None else ""]
    if found.update == "gradient":
        # Truths on fixed prefixes are in nats a token: this factor makes them comparable with the change.
        tokens = objective.total_weight(responses)
        se = None if found.se is None else found.se / tokens
        reasons += [found.doubt, why_not_linear(fixed, se, is_uniform=is_uniform)]
        # A step that is not linear moves the truth to one side: without this, the interval would not hold it.
        if fixed is not None and fixed.true is not None and fixed.linear is not None:
            bend = tokens * (fixed.true - fixed.linear)
    elif found.support is not None:
        reasons.append(why_no_support(found.support, is_uniform=is_uniform))
    reasons += [test.why_not for test in (found.own_policy, found.sampler) if test is not None]
    return replace(
        found,
        n_evaluation=responses.n_prompts,
        low=None if found.low is None else found.low + min(bend, 0.0),
        high=None if found.high is None else found.high + max(bend, 0.0),
        reason=next(filter(None, reasons), ""),
        doubt=found.doubt or ("" if causes is None else causes.doubt),
    )


def why_no_support(support: Support, *, is_uniform: bool = False) -> str:
    """Why a finite step is not to be trusted; empty if enough positions have support.

    Args:
        support: of the positions after the step.
        is_uniform: whether the policy is almost uniform. It must change much to learn anything, so a smaller step is
            not the way out.
    """
    if support.is_enough:
        return ""
    numbers = f"their effective sample size is {percent(support.ess_fraction)} of their number, a mean over positions"
    if support.from_position is not None:
        numbers += (
            f"; from token {support.from_position} on it falls below {percent(LEAST_SUPPORT)}, and tokens of which "
            f"this holds carry {percent(support.unsupported)} of the entropy after the step"
        )
    if is_uniform:
        return f"{UNIFORM_MOVES_FAR} for these responses: {numbers}: train on, and forecast later steps"
    return f"{TOO_LARGE} for these responses: {numbers}: use a smaller learning rate, or more prompts"


def why_not_linear(fixed: FixedPrefixes | None, se: float | None, *, is_uniform: bool = False) -> str:
    """Why a first-order forecast of this step is not to be trusted; empty if it is to be trusted.

    Args:
        fixed: truth and first order on the same prefixes.
        se: the forecast's standard error, in nats a token. A deviation from first order below half of it is harmless.
        is_uniform: whether the policy is almost uniform. Then a smaller step is not the way out.
    """
    if fixed is None or fixed.true is None or fixed.linear is None:
        return ""
    harmless = max(_NO_CHANGE, 0.0 if se is None else _HARMLESS * se)
    low, high = LINEAR_BETWEEN
    ratio = fixed.linear_over_true
    if abs(fixed.true - fixed.linear) <= harmless or (ratio is not None and low <= ratio <= high):
        return ""
    numbers = f"first order gives {fixed.linear:+.2e} nats a token, and the true change is {fixed.true:+.2e}"
    if is_uniform:
        return f"{NEAR_UNIFORM}: on the same prefixes, {numbers}: train on, and forecast later steps"
    return f"{TOO_LARGE} to be linear: on the same prefixes, {numbers}: use a smaller learning rate"
