"""The phases of one measurement of an entropy change. Each phase returns a value; equations make the forecast of them.

`entropy_change.py` says when each phase runs and along which step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sonde.policy.cost import Cost
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.optimizer_step import Direction, Part, dot, forecast_step, has_second_moment
from sonde.policy.scoring.preconditioner import Preconditioner
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.scorer import Scored, ScoreDerivatives, Scorer
from sonde.policy.stats.attribution import Cause, causes_by_prompt, split_gradient, split_step
from sonde.policy.stats.entropy_change import EntropyObjective, change_by_gradients
from sonde.policy.stats.entropy_forecast import EntropyForecast, FirstOrder, Truths, entropy_forecast, unknown
from sonde.policy.stats.entropy_gradient import Coefficients, entropy_rate, entropy_rate_se
from sonde.policy.stats.importance import fixed_prefix_change, importance_sampled_change, resampled_change
from sonde.policy.stats.near_uniform import surprise_sd


class EntropyMeasurement:
    """Measures one update's effect on the entropy. Parameters hold θ, except where a method says θ⁺.

    Args:
        options: the probe's options.
        scorer: runs the model over responses.
        parameters: the model's trainable parameters; the optimizer may hold others too.
        base: E, scored at θ, with finite scores.
        sample: draws fresh responses from the model as it is; None without a sampler.
        cost: counts the phases' seconds.
    """

    def __init__(
        self,
        options: EntropyChangeOptions,
        scorer: Scorer,
        parameters: Sequence[Tensor],
        base: Scored,
        sample: Callable[[], Rollouts] | None,
        cost: Cost,
    ) -> None:
        self._options = options
        self._scorer = scorer
        self._parameters = parameters
        self._base = base
        self._sample = sample
        self._cost = cost
        self._objective = EntropyObjective(options.objective, options.sequence_weights)
        self._coefficients = self._objective.coefficients(base.log_prob, base.entropy, base.responses)

    def along_step(self, step: Direction) -> FirstOrder:
        """The change along a given step. Afterwards `step` holds the same vector only approximately."""
        with self._cost.phase("derivatives"):
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
        with self._cost.phase("causes"):
            momentum, decay = (self._along_part(part, optimizer, gradient_scale) for part in ("momentum", "decay"))
            prompts, doubt = None, ""
            if update is not None:
                prompts, doubt = self._causes_by_prompt(optimizer, update, gradient_scale)
        causes = split_step(
            first_order.change.delta,
            momentum=momentum.change.delta if momentum else 0.0,
            decay=decay.change.delta if decay else 0.0,
            prompts=prompts,
        )
        doubts = [part.doubt for part in (first_order, momentum, decay) if part is not None]
        return dataclasses.replace(first_order, causes=causes, doubt=next(filter(None, [*doubts, doubt]), ""))

    def along_gradients(self, update: Rollouts, optimizer: Any, step_size: float) -> tuple[FirstOrder, Direction]:
        """The change along η Ȳ, the mean of the update prompts' preconditioned gradients times η.

        Returns:
            The change with its causes by prompt; and the step η Ȳ, approximately.
        """
        base, responses = self._base, self._base.responses
        with self._cost.phase("scores"):
            learned = self._scorer.scored(update)
        n_update = learned.responses.n_prompts
        no_entropy = torch.zeros_like(learned.entropy)
        on_update = Coefficients(no_entropy, self._credit(learned) * learned.responses.share[:, None])
        with self._cost.phase("gradients"):
            # X̄₁ and X̄₂, the means of X over halves of the evaluation prompts; then Ȳ.
            halves = [(half, self._put_away(self._entropy_gradient(half))) for half in responses.halves()]
            y, precondition = self._update_gradient(update, learned, on_update.on_log_prob, optimizer)
        with self._cost.phase("derivatives"):
            # X_n·Ȳ is the derivative of prompt n's terms along Ȳ; Y_p·X̄₁ is that of prompt p's terms along P X̄₁.
            along_y = self._derivatives(base.rollouts, y)
            y_along_halves, d_update, doubts = [], torch.zeros_like(learned.log_prob), [along_y.doubt]
            for half, stored in halves:
                direction = self._at_work(stored)
                precondition(direction)
                along_half = self._derivatives(update, direction)
                doubts.append(along_half.doubt)
                y_along_halves.append(on_update.per_prompt(learned.responses, no_entropy, along_half.log_prob))
                # X̄ is the mean of X̄₁ and X̄₂, weighted by their shares of the prompts.
                d_update += along_half.log_prob * responses.share[half].sum() / responses.n_prompts
        change = change_by_gradients(
            self._coefficients.per_prompt(responses, along_y.entropy, along_y.log_prob),
            on_update.per_prompt(learned.responses, no_entropy, d_update),
            step_size,
            y_along_halves=(y_along_halves[0], y_along_halves[-1]),
            sharpening=self._coefficients.per_prompt(responses, along_y.entropy, torch.zeros_like(along_y.entropy)),
            level=self._options.level,
        )
        prompts = causes_by_prompt(d_update, on_update.on_log_prob, learned.responses, step_size / n_update)
        first_order = FirstOrder(
            change,
            step_size * entropy_rate(along_y.entropy, responses)[0],
            None if change.delta is None else change.delta / step_size,
            along_y.mode,
            next(filter(None, doubts), ""),
            split_gradient(change.delta, prompts),
        )
        for part in y.values():
            part.mul_(step_size)
        return first_order, y

    def sample(self) -> Scored | None:
        """Fresh responses of the parameters as they are; None without a sampler."""
        if self._sample is None:
            return None
        with self._cost.phase("rollouts"):
            return self._scorer.scored(self._sample())

    def truths(self, before: Scored | None) -> Truths | None:
        """The measured changes; parameters hold θ⁺.

        Args:
            before: what `sample` gave at θ.

        Returns:
            None if the policy's scores are not finite at θ⁺.
        """
        base, terms = self._base, self._terms
        with self._cost.phase("truth"):
            now = self._scorer.scored(base.rollouts)
        if not now.is_finite:
            return None
        importance = importance_sampled_change(
            terms(base),
            terms(now),
            base.log_prob,
            now.log_prob,
            base.responses,
            weighting=self._options.weighting,
            per=self._objective.per,
        )
        rollouts = None
        if before is not None and (after := self.sample()) is not None:
            rollouts = resampled_change(
                terms(before), before.responses, terms(after), after.responses, per=self._objective.per
            )
        return Truths(fixed_prefix_change(base.entropy, now.entropy, base.responses), importance, rollouts)

    def forecast(self, first_order: FirstOrder, truths: Truths | None, problem: str = "") -> EntropyForecast:
        """The forecast, made of what the phases gave.

        Args:
            first_order: the change to first order.
            truths: the measured changes; None if the policy's scores are not finite after the step.
            problem: why the forecast is not to be trusted, if that is known already.
        """
        return entropy_forecast(
            first_order,
            truths,
            self._base.log_prob,
            self._base.entropy,
            self._base.responses,
            objective=self._objective,
            update=self._options.update,
            level=self._options.level,
            problem=problem,
            seconds=self._cost.seconds,
            peak_bytes=self._cost.peak_bytes(),
        )

    def unknown(self, reason: str) -> EntropyForecast:
        """A forecast that could not be made, with the entropy at θ."""
        base = self._base
        return unknown(
            reason,
            self._options.objective,
            self._options.update,
            entropy=entropy_rate(base.entropy, base.responses)[0],
            entropy_se=entropy_rate_se(base.entropy, base.responses),
            surprise_sd=surprise_sd(base.log_prob, base.entropy, base.responses),
        )

    def _along(self, step: Direction) -> FirstOrder:
        base = self._base
        d = self._derivatives(base.rollouts, step)
        change = self._objective.change(
            base.log_prob, base.entropy, d.log_prob, d.entropy, base.responses, level=self._options.level
        )
        return FirstOrder(change, entropy_rate(d.entropy, base.responses)[0], change.delta, d.mode, d.doubt)

    def _along_part(self, part: Part, optimizer: Any, gradient_scale: float) -> FirstOrder | None:
        """The change along one part of the optimizer's step; None if this part is 0."""
        step = forecast_step(optimizer, of=self._parameters, gradient_scale=gradient_scale, part=part)
        return self._along(step) if any(bool(delta.any()) for delta in step.values()) else None

    def _causes_by_prompt(
        self, optimizer: Any, update: Rollouts, gradient_scale: float
    ) -> tuple[tuple[Cause, ...], str]:
        """Each update prompt's part of the change along this batch's part of the step; and a doubt, or ""."""
        learned = self._scorer.scored(update)
        credit = self._credit(learned)
        # The loss's gradient is g = −c ∇ Σ credit·s, and only c is unknown. Along this batch's part Δ of the step,
        # ⟨g, Δ⟩ = −c D_Δ Σ credit·s: so c is −downhill/uphill below, unless one of the two is 0.
        step = forecast_step(optimizer, of=self._parameters, gradient_scale=gradient_scale, part="batch")
        gradients = {p: p.grad for p in step if p.grad is not None}
        downhill = -gradient_scale * dot(gradients, step)
        along_batch = self._derivatives(update, step)
        uphill = float((credit * along_batch.log_prob).sum())
        del step
        if not uphill * downhill:
            return (), along_batch.doubt
        # This batch's δH is X̄·Δ, and Δ is linear in the gradient. So δH = D·g/scale, where D is the step that the
        # optimizer would take with X̄ in the gradient's place.
        x = self._entropy_gradient(None)
        to_entropy = forecast_step(optimizer, of=self._parameters, gradient_scale=gradient_scale, part="batch", along=x)
        del x
        d = self._derivatives(update, to_entropy)
        scale = -downhill / uphill / gradient_scale
        return causes_by_prompt(d.log_prob, credit, learned.responses, scale), along_batch.doubt or d.doubt

    def _terms(self, scored: Scored) -> Tensor:
        return self._objective.terms(scored.log_prob, scored.entropy, scored.responses)

    def _derivatives(self, rollouts: Rollouts, direction: Direction) -> ScoreDerivatives:
        """D s and D H of every token of all ranks. Afterwards the direction is the same only approximately."""
        return self._scorer.derivatives(rollouts, direction, self._options.derivatives)

    def _entropy_gradient(self, half: Tensor | None) -> Direction:
        """X̄ over all prompts; or over a half of them, given as a mask of their responses."""
        base = self._base
        share = base.responses.share
        n_prompts = float(share.sum() if half is None else share[half].sum())
        on_log_prob = base.own(self._coefficients.on_log_prob) / n_prompts
        on_entropy = base.own(self._coefficients.on_entropy) / n_prompts
        return self._gradient(base.rollouts, on_log_prob, on_entropy, None if half is None else half[base.rows])

    def _update_gradient(
        self, update: Rollouts, learned: Scored, on_log_prob: Tensor, optimizer: Any
    ) -> tuple[Direction, Preconditioner]:
        """Ȳ = P∇J, the mean over all update prompts; and P."""
        responses = learned.responses
        # Adam's P needs the gradient by halves of the prompts; SGD's is 1.
        masks = responses.halves() if has_second_moment(optimizer) else [responses.mask.any(1)]
        halves, sizes = [], []
        for half in masks:
            sizes.append(float(responses.share[half].sum()))  # number of prompts
            mean = self._gradient(update, learned.own(on_log_prob) / sizes[-1], None, half[learned.rows])
            halves.append(self._put_away(mean))
        halves = [self._at_work(half) for half in halves]
        precondition = Preconditioner(optimizer, halves)
        y, *others = halves
        for parameter, part in y.items():
            part.mul_(sizes[0] / responses.n_prompts)
            for other, n in zip(others, sizes[1:], strict=True):
                part.add_(other[parameter], alpha=n / responses.n_prompts)
        precondition(y)
        return y, precondition

    def _gradient(
        self, rollouts: Rollouts, on_log_prob: Tensor, on_entropy: Tensor | None = None, rows: Tensor | None = None
    ) -> Direction:
        return self._scorer.gradient(rollouts, on_log_prob, on_entropy, of=rows, dtype=self._options.buffer_dtype)

    def _credit(self, scored: Scored) -> Tensor:
        """Advantage × weight of every rank's tokens, [responses, tokens]."""
        return self._scorer.everywhere("credit", lambda: scored.rollouts.credit().cpu())

    def _put_away(self, direction: Direction) -> Direction:
        """The direction on the CPU, with offload=True."""
        return {p: v.cpu() for p, v in direction.items()} if self._options.offload else direction

    def _at_work(self, direction: Direction) -> Direction:
        """The direction on the parameters' devices and in their dtypes."""
        return {p: v.to(p.device, p.dtype) for p, v in direction.items()}
