"""What will this update do to the policy's entropy, how sure is the forecast, and which prompts cause the change?"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonde.parallel.model_state import (
    preserve_training_state,
    seed_everything,
    set_evaluation_mode,
)
from sonde.parallel.process_groups import check_group, data_parallel_group, gather_from_all_ranks, together
from sonde.parallel.unwrap import check_grad_scaler, loss_scale, unwrap_optimizer
from sonde.policy.entropy_checks import (
    as_factor,
    check_evaluation,
    check_is_model,
    check_model,
    check_optimizer,
    check_responses,
    check_sampler,
    check_scored,
    trainable,
)
from sonde.policy.entropy_measurement import Beside, Cost, EntropyMeasurement
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.loss_gradients import Loss, LossGradients, check_losses
from sonde.policy.mean_gradients import along_mean_gradients
from sonde.policy.policy_step import STEP_NOT_FINITE, STEP_ROUNDED_AWAY, PolicyStep
from sonde.policy.scoring.optimizer_step import Direction, taken, why_no_forecast
from sonde.policy.scoring.rollouts import Rollouts, TokenStatistics
from sonde.policy.scoring.scorer import Scored, Scorer
from sonde.policy.scoring.token_statistics import as_statistics
from sonde.policy.stats.columns import OF_FORECAST, OF_TRAINER
from sonde.policy.stats.entropy_comparison import EntropyComparison, comparison_of
from sonde.policy.stats.entropy_forecast import EntropyForecast
from sonde.policy.stats.importance import FiniteStep
from sonde.stats.columns import Columns

Sampler = Callable[[nn.Module], Rollouts]
"""Samples responses of a model, to the same prompts in each call, with the global random numbers of torch, numpy or
Python."""

_NO_UPDATE = "update='gradient' forecasts along the update prompts' gradients: pass their rollouts"
_SCORES_NOT_FINITE = "the policy's scores are not finite"


class AroundStep:
    """What `EntropyChangeProbe.around_step` yields. It holds the forecast once its block has ended."""

    _forecast: EntropyForecast | None = None

    @property
    def forecast(self) -> EntropyForecast:
        """The forecast along the step that was taken, with its truths.

        Raises:
            RuntimeError: inside the block.
        """
        if self._forecast is None:
            raise RuntimeError(
                "the forecast is known after the with block of around_step() has ended: read it after the block"
            )
        return self._forecast


class EntropyChangeProbe:
    """Forecasts what an update does to a policy's entropy, measures what it did, and finds the prompts that cause it.

    The probe needs two batches of the policy's own responses. E evaluates the change: independent of the update. U is
    the batch that the update learns from. The unit is the prompt with its group of responses. Nothing of the training
    changes, whatever fails: afterwards parameters have the same bits, and `.grad`, the optimizer, modes and random
    numbers are as before.

    Each forecast stands alone, so the probe has no state to save for a restart. Only `step` counts windows: after a
    restart, it forecasts its first one.

    Args:
        model: the policy: plain, compiled, in DDP or FSDP2.
        optimizer: its optimizer. The steps of torch's SGD, Adam and AdamW are forecast; `around_step` measures others,
            also with None in the place of one that is none of torch's.
        options: how to measure.
        token_statistics: scores responses; by default `CausalLMStatistics`, for a causal language model of
            transformers.
        sampler: draws fresh responses: for the third truth of `forecast` and `around_step`, and for `step`.
        grad_scaler: the `torch.amp.GradScaler` in use, if there is one. Its scale is left out of the gradients, before
            and after its `unscale_`.
        process_group: the ranks that hold different responses; by default those of DDP or FSDP2.
        beside: measures something more of the same step, such as `sonde.contrib.hold_entropy.HoldEntropy`.

    Raises:
        ValueError: for an option outside its range, a model without trainable parameters, or an optimizer that holds
            none of them.

    Reference:
        docs/entropy-change.md.
    """

    METRICS: ClassVar[Columns] = {**OF_FORECAST, **OF_TRAINER}

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        options: EntropyChangeOptions | None = None,
        *,
        token_statistics: TokenStatistics | None = None,
        sampler: Sampler | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
        beside: Beside | None = None,
    ) -> None:
        options = EntropyChangeOptions() if options is None else options
        if not isinstance(options, EntropyChangeOptions):
            raise ValueError(f"options must be a sonde.EntropyChangeOptions, got {options!r:.60}")
        check_is_model(model)
        check_group(process_group)
        check_sampler(sampler)
        parameters = trainable(model)
        check_model(model, parameters)
        check_optimizer(optimizer, parameters)
        check_grad_scaler(grad_scaler)
        if not options.is_step and options.step_size is None and optimizer is None:
            raise ValueError("update='gradient' takes the optimizer's learning rate, got no optimizer: pass step_size=")
        if beside is not None:
            if not options.is_step:
                raise ValueError(
                    "beside= is about the optimizer's own step, and update='gradient' is another: leave one out"
                )
            beside.check(optimizer)
        self._options, self._model, self._optimizer = options, model, optimizer
        self._sampler, self._grad_scaler, self._beside = sampler, grad_scaler, beside
        self._statistics = as_statistics(token_statistics)
        self._group = data_parallel_group(model) if process_group is None else process_group
        self._scorer = Scorer(
            model,
            self._statistics,
            options.micro_batch_prompts,
            self._group,
            options.precision,
        )
        self._n_calls = 0
        self._pace = ForecastPace(options.every, options.budget, self._group)
        self._latest: EntropyForecast | None = None

    def forecast(
        self,
        evaluation: Rollouts,
        update: Rollouts | None = None,
        *,
        gradient_scale: float | Tensor = 1.0,
        causes: bool = False,
        rollouts: bool = False,
    ) -> EntropyForecast:
        """What the next optimizer step will do. Parameters take the step for one forward, and have their bits again.

        With update="step", call it between the last backward and the optimizer's step, while gradients are in `.grad`.

        Args:
            evaluation: this rank's part of E.
            update: this rank's part of U, with advantages. Needed with update="gradient", and for causes by prompt.
            gradient_scale: factor that gradients are still multiplied by before the step, such as a clip's coefficient.
                Leave out the scale of `grad_scaler`, which the probe knows.
            causes: also take the change to first order, split into momentum, this batch and decay, and by prompt of U.
                This takes a backward of E and one of U, and passes over both.
            rollouts: also take the third truth, from responses sampled before and after the step with common random
                numbers.

        Raises:
            ValueError: for responses that cannot be used, or an optimizer whose step cannot be forecast.
            RuntimeError: if there is no gradient yet, or no sampler for rollouts.
        """
        if rollouts and self._sampler is None:
            raise RuntimeError("truth by fresh rollouts needs a sampler: EntropyChangeProbe(…, sampler=…)")
        with together(self._group), self._beside_forgets():
            step, n_update = self._begin(evaluation, update, gradient_scale, causes)
            if self._options.is_step and (why := step.why_no_forecast()):
                raise ValueError(why)
            with self._measuring(evaluation, self._sampler if rollouts else None, n_update) as measurement:
                if measurement is None:
                    return self._unknown(_SCORES_NOT_FINITE)
                found, direction = self._at_entry(measurement, step, update, causes)
                if direction is None:
                    return measurement.unknown(STEP_NOT_FINITE)
                return self._stepped(measurement, direction, found, measurement.sample(), self._beside)[0]

    @contextlib.contextmanager
    def around_step(
        self,
        evaluation: Rollouts,
        update: Rollouts | None = None,
        *,
        gradient_scale: float | Tensor = 1.0,
        causes: bool = False,
    ) -> Iterator[AroundStep]:
        """Around the optimizer's real step, of any optimizer: what the step did to the entropy.

        E is scored on entry and on exit. With update="gradient", the change along the update prompts' gradients is
        forecast on entry, and `finite_step` has the change by the real step beside it.

        Causes are those of the step that is forecast on entry. On exit, a sample of elements checks that this was the
        step actually taken.

        Args:
            evaluation: this rank's part of E, sampled before the step.
            update: this rank's part of U, with advantages. Needed with update="gradient", and for causes by prompt.
            gradient_scale: as for `forecast`, of the gradients before the block.
            causes: as for `forecast`; ignored if the step cannot be forecast.

        Raises:
            ValueError: for responses that cannot be used.
            RuntimeError: if there is no gradient yet, where one is needed.

        Example:
            >>> def trained(probe: EntropyChangeProbe, evaluation: Rollouts, optimizer: torch.optim.Optimizer) -> None:
            ...     with probe.around_step(evaluation) as around:
            ...         optimizer.step()
            ...     print(around.forecast)
        """
        around, is_step = AroundStep(), self._options.is_step
        with self._beside_forgets():
            with together(self._group):
                step, n_update = self._begin(evaluation, update, gradient_scale, causes)
                with self._measuring(evaluation, self._sampler, n_update) as measurement:
                    if measurement is not None:
                        found, direction = measurement.known, None
                        if causes or not is_step or self._beside is not None:
                            found, direction = self._at_entry(measurement, step, update, causes)
                        step.watch(whole=is_step and direction is not None)
                        del direction  # as large as the parameters
                        before = measurement.sample()
            yield around
            with together(self._group), preserve_training_state(self._model):
                if measurement is None:
                    around._forecast = self._unknown(_SCORES_NOT_FINITE)
                    return
                now = measurement.scored_after()
                if step.was_skipped(is_unchanged=measurement.is_unchanged(now)):
                    around._forecast = measurement.unknown(step.why_unmoved())
                    return
                if not is_step:  # first order is of another step
                    found = dataclasses.replace(found, fixed_prefixes=None)
                why = "" if self._beside is None else step.why_another_answer()
                found = measurement.after(found, now, before, self._beside, why)
                if is_step and found.first_order is not None:
                    found = dataclasses.replace(found, doubt=step.why_another() or found.doubt)
                around._forecast = measurement.forecast(found, rounded_away=step.rounded_away())

    def compare(
        self,
        losses: Mapping[str, Loss],
        evaluation: Rollouts,
        *,
        baseline: str | None = None,
        gradient_scale: float | Tensor | Callable[[], float | Tensor] = 1.0,
    ) -> EntropyComparison:
        """What the next optimizer step would do with each of several losses, and how much they differ.

        All are forecast on the same responses, so differences are paired, and usually known far better than changes.
        Each loss takes a backward and a forecast. It runs as in training, with the same random numbers as the others.
        Gradients that are in `.grad` do not count, and are there again afterwards.

        Args:
            losses: by name, functions without arguments that run the model on the update batch and return its loss, a
                mean over this rank's part. All ranks pass the same names in the same order.
            evaluation: this rank's part of E.
            baseline: name of the loss that the others are compared with; by default the first.
            gradient_scale: factor that gradients are multiplied by before the step. A function is called once a
                loss, with its gradients in `.grad`: for the coefficient of a clip, which differs from loss to loss.

        Raises:
            ValueError: for losses that cannot be compared, such as one that reaches no parameter or changes some; or an
                optimizer whose step cannot be forecast.

        Example:
            >>> def compared(probe: EntropyChangeProbe, loss: Callable[[float], Tensor], evaluation: Rollouts) -> None:
            ...     losses = {"clip 0.2": lambda: loss(0.2), "clip-higher 0.28": lambda: loss(0.28)}
            ...     print(probe.compare(losses, evaluation))
        """
        with together(self._group):
            baseline = check_losses(losses, baseline, self._group)
            if not self._options.is_step:
                raise ValueError("compare() forecasts the optimizer's own step: leave update='gradient' out")
            if why := why_no_forecast(self._optimizer):
                raise ValueError(why.replace("use around_step(), which measures it", "compare() needs the forecast"))
            check_responses(evaluation, None, self._statistics, self._group, options=self._options, causes=False)
            gradients = LossGradients(self._step(1.0), self._group)
            with self._measuring(evaluation, None, 0) as measurement:
                if measurement is None:
                    return comparison_of({name: (self._unknown(_SCORES_NOT_FINITE), None) for name in losses}, baseline)
                found: dict[str, tuple[EntropyForecast, Scored | None]] = {}
                for name, loss in losses.items():
                    gradient = gradients.take(name, loss)
                    with gradients.as_gradients(gradient):
                        given = gradient_scale() if callable(gradient_scale) else gradient_scale
                        direction = self._step(self._factor(given)).forecast()
                        if direction is None:
                            found[name] = measurement.unknown(STEP_NOT_FINITE), None
                        else:
                            found[name] = self._stepped(measurement, direction, measurement.known)
                    del gradient, direction  # as large as the parameters

                def between(start: Scored, now: Scored) -> FiniteStep:
                    return measurement.change_to(now, start)

                return comparison_of(found, baseline, between, measurement.base.responses)

    def step(self) -> None:
        """In every `every`-th window, or in fewer by `budget`, forecast the next step on responses of the sampler.

        Raises:
            RuntimeError: without a sampler; or with update="gradient", which needs the update's responses: call
                `forecast` with them.
        """
        if self._sampler is None or not self._options.is_step:
            raise RuntimeError(
                "step() evaluates an optimizer's step on responses of a sampler: pass sampler=, or call "
                "forecast() with responses"
            )
        self._latest = None
        if self._pace.is_due():
            self._n_calls += 1
            begun = time.perf_counter()
            with together(self._group), preserve_training_state(self._model):
                evaluation = self._sample(self._sampler, self._seed())
            sampling = time.perf_counter() - begun
            self._latest = self.forecast(evaluation).after_sampling(sampling)
            self._pace.took(time.perf_counter() - begun)

    def metrics(self) -> Mapping[str, float | None]:
        """The forecast of this window by metric name; empty if this window had none."""
        return {} if self._latest is None else self._latest.metrics()

    def close(self) -> None:
        """Does nothing: the probe installs no hooks."""

    def _begin(
        self, evaluation: Rollouts, update: Rollouts | None, gradient_scale: float | Tensor, causes: bool
    ) -> tuple[PolicyStep, int]:
        """The optimizer's step, and the number of update prompts on all ranks."""
        scale = self._factor(gradient_scale)
        n_update = check_responses(
            evaluation,
            update,
            self._statistics,
            self._group,
            options=self._options,
            causes=causes,
            is_beside=self._beside is not None,
        )
        if not self._options.is_step and update is None:
            raise ValueError(_NO_UPDATE)
        return self._step(scale), n_update

    def _step(self, gradient_scale: float) -> PolicyStep:
        """The optimizer's step; the scale of a GradScaler is left out of its gradients."""
        scale = loss_scale(self._grad_scaler, self._optimizer)
        return PolicyStep(self._model, self._optimizer, self._group, gradient_scale / scale, scale)

    @contextlib.contextmanager
    def _beside_forgets(self) -> Iterator[None]:
        """Around a forecast: what is measured beside it keeps nothing afterwards, however the forecast ends."""
        try:
            yield
        finally:
            if self._beside is not None:
                self._beside.forget()

    def _stepped(
        self,
        measurement: EntropyMeasurement,
        direction: Direction,
        found: EntropyForecast,
        before: Scored | None = None,
        beside: Beside | None = None,
    ) -> tuple[EntropyForecast, Scored | None]:
        """The forecast of a step, whose tensors are used up; and E at θ⁺, None if its scores are unknown."""
        is_step = self._options.is_step
        # Along gradients, no optimizer rounds the step.
        with taken(direction, self._model, keeps_residuals=not is_step) as now, self._scorer.adding(now.residuals):
            scored = measurement.scored_after()
            if is_step and now.rounded_away and measurement.is_unchanged(scored):
                return measurement.unknown(STEP_ROUNDED_AWAY, rounded_away=now.rounded_away), None
            found = measurement.after(found, scored, before, beside)
        is_rounded = is_step or not self._scorer.adds_residuals
        forecast = measurement.forecast(found, rounded_away=now.rounded_away if is_rounded else 0.0)
        return forecast, scored if scored.is_finite else None

    def _factor(self, gradient_scale: float | Tensor) -> float:
        scale = as_factor("gradient_scale", gradient_scale)
        if scale < 0:
            raise ValueError(f"gradient_scale must not be negative, got {scale!r}: pass the factor of a clip, say")
        return scale

    def _at_entry(
        self, measurement: EntropyMeasurement, step: PolicyStep, update: Rollouts | None, causes: bool
    ) -> tuple[EntropyForecast, Direction | None]:
        """Whatever is measured at θ; and the step that is forecast, None if it cannot be, or is not finite."""
        if not self._options.is_step:
            assert update is not None
            return along_mean_gradients(measurement, update, self._optimizer, self._learning_rate())
        found, direction, why_not = measurement.known, None, step.why_no_forecast()
        if not why_not and (direction := step.forecast()) is None:
            why_not = f"on entry, {STEP_NOT_FINITE}"
        if causes and direction is not None:
            found = measurement.with_causes(direction, step, update)
        if self._beside is not None:
            self._beside.begins(measurement, step, why_not)
        return found, direction

    @contextlib.contextmanager
    def _measuring(
        self, evaluation: Rollouts, sampler: Sampler | None, n_update: int
    ) -> Iterator[EntropyMeasurement | None]:
        """A measurement that leaves the training state as it was; None if the policy's scores are not finite."""
        self._n_calls += 1
        with preserve_training_state(self._model):
            cost = Cost()
            self._scorer.check(evaluation)
            with cost.phase("scores"):
                base = self._scorer.scored(evaluation)
            if not base.is_finite:
                yield None
                return
            check_scored(base)
            sample = None if sampler is None else functools.partial(self._sample, sampler, self._seed())
            yield EntropyMeasurement(self._options, self._scorer, base, sample, cost, n_update)

    def _sample(self, sampler: Sampler, seed: int) -> Rollouts:
        """This rank's fresh responses, with the random numbers of a seed."""
        seed_everything(seed)
        rollouts = sampler(self._model)
        check_evaluation("the sampler's responses", rollouts, self._statistics)
        if rollouts.log_prob is not None:
            raise ValueError(
                "the sampler's responses have log_prob=, so another policy sampled them: let the sampler draw from "
                "the model that it is given, and leave log_prob= out"
            )
        self._scorer.agree()
        set_evaluation_mode(self._model)  # samplers may leave the model in training mode
        return rollouts

    def _seed(self) -> int:
        """A different seed in each call and on each rank."""
        return 1_000_003 * self._n_calls + (self._group.rank() if self._group is not None else 0)

    def _learning_rate(self) -> float:
        """η: the `step_size` of the options, or the optimizer's learning rate."""
        if (step_size := self._options.step_size) is not None:
            return step_size
        rates = {float(group["lr"]) for group in unwrap_optimizer(self._optimizer).param_groups}
        if len(rates) > 1:
            raise ValueError(f"the optimizer has several learning rates, {sorted(rates)}: choose one by step_size=")
        return rates.pop()

    def _unknown(self, reason: str) -> EntropyForecast:
        return EntropyForecast(reason=reason, objective=self._options.objective, update=self._options.update)


class ForecastPace:
    """In which windows `step` makes a forecast: alike on all ranks, which choose by numbers that were summed over them.

    Args:
        every: windows from one forecast to the next, at least.
        budget: part of the run's time that forecasts may take; None for no limit.
        group: the ranks that have to choose alike; None for this process alone.
    """

    def __init__(self, every: int, budget: float | None, group: dist.ProcessGroup | None) -> None:
        self._every, self._budget, self._group = every, budget, group
        self._n = self._next = 0
        self._spent = 0.0
        self._begun: float | None = None

    def is_due(self) -> bool:
        """Whether this window has a forecast; call it in every window."""
        if self._begun is None:
            self._begun = time.perf_counter()
        self._n += 1
        if self._n <= self._next:
            return False
        self._next = self._n + self._every - 1
        return True

    def took(self, seconds: float) -> None:
        """Note how long the forecast of this window took, and choose the next one."""
        if self._budget is None:
            return
        assert self._begun is not None
        self._spent += seconds
        of_training = time.perf_counter() - self._begun - self._spent
        own = torch.tensor([[seconds, self._spent, of_training]], dtype=torch.float64)
        latest, spent, trained = gather_from_all_ranks(self._group, lambda: {"of": own})["of"].sum(0).tolist()
        # With n more windows, forecasts will have taken `budget` of the time by the end of the next one. Before the
        # second forecast, nothing is known of a window's length.
        if self._n > 1 and trained > 0:
            wanted = (spent + latest) * (1.0 - self._budget) / self._budget  # seconds of training
            n_more = (wanted - trained) / (trained / (self._n - 1))
            self._next = max(self._next, self._n + math.ceil(n_more) - 1)
