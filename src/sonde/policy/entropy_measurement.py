"""The phases of one measurement of an entropy change. Each phase returns a value; equations make the forecast of them.

`entropy_change.py` says when each phase runs and along which step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.policy_step import PolicyStep
from sonde.policy.scoring.optimizer_step import Direction, dot, fit_to_gradients, gradient_for
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.scorer import Batch, Scored, ScoreDerivatives, Scorer
from sonde.policy.stats.attribution import Causes, causes_by_prompt, credit_by_sign
from sonde.policy.stats.entropy_change import EntropyObjective
from sonde.policy.stats.entropy_forecast import EntropyForecast, FixedPrefixes, before_update, judged, with_change
from sonde.policy.stats.entropy_gradient import Coefficients, Scores, on_same_prefixes_coefficients
from sonde.policy.stats.importance import (
    FiniteStep,
    change_by_finite_step,
    fixed_prefix_change,
    importance_sampled_change,
    prefix_weights,
    resampled_change,
)


class Beside(Protocol):
    """Measures something more of the same step, such as `sonde.contrib.hold_entropy.HoldEntropy`."""

    def check(self, optimizer: Any) -> None:
        """Refuse an optimizer that it cannot work with."""

    def begins(self, measurement: EntropyMeasurement, step: PolicyStep, why_not: str) -> None:
        """Parameters hold θ, and `.grad` the gradients of the step.

        Args:
            measurement: of E at θ.
            step: of the optimizer.
            why_not: why the optimizer's step cannot be forecast; empty if it can.
        """

    def ends(self, measurement: EntropyMeasurement, now: Scored, step: FiniteStep, why_another: str) -> Any:
        """Parameters hold θ⁺.

        Args:
            measurement: that it began with.
            now: E at θ⁺.
            step: the change of the entropy.
            why_another: why the step was not what it was on entry; empty if it was.
        """

    def forget(self) -> None:
        """Give up what it keeps between `begins` and `ends`: the forecast is over, whether `ends` was called or not."""


class EntropyMeasurement:
    """Measures one update's effect on the entropy. Parameters hold θ, except where a method says θ⁺.

    Args:
        options: the probe's options.
        scorer: runs the model over responses.
        base: E, scored at θ, with finite scores.
        sample: draws fresh responses from the model as it is; None without a sampler.
        cost: counts the phases' seconds.
        n_update: number of update prompts; 0 if they are not known.
    """

    def __init__(
        self,
        options: EntropyChangeOptions,
        scorer: Scorer,
        base: Scored,
        sample: Callable[[], Rollouts] | None,
        cost: Cost,
        n_update: int = 0,
    ) -> None:
        self._options, self._sample, self._n_update = options, sample, n_update
        self.scorer, self.base, self.cost = scorer, base, cost
        self.objective = EntropyObjective(options.objective, options.sequence_weights)

    @functools.cached_property
    def coefficients(self) -> Coefficients:
        """Those of X_n, the evaluation prompts' gradients of the entropy."""
        return self.objective.coefficients(self.base, self.prefix_weights)

    @functools.cached_property
    def prefix_weights(self) -> Tensor | None:
        """Weights by which the evaluation responses represent the policy; None if they are its own."""
        base = self.base
        if base.sampled_log_prob is None:
            return None
        return prefix_weights(base.log_prob, base.sampled_log_prob, base.responses, self._options.clip_at)

    @functools.cached_property
    def known(self) -> EntropyForecast:
        """What E says of the policy at θ: a forecast without the change."""
        return before_update(
            self.base,
            self.objective,
            self._options.update,
            sampled_log_prob=self.base.sampled_log_prob,
            prefix_weights=self.prefix_weights,
        )

    def along_step(self, step: Direction) -> EntropyForecast:
        """The change to first order along a given step."""
        with self.cost.phase("derivatives"):
            d = self.derivatives(self.base, step)
            change = self.objective.change(self.base, d.along, self.prefix_weights)
            if (linear := change.sharpening) is None or self.objective.kind == "sequence":
                [on_same_prefixes] = d.along([on_same_prefixes_coefficients(self.base.responses)])
                linear = float(on_same_prefixes.mean())
            of = {"fixed_prefixes": FixedPrefixes(None, linear), "bars_dot": change.delta, "doubt": d.doubt}
            return with_change(self.known, "first_order", change, self.base.responses, **of)

    def with_causes(self, direction: Direction, step: PolicyStep, update: Rollouts | None) -> EntropyForecast:
        """The change along the optimizer's step, split into momentum, this batch and weight decay.

        Args:
            direction: the whole step.
            step: what makes its parts.
            update: U with advantages, to split this batch's part by prompt; None leaves it whole.
        """
        forecast, found, doubt = self.along_step(direction), dict[str, Any](), ""
        with self.cost.phase("causes"):
            # X̄ gives every part of the step by a product with it: no further pass over E.
            x = self.entropy_gradient()
            momentum, decay = dot(x, step.part("momentum")), dot(x, step.part("decay"))
            if update is not None:
                # This batch's δH is X̄·Δ, and Δ is linear in the gradient. So δH = c D·∇ Σ credit·s, where D is the
                # step that the optimizer would take along X̄.
                to_entropy = step.part("batch", along=gradient_for(step.optimizer, x))
                del x
                found, doubt = self._causes_by_prompt(step.optimizer, update, to_entropy)
        assert forecast.bars_dot is not None
        causes = Causes.of(forecast.bars_dot, momentum=momentum, decay=decay, **found)
        return dataclasses.replace(forecast, causes=causes, doubt=forecast.doubt or doubt)

    def sample(self) -> Scored | None:
        """Fresh responses of the parameters as they are; None without a sampler."""
        if self._sample is None:
            return None
        with self.cost.phase("rollouts"):
            return self.scorer.scored(self._sample())

    def scored_after(self) -> Scored:
        """E, scored again; parameters hold θ⁺."""
        with self.cost.phase("scores_after"):
            return self.scorer.scored(self.base.rollouts, self.base)

    def is_unchanged(self, now: Scored) -> bool:
        """Whether scores are those before the step, bit for bit."""
        base = self.base
        return torch.equal(now.log_prob, base.log_prob) and torch.equal(now.entropy, base.entropy)

    def after(
        self,
        found: EntropyForecast,
        now: Scored,
        before: Scored | None,
        beside: Beside | None = None,
        why_another: str = "",
    ) -> EntropyForecast:
        """What scores after the step say besides; parameters hold θ⁺.

        Args:
            found: what is known at θ; unchanged if the policy's scores are not finite at θ⁺.
            now: what `scored_after` gave.
            before: what `sample` gave at θ.
            beside: has begun at θ.
            why_another: why the step was not what it was at θ; empty if it was.
        """
        base = self.base
        if not now.is_finite:
            return found
        importance = None
        if base.outside is None:  # with truncation, a response counts no more once one of its tokens has left
            importance = importance_sampled_change(
                base, now, self.objective, reference=base.sampled_log_prob, clip_at=self._options.clip_at
            )
        finite_step = self.change_to(now)
        rollouts = None
        if before is not None and (after := self.sample()) is not None:
            rollouts = resampled_change(before, after, self.objective)
        linear = None if found.fixed_prefixes is None else found.fixed_prefixes.linear
        return with_change(
            found,
            "finite_step",
            finite_step.change,
            base.responses,
            support=finite_step.support,
            fixed_prefixes=FixedPrefixes(fixed_prefix_change(base, now, self.prefix_weights), linear),
            importance=importance,
            rollouts=rollouts,
            coefficient_to_hold=None if beside is None else beside.ends(self, now, finite_step, why_another),
        )

    def change_to(self, now: Scores, start: Scores | None = None) -> FiniteStep:
        """The change of the entropy to where E has these scores: from θ, or from another policy that scored E."""
        base = self.base
        return change_by_finite_step(
            base if start is None else start,
            now,
            self.objective,
            reference=base.log_prob if base.sampled_log_prob is None else base.sampled_log_prob,
            clip_at=self._options.clip_at,
            tokens_may_leave=base.outside is not None,
        )

    def forecast(self, found: EntropyForecast, *, rounded_away: float | None = None) -> EntropyForecast:
        """The forecast, made of what the phases gave.

        Args:
            found: what is known at θ and after the step.
            rounded_away: part of the step that parameters of 16 bits do not hold; None if unknown.
        """
        return dataclasses.replace(
            judged(found, self.base.responses, self.objective),
            n_update=self._n_update,
            precision=self.scorer.precision,
            why_precision=self.scorer.why_precision,
            rounded_away=rounded_away,
            seconds=self.cost.seconds,
        )

    def unknown(self, reason: str, *, rounded_away: float | None = None) -> EntropyForecast:
        """A forecast that could not be made, with what is known at θ."""
        return dataclasses.replace(self.known, reason=reason, rounded_away=rounded_away)

    def _causes_by_prompt(self, optimizer: Any, update: Rollouts, to_entropy: Direction) -> tuple[dict[str, Any], str]:
        """Each update prompt's part of the change along this batch's part of the step.

        Returns:
            Arguments of `Causes.of`, none if all advantages or gradients are 0; and why derivatives are not to be
            trusted.
        """
        learned, credit, others = self.scorer.credited(update)
        on_log_prob = sum((of.on_log_prob for of in others.values()), start=credit)
        on_entropy = sum((of.on_entropy for of in others.values()), start=torch.zeros_like(credit))
        # The loss's gradient is −c ∇ Σ (credit·s + other terms), and only c is unknown. It is fitted where that sum's
        # gradient is not 0: a value loss on parameters of its own has no part in c.
        # Advantages have any unit, and gradients may be summed in 16 bits.
        size = float(on_log_prob.abs().sum() + on_entropy.abs().sum()) or 1.0
        ascent = self.gradient(
            update,
            learned.own(on_log_prob / size),
            learned.own(on_entropy / size) if bool(on_entropy.any()) else None,
        )
        fit = fit_to_gradients(gradient_for(optimizer, ascent))
        del ascent
        if fit is None:
            return {}, ""
        d = self.derivatives(learned, to_entropy)
        rewarded, penalised, *of_others = d.along([*credit_by_sign(credit), *others.values()])
        scale = fit.factor / size
        prompts = causes_by_prompt(rewarded, penalised, learned.responses, scale)
        terms = {name: scale * float(of.sum()) for name, of in zip(others, of_others, strict=True)}
        return {"prompts": prompts, "terms": terms, "cosine": fit.cosine}, d.doubt

    def derivatives(self, batch: Batch, direction: Direction) -> ScoreDerivatives:
        """Derivatives of the scores of all ranks."""
        return self.scorer.derivatives(batch, direction)

    def entropy_gradient(self, half: Tensor | None = None) -> Direction:
        """X̄ over all prompts; or over a half of them, given as a mask of all ranks' responses."""
        return self.mean(self.coefficients, half)

    def gradient(
        self, rollouts: Rollouts, on_log_prob: Tensor, on_entropy: Tensor | None = None, rows: Tensor | None = None
    ) -> Direction:
        """∇ Σ (on_log_prob·s + on_entropy·H), in the parameters' dtypes, of 32 bits at least."""
        found = self.scorer.gradient(rollouts, on_log_prob, on_entropy, rows=rows)
        return {p: v.to(torch.promote_types(p.dtype, torch.float32)) for p, v in found.items()}

    def mean(self, coefficients: Coefficients, half: Tensor | None = None) -> Direction:
        """The gradient of coefficients, a mean over all prompts or over a half of them."""
        base = self.base
        share = base.responses.share
        n_prompts = float(share.sum() if half is None else share[half].sum())
        on_log_prob = base.own(coefficients.on_log_prob) / n_prompts
        on_entropy = base.own(coefficients.on_entropy) / n_prompts
        return self.gradient(base.rollouts, on_log_prob, on_entropy, None if half is None else half[base.rows])


class Cost:
    """Counts the seconds of each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Seconds by phase."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds inside as this phase; a phase may come several times."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
