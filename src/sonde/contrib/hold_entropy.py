"""Which entropy coefficient would hold the entropy: a trial beside a forecast. See `coefficient_to_hold.py`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from sonde.contrib.coefficient_to_hold import (
    ENDLESS,
    FEWEST_PROMPTS,
    NO_ANSWER,
    NO_MOMENTUM,
    NO_SLOPE,
    OUT_OF_REACH,
    TOO_FEW,
    CoefficientToHold,
    Trial,
    coefficient_to_hold,
    unknown_coefficient,
    wanted_effects,
    without_each_prompt,
)
from sonde.contrib.sustained_step import SustainedStep
from sonde.parallel.unwrap import unwrap_optimizer
from sonde.policy.entropy_checks import as_factor
from sonde.policy.entropy_measurement import EntropyMeasurement
from sonde.policy.policy_step import PolicyStep
from sonde.policy.scoring.optimizer_step import Direction, dot, taken, why_no_forecast
from sonde.policy.scoring.precision import narrow_parameter
from sonde.policy.scoring.scorer import Scored
from sonde.policy.stats.entropy_gradient import Coefficients, on_same_prefixes_coefficients
from sonde.policy.stats.importance import FiniteStep

_TRIALS = 60
"""How often the size of the trial is corrected at most: Adam's answer is not in proportion to a bonus."""
_OFF_AT_MOST = 0.1
"""Part by which a trial's effect may miss the wanted one."""
_ROUNDED = "parameters of 16 bits round a trial with a bonus away: use precision='float32', or train parameters in fp32"


class HoldEntropy:
    """Says with which coefficient of an entropy bonus the entropy would not change: `forecast.coefficient_to_hold`.

    It takes two backwards of E and four forwards beyond the forecast's two, and holds six vectors of the size of the
    parameters meanwhile.

    Args:
        entropy_coefficient: that of the bonus which the loss has now. Set the attribute when it changes.
        applied_scale: factor of the loss's gradient that `.grad` holds already, such as the coefficient of a clip that
            came first. Leave out the scale of a GradScaler that the probe has. Set the attribute when it changes.

    Example:
        >>> hold = HoldEntropy(entropy_coefficient=0.01)
        >>> def asked(model: nn.Module, optimizer: torch.optim.Optimizer, evaluation) -> None:
        ...     probe = sonde.EntropyChangeProbe(model, optimizer, beside=hold)
        ...     print(probe.forecast(evaluation).coefficient_to_hold)
    """

    def __init__(self, *, entropy_coefficient: float = 0.0, applied_scale: float | Tensor = 1.0) -> None:
        self.entropy_coefficient, self.applied_scale = entropy_coefficient, applied_scale
        self._numbers(1.0)

    def check(self, optimizer: Any) -> None:
        """Refuse an optimizer whose answer to a bonus is not known."""
        if why_no_forecast(optimizer):
            raise ValueError(
                "HoldEntropy needs the optimizer's answer to a bonus, known for torch's SGD, Adam and AdamW, got "
                f"{type(unwrap_optimizer(optimizer)).__name__}: leave it out"
            )

    def _numbers(self, loss_scale: float) -> tuple[float, float]:
        """The coefficient of the loss's bonus, and the factor of the loss's gradient in `.grad`."""
        present = as_factor("entropy_coefficient", self.entropy_coefficient)
        applied = as_factor("applied_scale", self.applied_scale) * loss_scale
        if not math.isfinite(present):
            raise ValueError(f"entropy_coefficient must be finite, got {present!r}")
        if not 0.0 < applied < math.inf:
            raise ValueError(f"applied_scale must be positive and finite, got {applied!r}")
        return present, applied

    def begins(self, measurement: EntropyMeasurement, step: PolicyStep, why_not: str) -> None:
        """Take the gradients that are needed; see `Beside`."""
        self._present, applied = self._numbers(step.loss_scale)
        base = measurement.base
        self._model, self._halves = step.model, base.responses.halves()
        if not measurement.scorer.adds_residuals and narrow_parameter(step.model) is not None:
            why_not = _ROUNDED
        if base.responses.n_prompts < FEWEST_PROMPTS:
            why_not = f"{TOO_FEW}, got {base.responses.n_prompts}"
        self._why_not = why_not
        if why_not:
            return
        with measurement.cost.phase("coefficient"):
            self._answer = SustainedStep(
                step.optimizer, step.parameters, gradient_scale=step.gradient_scale, applied_scale=applied
            )
            self._of_bonus = [self._bonus(measurement, half) for half in self._halves]
            self._of_entropy = [measurement.entropy_gradient(half) for half in self._halves]

    def _bonus(self, measurement: EntropyMeasurement, half: Tensor) -> Direction:
        """∇H̄ over a half of the prompts: of the mean entropy of a sampled token on given prefixes.

        A trainer's bonus takes its tokens as they were sampled: so this mean has no weights, whoever sampled them.
        """
        responses = measurement.base.responses
        mean = on_same_prefixes_coefficients(responses)
        # The tokens of a half are another number for each prompt than the tokens of all.
        tokens = responses.length * responses.share
        factor = float(tokens.mean() / responses.share.mean() / (tokens[half].sum() / responses.share[half].sum()))
        return measurement.mean(Coefficients(mean.on_entropy * factor, mean.on_log_prob), half)

    def ends(
        self, measurement: EntropyMeasurement, now: Scored, step: FiniteStep, why_another: str
    ) -> CoefficientToHold:
        """The coefficient that would hold the entropy; see `Beside`."""
        if why := self._why_not or why_another:
            return unknown_coefficient(why, self._present)
        with measurement.cost.phase("coefficient"):
            return self._coefficient(measurement, now, step)

    def forget(self) -> None:
        """Give up what has the size of the parameters; see `Beside`."""
        for name in ("_answer", "_of_bonus", "_of_entropy"):
            vars(self).pop(name, None)

    def _coefficient(self, measurement: EntropyMeasurement, now: Scored, step: FiniteStep) -> CoefficientToHold:
        self._weight = measurement.objective.total_weight(measurement.base.responses)
        for is_so, why in (
            (self._answer.is_endless, ENDLESS),
            (not self._answer.is_endless and self._answer.is_zero(), NO_ANSWER),
            (self._answer.lacks_momentum, NO_MOMENTUM),
        ):
            if is_so:
                return unknown_coefficient(why, self._present)
        if not (slope := self._slope(0.0)):
            return unknown_coefficient(NO_SLOPE, self._present)
        effects = dict.fromkeys(wanted_effects(step.change.delta, step.change.se))  # often the same twice
        sizes = (self._trial_size(wanted, slope) for wanted in effects)
        if (size := next(filter(None, sizes), None)) is None:
            return unknown_coefficient(OUT_OF_REACH, self._present)
        return coefficient_to_hold(step, self._trial(measurement, now, size), present=self._present)

    def _trial_size(self, wanted: float, slope: float) -> float | None:
        """τ, whose bonus moves the entropy by about so many nats, from the slope at 0; None if none is found."""
        size = wanted / slope
        smaller, larger = 0.0, math.inf
        for _ in range(_TRIALS):
            effect = self._slope(size) * abs(size)
            if abs(effect - abs(wanted)) <= _OFF_AT_MOST * abs(wanted):
                return size
            if effect < abs(wanted):
                smaller = abs(size)
            else:
                larger = abs(size)
            between = 2.0 * smaller if math.isinf(larger) else 0.5 * (smaller + larger)
            size = math.copysign(between, wanted)
        return None

    def _slope(self, size: float) -> float:
        """∇H̄·Δ/τ, each half along the Δ of the other half; if that is not positive, along its own, which is larger.

        In nats a token, as H̄: the weight makes it one of the entropy that is to hold.
        """
        across = own = 0.0
        for bonus, other in (self._of_bonus, self._of_bonus[::-1]):
            moves = self._answer(bonus, size) if size else self._answer.derivative(bonus, 0.0, bonus)
            across += 0.5 * dot(other, moves) / (size or 1.0)
            own += 0.5 * dot(bonus, moves) / (size or 1.0)
        return self._weight * (max(across, 0.0) or max(own, 0.0))

    def _trial(self, measurement: EntropyMeasurement, now: Scored, size: float) -> Trial:
        responses = measurement.base.responses
        log_prob, entropy = now.log_prob.clone(), now.entropy.clone()
        shift = torch.zeros(responses.n_prompts, dtype=torch.float64)
        slopes: list[Tensor] = []
        for k in (0, 1):
            # The bonus of one half moves the other. For that bonus's own scatter, ∇R of the other half moves the one.
            half = self._halves[1 - k]
            bonus = self._of_bonus[k]
            along_bonus = self._answer(bonus, size)
            length = math.sqrt(dot(along_bonus, along_bonus))
            there = self._scored_after(measurement, along_bonus)
            del along_bonus
            if not there.is_finite:
                return Trial(size, None, shift)
            log_prob[half], entropy[half] = there.log_prob[half], there.entropy[half]
            along_entropy = self._answer.derivative(bonus, size, self._of_entropy[1 - k])
            longest = math.sqrt(dot(along_entropy, along_entropy))
            if not longest:
                slopes.append(torch.zeros_like(now.entropy))
                continue
            reach = length / longest  # a step as long as the trial's
            for vector in along_entropy.values():
                vector.mul_(reach)
            there = self._scored_after(measurement, along_entropy)
            if not there.is_finite:
                return Trial(size, None, shift)
            slopes.append((there.entropy - now.entropy) / reach)
        change = measurement.change_to(dataclasses.replace(now, log_prob=log_prob, entropy=entropy))
        return Trial(size, change, without_each_prompt(slopes, self._halves, responses))

    def _scored_after(self, measurement: EntropyMeasurement, step: Direction) -> Scored:
        """E, scored a step further, whose tensors are used up."""
        with (
            taken(step, self._model, keeps_residuals=True) as there,
            measurement.scorer.adding(there.residuals),
        ):
            return measurement.scorer.scored(measurement.base.rollouts)
