"""One measurement of an entropy change, phase by phase; `entropy_change.py` says when, and along what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sonde.policy.cost import Cost
from sonde.policy.scoring.optimizer_step import Direction, dot, forecast_step, precondition_
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.scorer import Scored, Scorer
from sonde.policy.scoring.training_state import seed_everything, set_evaluation_mode
from sonde.policy.stats.attribution import Cause, Causes, causes_by_prompt, shares_by_prompt, split_gradient, split_step
from sonde.policy.stats.entropy_change import EntropyChange, change_by_gradients, change_of_sequences, change_per_token
from sonde.policy.stats.entropy_forecast import EntropyForecast, FixedPrefixes, Objective, Update, why_not_linear
from sonde.policy.stats.entropy_gradient import (
    Coefficients,
    Responses,
    entropy_rate,
    per_token_coefficients,
    sequence_coefficients,
)
from sonde.policy.stats.importance import (
    MeasuredChange,
    Per,
    Weighting,
    fixed_prefix_change,
    importance_sampled_change,
    resampled_change,
)

Sampler = Callable[[nn.Module], Rollouts]
"""Samples responses of a model, to the same prompts at each call, by the global random numbers of torch, numpy or
Python."""


@dataclass(frozen=True)
class EntropySettings:
    """What `EntropyChangeProbe` was told; its docstring says what each means."""

    objective: Objective
    update: Update
    sequence_weights: Literal["one", "length"]
    derivatives: Literal["auto", "forward", "central"]
    weighting: Weighting
    buffer_dtype: torch.dtype
    offload: bool
    level: float


class EntropyMeasurement:
    """What is known so far of one update's effect. Parameters hold θ, except where a method says θ⁺.

    Args:
        settings: as the probe has them.
        scorer: of its model.
        parameters: those of the model that are trained; the optimizer may hold others.
        evaluation: E, this rank's.
        expense: counts the phases.
    """

    def __init__(
        self,
        settings: EntropySettings,
        scorer: Scorer,
        parameters: Sequence[Tensor],
        evaluation: Rollouts,
        expense: Cost,
    ) -> None:
        self._settings = settings
        self._parameters = parameters
        self._scorer = scorer
        self._expense = expense
        with expense.phase("scores"):
            self._base = scorer.scored(evaluation)
        self.problem = "" if self._base.is_finite else "the policy's scores are not finite"
        """Why nothing can be told, the same on all ranks; empty where it can."""
        nothing = torch.zeros_like(self._base.entropy)
        self._coefficients = Coefficients(nothing, nothing) if self.problem else self._coefficients_of(self._base)
        self._change: EntropyChange | None = None
        self._linear = 0.0
        self._bars_dot: float | None = None
        self._n_update = 0
        self._how = self._doubt = ""
        self._fixed: FixedPrefixes | None = None
        self._importance: MeasuredChange | None = None
        self._rollouts: MeasuredChange | None = None
        self._causes: Causes | None = None

    def along(self, step: Direction) -> None:
        """Forecast the change along a given step, which holds only about the same afterwards."""
        with self._expense.phase("derivatives"):
            self._change, self._linear = self._change_along(step)
        self._bars_dot = self._change.delta

    def along_gradients(self, update: Rollouts, optimizer: Any, step_size: float) -> Direction:
        """Forecast the change along η times the mean of the update prompts' preconditioned gradients.

        Returns:
            That step, η Ȳ, or something close to it.
        """
        base, responses = self._base, self._base.responses
        with self._expense.phase("scores"):
            learned = self._scorer.scored(update)
        self._n_update = learned.responses.n_prompts
        of_update = Coefficients(
            torch.zeros_like(learned.entropy), self._credit(learned) * learned.responses.share[:, None]
        )
        with self._expense.phase("gradients"):
            halves = [(half, self._put_away(self._entropy_gradient(half))) for half in _halves(responses)]
            y = self._at_work(self._gradient(update, learned.own(of_update.on_log_prob) / self._n_update))
            precondition_(optimizer, y)
        with self._expense.phase("derivatives"):
            d_log_prob, d_entropy = self._derivatives(base.rollouts, y)
            y_along, d_of_update = [], torch.zeros_like(learned.log_prob)
            for half, away in halves:
                direction = self._at_work(away)
                precondition_(optimizer, direction)
                d, _ = self._derivatives(update, direction)
                y_along.append(of_update.per_prompt(learned.responses, torch.zeros_like(d), d))
                d_of_update += d * responses.share[half].sum() / responses.n_prompts
        nothing = torch.zeros_like(d_entropy)
        self._change = change_by_gradients(
            self._coefficients.per_prompt(responses, d_entropy, d_log_prob),
            of_update.per_prompt(learned.responses, torch.zeros_like(d_of_update), d_of_update),
            step_size,
            y_along_halves=(y_along[0], y_along[-1]),
            sharpening=self._coefficients.per_prompt(responses, d_entropy, nothing),
            level=self._settings.level,
        )
        self._linear = step_size * entropy_rate(d_entropy, responses)[0]
        self._bars_dot = None if self._change.delta is None else self._change.delta / step_size
        prompts = causes_by_prompt(d_of_update, of_update.on_log_prob, learned.responses, step_size / self._n_update)
        self._causes = split_gradient(self._change.delta, prompts)
        for part in y.values():
            part.mul_(step_size)
        return y

    def tell_causes(self, optimizer: Any, update: Rollouts | None, gradient_scale: float) -> None:
        """Split the change along the optimizer's own step into momentum, this batch and weight decay; and by prompt."""
        assert self._change is not None
        of_parts: dict[str, float | None] = {"momentum": 0.0, "decay": 0.0}
        with self._expense.phase("causes"):
            for part in of_parts:
                step = forecast_step(optimizer, of=self._parameters, gradient_scale=gradient_scale, part=part)  # type: ignore[arg-type]
                if any(bool(delta.any()) for delta in step.values()):
                    of_parts[part] = self._change_along(step)[0].delta
            prompts = None
            if update is not None:
                prompts = self._causes_by_prompt(optimizer, update, gradient_scale)
        self._causes = split_step(
            self._change.delta, momentum=of_parts["momentum"], decay=of_parts["decay"], prompts=prompts
        )

    def _causes_by_prompt(self, optimizer: Any, update: Rollouts, gradient_scale: float) -> tuple[Cause, ...]:
        learned = self._scorer.scored(update)
        credit = self._credit(learned)
        # g = −c ∇ Σ credit·s, where only c is not known: ⟨g, Δ⟩ = −c D_Δ Σ credit·s along this batch's part Δ of the
        # step, and neither can vanish.
        step = forecast_step(optimizer, of=self._parameters, gradient_scale=gradient_scale, part="batch")
        gradients = {p: p.grad for p in step if p.grad is not None}
        downhill = -gradient_scale * dot(gradients, step)
        d, _ = self._derivatives(update, step)
        uphill = float((credit * d).sum())
        del step
        if not uphill * downhill:
            return ()
        # δH of this batch is X̄·Δ = D·g/scale, D what the step would be with X̄ in the gradient's place.
        x = self._entropy_gradient(None)
        to_entropy = forecast_step(optimizer, of=self._parameters, gradient_scale=gradient_scale, part="batch", along=x)
        del x
        d, _ = self._derivatives(update, to_entropy)
        self._n_update = learned.responses.n_prompts
        return causes_by_prompt(d, credit, learned.responses, -downhill / uphill / gradient_scale)

    def after(self) -> None:
        """The first two truths; parameters hold θ⁺."""
        base = self._base
        with self._expense.phase("truth"):
            now = self._scorer.scored(base.rollouts)
        if not now.is_finite:
            self.problem = "the policy's scores are not finite after the step"
            return
        self._fixed = FixedPrefixes(fixed_prefix_change(base.entropy, now.entropy, base.responses), self._linear)
        self._importance = importance_sampled_change(
            self._surprise(base),
            self._surprise(now),
            base.log_prob,
            now.log_prob,
            base.responses,
            weighting=self._settings.weighting,
            per=self._per,
        )

    def sample(self, sampler: Sampler, model: nn.Module, seed: int) -> Scored:
        """Responses of the parameters as they are."""
        sampled: list[Rollouts] = []
        with self._expense.phase("rollouts"):
            seed_everything(seed)
            self._scorer.on_all_ranks(lambda: sampled.append(sampler(model)))
            set_evaluation_mode(model)
            return self._scorer.scored(sampled[0])

    def compare(self, before: Scored, after: Scored) -> None:
        """The third truth, from what θ and θ⁺ sampled."""
        if self.problem:
            return
        self._rollouts = resampled_change(
            self._surprise(before), before.responses, self._surprise(after), after.responses, per=self._per
        )

    def result(self, problem: str = "") -> EntropyForecast:
        """All of it.

        Args:
            problem: why it is not to be trusted, if that is known already.
        """
        assert self._change is not None
        change = self._change
        is_sum = self._per == "response" and self._settings.sequence_weights == "one"
        tokens = entropy_rate(self._base.entropy, self._base.responses)[1] if is_sum else 1.0
        doubt = problem or self.problem or self._doubt
        reason = doubt or why_not_linear(
            self._fixed, self._importance, None if change.se is None else change.se / tokens
        )
        # What is not linear moves the truth to one side: the interval reaches as far, or it would not hold it.
        bend = tokens * (self._fixed.true - self._fixed.linear) if self._fixed is not None else 0.0
        return EntropyForecast(
            delta=change.delta,
            se=change.se,
            level=self._settings.level,
            low=None if change.low is None else change.low + min(bend, 0.0),
            high=None if change.high is None else change.high + max(bend, 0.0),
            reason=change.reason or reason,
            is_valid=not (change.reason or reason),
            objective=self._settings.objective,
            update=self._settings.update,
            entropy=entropy_rate(self._base.entropy, self._base.responses)[0],
            v_x=change.v_x,
            v_y=change.v_y,
            double_count=change.double_count,
            bars_dot=self._bars_dot,
            n_evaluation=self._base.responses.n_prompts,
            n_update=self._n_update,
            fixed_prefixes=self._fixed,
            importance=self._importance,
            rollouts=self._rollouts,
            shares=shares_by_prompt(change, self._base.responses),
            causes=self._causes,
            derivatives=self._how,
            seconds=self._expense.seconds,
            peak_bytes=self._expense.peak_bytes(),
        )

    @property
    def _per(self) -> Per:
        return "token" if self._settings.objective == "per_token" else "response"

    def _surprise(self, scored: Scored) -> Tensor:
        """What a response's sum of is its entropy, in expectation."""
        if self._settings.objective == "per_token":
            return scored.entropy
        return -self._sequence_weights(scored.responses) * scored.log_prob

    def _sequence_weights(self, responses: Responses) -> Tensor:
        ones = responses.mask.double()
        return ones if self._settings.sequence_weights == "one" else ones / responses.length[:, None]

    def _coefficients_of(self, scored: Scored) -> Coefficients:
        if self._settings.objective == "per_token":
            return per_token_coefficients(scored.entropy, scored.responses)
        is_causal = self._settings.sequence_weights == "one"
        weights = self._sequence_weights(scored.responses)
        return sequence_coefficients(scored.log_prob, scored.responses, weights=weights, is_causal=is_causal)

    def _change_along(self, direction: Direction) -> tuple[EntropyChange, float]:
        """And what R would do on the same prefixes."""
        base, level = self._base, self._settings.level
        d_log_prob, d_entropy = self._derivatives(base.rollouts, direction)
        linear, _ = entropy_rate(d_entropy, base.responses)
        if self._settings.objective == "per_token":
            return change_per_token(base.entropy, d_entropy, d_log_prob, base.responses, level=level), linear
        return change_of_sequences(self._coefficients, d_log_prob, base.responses, level=level), linear

    def _derivatives(self, rollouts: Rollouts, direction: Direction) -> tuple[Tensor, Tensor]:
        """D s and D H of every token of all ranks; the direction holds something close to it afterwards."""
        found, self._how, doubt = self._scorer.derivatives(rollouts, direction, self._settings.derivatives)
        self._doubt = self._doubt or doubt
        return found["d_log_prob"], found["d_entropy"]

    def _entropy_gradient(self, half: Tensor | None) -> Direction:
        """X̄, or its mean over some of the prompts, whose responses are chosen."""
        base = self._base
        share = base.responses.share
        n_prompts = float(share.sum() if half is None else share[half].sum())
        on_log_prob, on_entropy = (
            base.own(c) / n_prompts for c in (self._coefficients.on_log_prob, self._coefficients.on_entropy)
        )
        of = None if half is None else half[base.rows]
        return self._gradient(base.rollouts, on_log_prob, on_entropy, of)

    def _gradient(
        self, rollouts: Rollouts, on_log_prob: Tensor, on_entropy: Tensor | None = None, of: Tensor | None = None
    ) -> Direction:
        return self._scorer.gradient(rollouts, on_log_prob, on_entropy, of=of, dtype=self._settings.buffer_dtype)

    def _credit(self, scored: Scored) -> Tensor:
        """Advantage × weight of every rank's tokens, [responses, tokens]."""
        return self._scorer.everywhere("credit", lambda: scored.rollouts.credit().cpu())

    def _put_away(self, direction: Direction) -> Direction:
        return {p: v.cpu() for p, v in direction.items()} if self._settings.offload else direction

    def _at_work(self, direction: Direction) -> Direction:
        """Where the parameters are, and in their dtypes."""
        return {p: v.to(p.device, p.dtype) for p, v in direction.items()}


def _halves(responses: Responses) -> list[Tensor]:
    """Responses to every second prompt, and those to the others; one half where there is one prompt."""
    is_even = responses.index % 2 == 0
    return [half for half in (is_even, ~is_even) if bool(half.any())]
