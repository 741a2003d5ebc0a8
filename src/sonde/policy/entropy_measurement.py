"""The phases of one measurement of an entropy change. Each phase returns a value; equations make the forecast of them.

`entropy_change.py` says when each phase runs and along which step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sonde.policy.cost import Cost
from sonde.policy.entropy_gradients import EntropyGradients
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.optimizer_step import (
    Direction,
    dot,
    fit_to_gradients,
    forecast_step,
    gradient_for,
    has_second_moment,
)
from sonde.policy.scoring.preconditioner import Preconditioner
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.scorer import Batch, Scored, ScoreDerivatives, Scorer
from sonde.policy.stats.attribution import Cause, causes_by_prompt, credit_by_sign, split_gradient, split_step
from sonde.policy.stats.entropy_change import change_by_gradients
from sonde.policy.stats.entropy_forecast import (
    AfterStep,
    EntropyForecast,
    FirstOrder,
    Result,
    Update,
    entropy_forecast,
    unknown,
)
from sonde.policy.stats.entropy_gradient import (
    on_same_prefixes_coefficients,
    weighted_entropy_rate,
)
from sonde.policy.stats.finite_step import FiniteStep, Scores, change_by_finite_step
from sonde.policy.stats.importance import fixed_prefix_change, importance_sampled_change, resampled_change
from sonde.policy.stats.near_uniform import surprise_sd
from sonde.stats.intervals import LEVEL


class Beside(Protocol):
    """Measures something more of the same step, such as `sonde.contrib.hold_entropy.HoldEntropy`."""

    def check(self, optimizer: Any) -> None:
        """Refuse an optimizer that it cannot work with."""

    def begins(
        self,
        measurement: EntropyMeasurement,
        model: nn.Module,
        optimizer: Any,
        *,
        gradient_scale: float,
        loss_scale: float,
        why_not: str,
    ) -> None:
        """Parameters hold θ, and `.grad` the gradients of the step.

        Args:
            measurement: of E at θ.
            model: the policy.
            optimizer: whose step it is.
            gradient_scale: factor that gradients are still multiplied by before the step.
            loss_scale: factor of a GradScaler in the gradients.
            why_not: why the optimizer's step cannot be forecast; empty if it can.
        """

    def ends(self, measurement: EntropyMeasurement, now: Scored, step: FiniteStep, why_another: str) -> Result:
        """Parameters hold θ⁺.

        Args:
            measurement: that it began with.
            now: E at θ⁺.
            step: the change of the entropy.
            why_another: why the step was not what it was on entry; empty if it was.
        """


class EntropyMeasurement:
    """Measures one update's effect on the entropy. Parameters hold θ, except where a method says θ⁺.

    Args:
        options: the probe's options.
        scorer: runs the model over responses.
        parameters: the model's trainable parameters; the optimizer may hold others too.
        base: E, scored at θ, with finite scores.
        sample: draws fresh responses from the model as it is; None without a sampler.
        cost: counts the phases' seconds.
        n_update: number of update prompts; 0 if they are not known.
    """

    def __init__(
        self,
        options: EntropyChangeOptions,
        scorer: Scorer,
        parameters: Sequence[Tensor],
        base: Scored,
        sample: Callable[[], Rollouts] | None,
        cost: Cost,
        n_update: int = 0,
    ) -> None:
        self._n_update = n_update
        self._kind: Update = "step" if options.is_step else "gradient"
        self._options = options
        self.scorer = scorer
        self.parameters = parameters
        self.base = base
        self._sample = sample
        self.cost = cost
        self.gradients = EntropyGradients(options, scorer, base)
        self._objective = self.gradients.objective

    def along_step(self, step: Direction) -> FirstOrder:
        """The change along a given step."""
        with self.cost.phase("derivatives"):
            return self._along(step)

    def with_causes(
        self, first_order: FirstOrder, optimizer: Any, update: Rollouts | None, gradient_scale: float
    ) -> FirstOrder:
        """The same change along the optimizer's step, split into momentum, this batch and weight decay.

        Args:
            first_order: the change along the whole step.
            optimizer: whose step it is.
            update: U with advantages, to split this batch's part by prompt; None leaves it whole.
            gradient_scale: factor that gradients are still multiplied by before the step.
        """
        part = functools.partial(forecast_step, optimizer, of=self.parameters, gradient_scale=gradient_scale)
        prompts, cosine, doubt = None, None, ""
        with self.cost.phase("causes"):
            # X̄ gives every part of the step by a product with it: no further pass over E.
            x = self.gradients.at_work(self.gradients.entropy_gradient())
            momentum, decay = dot(x, part(part="momentum")), dot(x, part(part="decay"))
            if update is not None:
                # This batch's δH is X̄·Δ, and Δ is linear in the gradient. So δH = c D·∇ Σ credit·s, where D is the
                # step that the optimizer would take along X̄.
                to_entropy = part(part="batch", along=gradient_for(optimizer, x))
                del x
                prompts, cosine, doubt = self._causes_by_prompt(optimizer, update, to_entropy)
        causes = split_step(first_order.change.delta, momentum=momentum, decay=decay, prompts=prompts, cosine=cosine)
        return dataclasses.replace(first_order, causes=causes, doubt=first_order.doubt or doubt)

    def along_gradients(self, update: Rollouts, optimizer: Any, step_size: float) -> tuple[FirstOrder, Direction]:
        """The change along η Ȳ, the mean of the update prompts' preconditioned gradients times η.

        Returns:
            The change with its causes by prompt; and the step η Ȳ.
        """
        base, responses = self.base, self.base.responses
        learned, credit = self.scorer.credited(update)
        n_update = learned.responses.n_prompts
        # Each prompt's gradient is a mean over its responses.
        on_update = credit * learned.responses.share[:, None]
        with self.cost.phase("gradients"):
            # X̄₁ and X̄₂, the means of X over halves of the evaluation prompts; then Ȳ.
            halves = [
                (half, self.gradients.put_away(self.gradients.entropy_gradient(half))) for half in responses.halves()
            ]
            y, precondition = self._update_gradient(update, learned, on_update, optimizer)
        with self.cost.phase("derivatives"):
            # X_n·Ȳ is the derivative of prompt n's terms along Ȳ; Y_p·X̄₁ is that of prompt p's terms along P X̄₁.
            along_y = self._derivatives(base, y)
            coefficients = self.gradients.coefficients
            x_along_y, sharpening, on_same_prefixes = along_y.along(
                [coefficients, coefficients.entropy_alone(), on_same_prefixes_coefficients(responses)]
            )
            y_along_halves, doubts = [], [along_y.doubt]
            rewarded, penalised = (torch.zeros(n_update, dtype=torch.float64) for _ in range(2))
            for half, stored in halves:
                direction = self.gradients.at_work(stored)
                precondition(direction)
                along_half = self._derivatives(learned, direction)
                doubts.append(along_half.doubt)
                up, down = along_half.along(credit_by_sign(on_update))
                y_along_halves.append(up + down)
                # X̄ is the mean of X̄₁ and X̄₂, weighted by their shares of the prompts.
                part = float(responses.share[half].sum()) / responses.n_prompts
                rewarded += part * up
                penalised += part * down
        change = change_by_gradients(
            x_along_y,
            (y_along_halves[0], y_along_halves[-1]),
            rewarded + penalised,
            step_size,
            sharpening=sharpening if bool(coefficients.on_entropy.any()) else None,
        )
        prompts = causes_by_prompt(rewarded, penalised, learned.responses, step_size / n_update)
        first_order = FirstOrder(
            change,
            step_size * float(on_same_prefixes.mean()),
            None if change.delta is None else change.delta / step_size,
            "central",
            "",
            next(filter(None, doubts), ""),
            split_gradient(change.delta, prompts),
        )
        for vector in y.values():
            vector.mul_(step_size)
        return first_order, y

    def sample(self) -> Scored | None:
        """Fresh responses of the parameters as they are; None without a sampler."""
        if self._sample is None:
            return None
        with self.cost.phase("rollouts"):
            return self.scorer.scored(self._sample())

    def scored_after(self) -> Scored:
        """E, scored again; parameters hold θ⁺."""
        with self.cost.phase("scores_after"):
            return self.scorer.scored(self.base.rollouts)

    def is_unchanged(self, now: Scored) -> bool:
        """Whether scores are those before the step, bit for bit."""
        base = self.base
        return torch.equal(now.log_prob, base.log_prob) and torch.equal(now.entropy, base.entropy)

    def after(
        self, now: Scored, before: Scored | None, beside: Beside | None = None, why_another: str = ""
    ) -> AfterStep | None:
        """What scores after the step say; parameters hold θ⁺.

        Args:
            now: what `scored_after` gave.
            before: what `sample` gave at θ.
            beside: has begun at θ.
            why_another: why the step was not what it was at θ; empty if it was.

        Returns:
            None if the policy's scores are not finite at θ⁺.
        """
        base, terms, (weighting, clip_at) = self.base, self._terms, self._options.weights
        if not now.is_finite:
            return None
        importance = importance_sampled_change(
            terms(base),
            terms(now),
            base.log_prob,
            now.log_prob,
            base.responses,
            sampled_log_prob=base.sampled_log_prob,
            weighting=weighting,
            clip_at=clip_at,
            per=self._objective.per,
        )
        finite_step = self.change_to(now.log_prob, now.entropy)
        rollouts = None
        if before is not None and (after := self.sample()) is not None:
            rollouts = resampled_change(
                terms(before),
                before.responses,
                terms(after),
                after.responses,
                per=self._objective.per,
                n_differ=self.scorer.n_that_differ(before.rollouts, after.rollouts),
            )
        on_same_prefixes = fixed_prefix_change(base.entropy, now.entropy, base.responses, self.gradients.prefix_weights)
        more = None if beside is None else beside.ends(self, now, finite_step, why_another)
        return AfterStep(finite_step, on_same_prefixes, importance, rollouts, more)

    def change_to(self, log_prob: Tensor, entropy: Tensor) -> FiniteStep:
        """The change of the entropy from θ to where E has these scores."""
        base, (weighting, clip_at) = self.base, self._options.weights
        return change_by_finite_step(
            Scores(base.log_prob, base.entropy),
            Scores(log_prob, entropy),
            base.responses,
            self._objective,
            sampled_log_prob=base.sampled_log_prob,
            weighting=weighting,
            clip_at=clip_at,
        )

    def forecast(
        self,
        first_order: FirstOrder | None,
        after: AfterStep | None,
        *,
        is_same_step: bool = True,
        rounded_away: float | None = None,
    ) -> EntropyForecast:
        """The forecast, made of what the phases gave.

        Args:
            first_order: the change to first order; needed with update="gradient".
            after: what scores after the step say; None if they are not finite.
            is_same_step: whether both are of the same step.
            rounded_away: part of the step that parameters of 16 bits do not hold; None if unknown.
        """
        return entropy_forecast(
            first_order,
            after,
            self.base.log_prob,
            self.base.entropy,
            self.base.responses,
            objective=self._objective,
            update=self._kind,
            level=LEVEL,
            is_same_step=is_same_step,
            n_update=self._n_update,
            prefix_weights=self.gradients.prefix_weights,
            rounded_away=rounded_away,
            precision=self.scorer.precision,
            why_precision=self.scorer.why_precision,
            seconds=self.cost.seconds,
            peak_bytes=self.cost.peak_bytes(),
        )

    def unknown(self, reason: str, *, rounded_away: float | None = None) -> EntropyForecast:
        """A forecast that could not be made, with the entropy at θ."""
        base = self.base
        rate, rate_se = weighted_entropy_rate(base.entropy, base.responses, self.gradients.prefix_weights)
        return unknown(
            reason,
            self._options.objective,
            self._kind,
            entropy=rate,
            entropy_se=rate_se,
            surprise_sd=surprise_sd(base.log_prob, base.entropy, base.responses),
            rounded_away=rounded_away,
        )

    def _along(self, step: Direction) -> FirstOrder:
        base, responses = self.base, self.base.responses
        d = self._derivatives(base, step)
        change = self._objective.change(
            base.log_prob,
            base.entropy,
            responses,
            d.along,
            prefix_weights=self.gradients.prefix_weights,
        )
        if self._objective.kind == "per_token":
            assert change.sharpening is not None
            on_same_prefixes = change.sharpening
        else:
            [on_same] = d.along([on_same_prefixes_coefficients(responses)])
            on_same_prefixes = float(on_same.mean())
        return FirstOrder(change, on_same_prefixes, change.delta, "central", "", d.doubt)

    def _causes_by_prompt(
        self, optimizer: Any, update: Rollouts, to_entropy: Direction
    ) -> tuple[tuple[Cause, ...] | None, float | None, str]:
        """Each update prompt's part of the change along this batch's part of the step; `Causes.cosine`; and a doubt.

        Both are None if all advantages or gradients are 0.
        """
        learned, credit = self.scorer.credited(update)
        # The loss's gradient is −c ∇ Σ credit·s, and only c is unknown. It is fitted where ∇ Σ credit·s is not 0: a
        # value loss on parameters of its own has no part in c.
        size = float(credit.abs().sum())  # advantages have any unit, and gradients may be summed in 16 bits
        ascent = self.gradients.at_work(self.gradients.gradient(update, learned.own(credit / (size or 1.0))))
        fit = fit_to_gradients(gradient_for(optimizer, ascent))
        del ascent
        if fit is None:
            return None, None, ""
        d = self._derivatives(learned, to_entropy)
        rewarded, penalised = d.along(credit_by_sign(credit))
        return causes_by_prompt(rewarded, penalised, learned.responses, fit.factor / size), fit.cosine, d.doubt

    def _terms(self, scored: Scored) -> Tensor:
        return self._objective.terms(scored.log_prob, scored.entropy, scored.responses)

    def _derivatives(self, batch: Batch, direction: Direction) -> ScoreDerivatives:
        """Derivatives of the scores of all ranks."""
        return self.scorer.derivatives(batch, self.gradients.at_work(direction))

    def _update_gradient(
        self, update: Rollouts, learned: Batch, on_log_prob: Tensor, optimizer: Any
    ) -> tuple[Direction, Preconditioner]:
        """Ȳ = P∇J, the mean over all update prompts; and P."""
        responses = learned.responses
        # Adam's P needs the gradient by halves of the prompts; SGD's is 1.
        masks = responses.halves() if has_second_moment(optimizer) else [responses.mask.any(1)]
        halves, sizes = [], []
        for half in masks:
            sizes.append(float(responses.share[half].sum()))  # number of prompts
            mean = self.gradients.gradient(update, learned.own(on_log_prob) / sizes[-1], None, half[learned.rows])
            halves.append(self.gradients.put_away(mean))
        halves = [self.gradients.at_work(half) for half in halves]
        precondition = Preconditioner(optimizer, halves)
        y, *others = halves
        for parameter, part in y.items():
            part.mul_(sizes[0] / responses.n_prompts)
            for other, n in zip(others, sizes[1:], strict=True):
                part.add_(other[parameter], alpha=n / responses.n_prompts)
        precondition(y)
        return y, precondition
