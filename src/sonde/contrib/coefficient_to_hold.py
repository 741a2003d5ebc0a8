"""The entropy coefficient that would hold a policy's entropy.

A trainer with an entropy bonus minimises  policy loss − c·H̄,  H̄ the mean entropy of a sampled token. The bonus adds
c·∇H̄ to the ascent. Once its momentum has built up, each step moves besides by the optimizer's answer to c·∇H̄: about
c·D with D = η P∇H̄, P = 1/(1 − μ) for SGD and 1/(√v̂ + ε) for Adam (`sustained_step.py`). So

    δH(c) = δH + (c − c₀) S      S = ∇R·D      δH(c) = 0 at  c = c₀ − δH/S

where c₀ is the present coefficient, whose bonus is in the step already. S comes from a trial: the change by the step
plus the answer to τ·∇H̄, with a τ for which the trial is about as large as the change it is to undo. ∇H̄ scatters, and S
is a product of it with ∇R. From the same prompts, both would contain the same noise, and S would be too large by
tr Σ/B. So the prompts are halved: the change of each half is along the answer to the bonus of the *other* half.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.policy.stats.entropy_gradient import Responses, WeightedSums
from sonde.policy.stats.importance import FiniteStep, jackknife_covariance
from sonde.stats.intervals import RatioInterval, Status, signed_ratio_interval
from sonde.wording import number

FEWEST_PROMPTS = 4
"""Evaluation prompts: two in each half."""
TOO_FEW = f"the entropy coefficient needs at least {FEWEST_PROMPTS} evaluation prompts, two in each half"
NO_SLOPE = "a bonus does not move the entropy: its gradient is 0, as that of a uniform policy or of a certain one"
NO_ANSWER = (
    "the optimizer would not move along a bonus: its learning rate is 0, as a warm-up begins, or gradient_scale is "
    "0, or no gradient has reached any parameter so far, so that Adam has no second moment"
)
ENDLESS = "with a momentum of 1 or more, a bonus moves the policy further in each step, without end"
NO_MOMENTUM = (
    "the optimizer has taken no step yet, so this step lacks the momentum of later ones: ask again after 1/(1 − μ) "
    "steps, 10 with a momentum μ of 0.9"
)
OUT_OF_REACH = (
    "no bonus undoes this change: each element of Adam's has a largest step, and together they move the entropy by less"
)
_LEAST_TRIAL = 1e-5
"""Nats. A step may change nothing, as that of a window whose rewards are all equal; a trial must change something."""
_NO_TRIAL = "the trial with a bonus gives scores that are not finite"
_NO_SUPPORT = "with a bonus, the evaluation responses do not represent the policy after the step: use a smaller step"
_LOWERS = "a bonus at the present prefixes lowers the entropy, since it makes prefixes of low entropy more likely"
SLOPE_UNKNOWN = "the bonus's effect cannot yet be distinguished from 0: use more evaluation prompts"


@dataclass(frozen=True)
class CoefficientToHold:
    """The coefficient c of an entropy bonus, in the loss  policy loss − c·H̄,  with which the entropy would not change.

    H̄ is the mean entropy of a token in nats, as TRL's `entropy_coef` weighs it. The coefficient is negative if the
    entropy would rise without a bonus.

    Attributes:
        value: the coefficient; None unless resolved.
        low: lower end of its interval; −∞ for an upper bound, None if unresolved.
        high: upper end; ∞ for a lower bound, None if unresolved.
        status: "resolved", "lower_bound", "upper_bound" or "unresolved".
        reason: why the coefficient is not resolved; empty if it is.
        present: c₀, the coefficient whose bonus is in the step already.
        delta: the change of entropy with the present coefficient, in nats.
        change_per_unit: S, the change by a step for each unit of the coefficient, in nats, once the bonus has acted for
            as long as the optimizer remembers; None if unknown.
        change_per_unit_se: its standard error; None if unknown.
    """

    value: float | None
    low: float | None
    high: float | None
    status: Status
    reason: str
    present: float
    delta: float | None = None
    change_per_unit: float | None = None
    change_per_unit_se: float | None = None

    def for_change(self, nats: float) -> float | None:
        """The coefficient with which the entropy would change by so many nats a step.

        It is the same line through the trial: good for changes of about the size of `delta`.

        Returns:
            None unless resolved.

        Raises:
            ValueError: for a number that is not finite.

        Example:
            >>> hold = CoefficientToHold(0.02, 0.01, 0.03, "resolved", "", 0.0, -0.01, 0.5)
            >>> hold.for_change(-0.005)
            0.01
        """
        if not math.isfinite(nats):
            raise ValueError(f"the change must be a finite number of nats, got {nats!r}")
        if self.value is None or not self.change_per_unit:
            return None
        return self.value + nats / self.change_per_unit

    def __str__(self) -> str:
        match self.status:
            case "resolved":
                bounds = f"{number(self.value)} [{number(self.low)} to {number(self.high)}]"
            case "lower_bound":
                bounds = f"above {number(self.low)}"
            case "upper_bound":
                bounds = f"below {number(self.high)}"
            case _:
                bounds = f"unknown: {self.reason}"
        return f"entropy coefficient to hold: {bounds}; now {number(self.present)}"


def unknown_coefficient(reason: str, present: float) -> CoefficientToHold:
    """A coefficient that could not be computed."""
    return CoefficientToHold(None, None, None, "unresolved", reason, present)


@dataclass(frozen=True)
class Trial:
    """What is known of a step with some bonus.

    Attributes:
        size: τ, the coefficient beyond the present one.
        change: by the step plus τ D, each half of the prompts along the D of the other half; None if scores are not
            finite.
        without_each: how much ∇R·D changes if a prompt is left out of the D, [prompts]: the jackknife's part of S from
            the scatter of the bonus's own gradient.
    """

    size: float
    change: FiniteStep | None
    without_each: Tensor


def wanted_effects(delta: float, se: float | None) -> tuple[float, float]:
    """By how much a trial is to move the entropy, in nats: as much as the step, against it, and seen above the scatter.

    Args:
        delta: the change by the step, in nats.
        se: its standard error.

    Returns:
        The effect, and the least one that would do: a bonus may have no larger one.
    """
    least, sign = max(abs(delta), _LEAST_TRIAL), -1.0 if delta > 0 else 1.0
    return sign * max(least, 2.0 * (se or 0.0)), sign * least


def without_each_prompt(d_entropy: Sequence[Tensor], halves: Sequence[Tensor], responses: Responses) -> Tensor:
    """How ∇R·D changes if a prompt is left out of the D; [prompts].

    D is η P∇H̄ of one half, and ∇R is that of the other: so ∇R·D is the change of H̄ of one half along η P∇R of the
    other, and H̄ is a ratio of two means over prompts.

    Args:
        d_entropy: D H_k along η P∇R of the *other* half, for the first and the second half, [responses, tokens] each.
        halves: masks of the responses of the first and the second half, [responses] each.
        responses: which tokens count.
    """
    shifts = torch.zeros(responses.n_prompts, dtype=torch.float64)
    length = responses.per_prompt(responses.length)
    for along_other, half in zip(d_entropy, halves, strict=True):
        own = torch.zeros(responses.n_prompts, dtype=torch.bool)
        own[responses.index[half]] = True
        change = responses.per_prompt(responses.tokens("d_entropy", along_other).sum(1))
        sums = WeightedSums(change[own][:, None], length[own][:, None])
        # Each half's product counts by its share of the prompts: that of the half which is evaluated, the other one.
        others = 1.0 - float(own.sum()) / responses.n_prompts
        shifts[own] = others * (sums.without_each() - float(sums.ratios()))
    return shifts


def coefficient_to_hold(step: FiniteStep, trial: Trial, *, present: float) -> CoefficientToHold:
    """The coefficient with which the entropy would not change, with Fieller's interval.

    Args:
        step: the change by the step, with the present coefficient.
        trial: the change by the step with a bonus besides.
        present: c₀.
    """
    if trial.change is None:
        return unknown_coefficient(_NO_TRIAL, present)
    delta, with_bonus = step.change.delta, trial.change.change.delta
    if not trial.change.support.is_enough:
        return unknown_coefficient(_NO_SUPPORT, present)
    slope = (with_bonus - delta) / trial.size
    slopes = (trial.change.without_each - step.without_each) / trial.size + trial.without_each
    variances = (
        jackknife_covariance(step.without_each, step.without_each),
        jackknife_covariance(slopes, slopes),
        jackknife_covariance(-step.without_each, slopes),
    )
    if None in variances:
        return unknown_coefficient(step.change.reason or trial.change.change.reason, present)
    var_delta, var_slope, covariance = (float(v or 0.0) for v in variances)
    interval = signed_ratio_interval(
        -delta,
        slope,
        var_numerator=var_delta,
        var_denominator=var_slope,
        covariance=covariance,
        n_samples=1.0 + min(step.degrees_of_freedom, trial.change.degrees_of_freedom),
    )
    is_resolved = interval.status == "resolved"
    return CoefficientToHold(
        present - delta / slope if is_resolved else None,
        None if interval.low is None else present + interval.low,
        None if interval.high is None else present + interval.high,
        interval.status,
        "" if is_resolved else _why_unresolved(interval, slope),
        present,
        delta,
        slope,
        math.sqrt(var_slope),
    )


def _why_unresolved(interval: RatioInterval, slope: float) -> str:
    return _LOWERS if interval.status == "unresolved" and slope < 0 else SLOPE_UNKNOWN
