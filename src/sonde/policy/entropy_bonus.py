"""The trial that tells which entropy coefficient would hold the entropy: see `stats/coefficient_to_hold.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sonde.parallel.unwrap import unwrap_optimizer
from sonde.policy.cost import Cost
from sonde.policy.entropy_gradients import EntropyGradients
from sonde.policy.scoring.optimizer_step import Direction, dot, forecast_step, taken
from sonde.policy.scoring.scorer import Scored, Scorer
from sonde.policy.stats.coefficient_to_hold import (
    FEWEST_PROMPTS,
    NO_SLOPE,
    TOO_FEW,
    CoefficientToHold,
    Trial,
    coefficient_to_hold,
    trial_size,
    unknown_coefficient,
    without_each_prompt,
)
from sonde.policy.stats.finite_step import FiniteStep, Scores, change_by_finite_step
from sonde.wording import percent

_ROUNDED_AWAY = 0.1
_ROUNDED = (
    "of the trial with a bonus are rounded away by parameters of 16 bits: use precision='float32', or train "
    "parameters in fp32"
)


class EntropyBonus:
    """What an entropy bonus adds to the optimizer's step, and how much it changes the entropy.

    Gradients are taken when it is made: parameters hold θ, and `.grad` the gradients of the step. It holds four vectors
    of the size of the parameters until `coefficient` was called.

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
    ) -> None:
        self._model, self._scorer, self._base = model, scorer, base
        self._gradients, self._present, self._cost = gradients, present, cost
        self._halves = base.responses.halves() if base.responses.n_prompts >= FEWEST_PROMPTS else []
        factors = {
            p: applied_scale if group["maximize"] else -applied_scale
            for group in unwrap_optimizer(optimizer).param_groups
            for p in group["params"]
        }

        def answer(gradient: Direction) -> Direction:
            """The step that the optimizer takes uphill along this gradient, once it has been there for long."""
            uphill = {p: factors.get(p, 0.0) * v for p, v in gradients.at_work(gradient).items()}
            return gradients.put_away(
                forecast_step(optimizer, of=parameters, gradient_scale=gradient_scale, part="sustained", along=uphill)
            )

        self._bonus_steps: list[Direction] = []
        self._entropy_steps: list[Direction] = []
        self._slope = self._rounded_away = 0.0
        if not self._halves:
            return
        with cost.phase("coefficient"):
            uphill = [gradients.put_away(gradients.token_entropy_gradient(half)) for half in self._halves]
            self._bonus_steps.extend(answer(gradient) for gradient in uphill)
            # In nats a token, as H̄: the factor makes it one of the entropy that is to hold.
            per_token = gradients.objective.total_weight(base.responses)
            self._slope = per_token * (self._cross(uphill) or self._cross(uphill, is_own=True))
            del uphill
            self._entropy_steps.extend(
                answer(gradients.put_away(gradients.entropy_gradient(half))) for half in self._halves
            )

    def coefficient(self, now: Scored, step: FiniteStep, *, level: float) -> CoefficientToHold:
        """The coefficient that would hold the entropy. Parameters hold θ⁺.

        Args:
            now: E, scored at θ⁺.
            step: the change by the step.
            level: confidence level.
        """
        if not self._halves:
            return unknown_coefficient(f"{TOO_FEW}, got {self._base.responses.n_prompts}", self._present)
        assert step.change.delta is not None
        if not self._slope:
            return unknown_coefficient(NO_SLOPE, self._present)
        with self._cost.phase("coefficient"):
            size = trial_size(step.change.delta, step.change.se, self._slope)
            trial = self._trial(now, size, level)
        if self._rounded_away > _ROUNDED_AWAY and not self._scorer.adds_residuals:
            return unknown_coefficient(f"{percent(self._rounded_away)} {_ROUNDED}", self._present)
        return coefficient_to_hold(step, trial, present=self._present, level=level)

    def _cross(self, gradients: Sequence[Direction], *, is_own: bool = False) -> float:
        """∇H̄·D, each half along the D of the other, if that is positive; or along its own, which is larger."""
        others = self._bonus_steps if is_own else self._bonus_steps[::-1]
        return max(sum(dot(g, d) for g, d in zip(gradients, others, strict=True)) / len(gradients), 0.0)

    def _trial(self, now: Scored, size: float, level: float) -> Trial:
        base, responses = self._base, self._base.responses
        options = self._gradients.options
        along_bonus = [self._scored_along(d, size) for d in self._bonus_steps]
        log_prob, entropy = now.log_prob.clone(), now.entropy.clone()
        for half, scored in zip(self._halves, reversed(along_bonus), strict=True):
            log_prob[half], entropy[half] = scored.log_prob[half], scored.entropy[half]
        shift = torch.zeros(responses.n_prompts, dtype=torch.float64)
        if not all(scored.is_finite for scored in along_bonus):
            return Trial(size, None, shift)
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
        # A step along η P∇R as long as the trial's.
        lengths = [math.sqrt(sum(dot(d, d) for d in steps)) for steps in (self._bonus_steps, self._entropy_steps)]
        if not lengths[1]:
            return Trial(size, change, shift)
        reach = abs(size) * lengths[0] / lengths[1]
        along_entropy = [self._scored_along(d, reach) for d in reversed(self._entropy_steps)]
        if not all(scored.is_finite for scored in along_entropy):
            return Trial(size, None, shift)
        slopes = [(scored.entropy - now.entropy) / reach for scored in along_entropy]
        return Trial(size, change, without_each_prompt(slopes, self._halves, responses))

    def _scored_along(self, direction: Direction, size: float) -> Scored:
        """E, scored a part of the direction further."""
        step = {p: v * size for p, v in self._gradients.at_work(direction).items()}
        with (
            taken(step, self._model, keeps_residuals=True) as there,
            self._scorer.adding(there.residuals),
        ):
            self._rounded_away = max(self._rounded_away, there.rounded_away)
            return self._scorer.scored(self._base.rollouts)
