"""The trial that tells which entropy coefficient would hold the entropy: see `stats/coefficient_to_hold.py`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sonde.policy.cost import Cost
from sonde.policy.entropy_gradients import EntropyGradients
from sonde.policy.scoring.optimizer_step import Direction, dot, taken
from sonde.policy.scoring.scorer import Scored, Scorer
from sonde.policy.scoring.sustained_step import SustainedStep
from sonde.policy.stats.coefficient_to_hold import (
    ENDLESS,
    FEWEST_PROMPTS,
    NO_ANSWER,
    NO_MOMENTUM,
    NO_SLOPE,
    OUT_OF_REACH,
    SLOPE_UNKNOWN,
    TOO_FEW,
    CoefficientToHold,
    Trial,
    coefficient_to_hold,
    unknown_coefficient,
    wanted_effect,
    without_each_prompt,
)
from sonde.policy.stats.finite_step import FiniteStep, Scores, change_by_finite_step
from sonde.wording import percent

_TRIALS = 60
"""How often the size of the trial is corrected at most: Adam's answer is not in proportion to a bonus."""
_OFF_AT_MOST = 0.1
"""Part by which a trial's effect may miss the wanted one."""
_ROUNDED_AWAY = 0.1
_ROUNDED = (
    "of the trial with a bonus are rounded away by parameters of 16 bits: use precision='float32', or train "
    "parameters in fp32"
)


class EntropyBonus:
    """What an entropy bonus adds to the optimizer's step, and how much it changes the entropy.

    Gradients are taken when it is made: parameters hold θ, and `.grad` the gradients of the step. It holds four vectors
    of the size of the parameters until `coefficient` was called, and two more with Adam.

    Args:
        model: the policy.
        parameters: its trainable parameters.
        gradients: of the evaluation responses.
        scorer: runs the model over responses.
        base: E, scored at θ.
        optimizer: whose step it is.
        gradient_scale: factor that gradients are still multiplied by before the step.
        applied_scale: factor of the loss's gradient that `.grad` holds already: a clip's coefficient, say.
        present: the coefficient of the bonus that the step contains already.
        cost: counts seconds.
        why_not: why the optimizer has no answer to a bonus, on all ranks; empty if it has.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        gradients: EntropyGradients,
        scorer: Scorer,
        base: Scored,
        optimizer: Any,
        *,
        gradient_scale: float,
        applied_scale: float,
        present: float,
        cost: Cost,
        why_not: str = "",
    ) -> None:
        self._model, self._scorer, self._base = model, scorer, base
        self._gradients, self._present, self._cost = gradients, present, cost
        self._halves = base.responses.halves() if base.responses.n_prompts >= FEWEST_PROMPTS else []
        self._rounded_away = 0.0
        if not self._halves:
            why_not = f"{TOO_FEW}, got {base.responses.n_prompts}"
        self.why_not = why_not
        """Why the coefficient is unknown; empty if it can be computed. May be set before it is asked for."""
        if why_not:
            return
        with cost.phase("coefficient"):
            self._answer = SustainedStep(
                optimizer, parameters, gradient_scale=gradient_scale, applied_scale=applied_scale
            )
            self._of_bonus = [gradients.put_away(gradients.token_entropy_gradient(half)) for half in self._halves]
            self._of_entropy = [gradients.put_away(gradients.entropy_gradient(half)) for half in self._halves]

    def coefficient(self, now: Scored, step: FiniteStep, *, level: float) -> CoefficientToHold:
        """The coefficient that would hold the entropy. Parameters hold θ⁺.

        Args:
            now: E, scored at θ⁺.
            step: the change by the step.
            level: confidence level.
        """
        if self.why_not:
            return unknown_coefficient(self.why_not, self._present)
        with self._cost.phase("coefficient"):
            if self._answer.is_endless:
                return unknown_coefficient(ENDLESS, self._present)
            if self._answer.is_zero():
                return unknown_coefficient(NO_ANSWER, self._present)
            if self._answer.lacks_momentum:
                return unknown_coefficient(NO_MOMENTUM, self._present)
            assert step.change.delta is not None
            if not (slope := _of_both(self._slopes(0.0))):
                return unknown_coefficient(NO_SLOPE, self._present)
            delta, sign = step.change.delta, -1.0 if step.change.delta > 0 else 1.0
            fall, rise = (self._slopes(size) for size in (-math.inf, math.inf))
            opposed = fall if sign < 0 else rise
            if abs(delta) > max(opposed):
                return unknown_coefficient(OUT_OF_REACH, self._present)
            wanted = wanted_effect(delta, step.change.se, most=_of_both(opposed))
            size = self._trial_size(sign * wanted, slope)
            if size is None:
                return unknown_coefficient(SLOPE_UNKNOWN, self._present)
            trial = self._trial(now, size, level)
            if math.isfinite(max(fall) + max(rise)):
                trial = dataclasses.replace(trial, reachable=(delta - max(fall), delta + max(rise)))
        if self._rounded_away > _ROUNDED_AWAY and not self._scorer.adds_residuals:
            return unknown_coefficient(f"{percent(self._rounded_away)} {_ROUNDED}", self._present)
        return coefficient_to_hold(step, trial, present=self._present, level=level)

    def _trial_size(self, wanted: float, slope: float) -> float | None:
        """τ, whose bonus moves the entropy by about so many nats, from the slope at 0; None if none is found."""
        size = wanted / slope
        smaller, larger = 0.0, math.inf
        for _ in range(_TRIALS):
            effect = _of_both(self._slopes(size)) * abs(size)
            if abs(effect - abs(wanted)) <= _OFF_AT_MOST * abs(wanted):
                return size
            if effect < abs(wanted):
                smaller = abs(size)
            else:
                larger = abs(size)
            between = 2.0 * smaller if math.isinf(larger) else 0.5 * (smaller + larger)
            size = math.copysign(between, wanted)
        return None

    def _slopes(self, size: float) -> tuple[float, float]:
        """∇H̄·Δ/τ, each half along the Δ of the other half; and along its own, which has noise in common with it.

        For τ = ±∞ it is |∇H̄·Δ| itself, infinite without a bound.

        In nats a token, as H̄: `total_weight` makes it one of the entropy that is to hold.
        """
        across = own = 0.0
        for k in (0, 1):
            bonus, other = (self._gradients.at_work(self._of_bonus[i]) for i in (k, 1 - k))
            if math.isinf(size):
                up = math.copysign(1.0, size)
                if (moves := self._answer.farthest(bonus, up)) is None:
                    return math.inf, math.inf
            else:
                moves = self._answer(bonus, size) if size else self._answer.derivative(bonus, 0.0, bonus)
            per_size = math.copysign(1.0, size) if math.isinf(size) else size or 1.0
            across += 0.5 * dot(other, moves) / per_size
            own += 0.5 * dot(bonus, moves) / per_size
        weight = self._gradients.objective.total_weight(self._base.responses)
        return weight * across, weight * own

    def _trial(self, now: Scored, size: float, level: float) -> Trial:
        base, responses = self._base, self._base.responses
        options = self._gradients.options
        log_prob, entropy = now.log_prob.clone(), now.entropy.clone()
        shift = torch.zeros(responses.n_prompts, dtype=torch.float64)
        slopes: list[Tensor] = []
        for k in (0, 1):
            # The bonus of one half moves the other. For that bonus's own scatter, ∇R of the other half moves the one.
            half = self._halves[1 - k]
            bonus = self._gradients.at_work(self._of_bonus[k])
            along_bonus = self._answer(bonus, size)
            length = math.sqrt(dot(along_bonus, along_bonus))
            there = self._scored_after(along_bonus)
            del along_bonus
            if not there.is_finite:
                return Trial(size, None, shift)
            log_prob[half], entropy[half] = there.log_prob[half], there.entropy[half]
            along_entropy = self._answer.derivative(bonus, size, self._gradients.at_work(self._of_entropy[1 - k]))
            longest = math.sqrt(dot(along_entropy, along_entropy))
            if not longest:
                slopes.append(torch.zeros_like(now.entropy))
                continue
            reach = length / longest  # a step as long as the trial's
            for vector in along_entropy.values():
                vector.mul_(reach)
            there = self._scored_after(along_entropy)
            if not there.is_finite:
                return Trial(size, None, shift)
            slopes.append((there.entropy - now.entropy) / reach)
        change = change_by_finite_step(
            Scores(base.log_prob, base.entropy),
            Scores(log_prob, entropy),
            responses,
            self._gradients.objective,
            sampled_log_prob=base.sampled_log_prob,
            weighting=options.weighting,
            clip_at=options.clip_at,
            level=level,
        )
        return Trial(size, change, without_each_prompt(slopes, self._halves, responses))

    def _scored_after(self, step: Direction) -> Scored:
        """E, scored a step further, whose tensors are used up."""
        with (
            taken(step, self._model, keeps_residuals=True) as there,
            self._scorer.adding(there.residuals),
        ):
            self._rounded_away = max(self._rounded_away, there.rounded_away)
            return self._scorer.scored(self._base.rollouts)


def _of_both(slopes: tuple[float, float]) -> float:
    """The slope across halves, if it is positive; or a half's along its own Δ, which is larger."""
    across, own = slopes
    return max(across, 0.0) or max(own, 0.0)
