"""What will this update do to the policy's entropy, how sure is the forecast, and which prompts cause the change?"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonde.gradient_norm.fused_clip import scale_in_step
from sonde.parallel.process_groups import check_group, data_parallel_group, together
from sonde.parallel.unwrap import check_grad_scaler, loss_scale, unwrap_optimizer
from sonde.policy.cost import Cost
from sonde.policy.entropy_checks import (
    as_factor,
    check_evaluation,
    check_is_model,
    check_is_rollouts,
    check_model,
    check_optimizer,
    check_responses,
    check_sampled_log_prob,
    check_sampler,
    trainable,
)
from sonde.policy.entropy_measurement import EntropyMeasurement
from sonde.policy.entropy_metrics import METRICS
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.policy_step import STEP_NOT_FINITE, STEP_ROUNDED_AWAY, PolicyStep
from sonde.policy.scoring.checkpointing import checkpointing, is_checkpointing
from sonde.policy.scoring.optimizer_step import taken, why_no_forecast
from sonde.policy.scoring.precision import NARROW
from sonde.policy.scoring.rollouts import Rollouts, TokenStatistics
from sonde.policy.scoring.scorer import Scorer
from sonde.policy.scoring.step_inputs import StepInputs
from sonde.policy.scoring.token_statistics import CausalLMStatistics, check_is_statistics
from sonde.policy.scoring.training_state import preserve_training_state, seed_everything, set_evaluation_mode
from sonde.policy.stats.entropy_forecast import EntropyForecast, unknown
from sonde.probe import Metric

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

    The probe needs two batches of the policy's own responses. E evaluates the change: sampled without truncation, and
    independent of the update. U is the batch that the update learns from. The unit is the prompt with its group of
    responses. Nothing of the training changes, whatever fails: afterwards parameters have the same bits, and `.grad`,
    the optimizer, modes and random numbers are as before. With `coefficient_to_hold` or parameters of 16 bits, the
    optimizer has two step hooks until `close`: see `around_step`.

    Each forecast stands alone, so the probe has no state to save for a restart. Only `step` counts windows: after a
    restart, it forecasts its first one.

    Args:
        model: the policy: plain, compiled, in DDP or FSDP2.
        optimizer: its optimizer. The steps of torch's SGD, Adam and AdamW are forecast; `around_step` measures others,
            also with None in the place of one that is none of torch's.
        options: how to measure.
        token_statistics: scores responses; by default `CausalLMStatistics`, for a causal language model of
            transformers.
        sampler: draws fresh responses: for the third truth of `measure` and `around_step`, and for `step`.
        grad_scaler: the `torch.amp.GradScaler` in use, if there is one. Its scale is left out of the gradients, before
            and after its `unscale_`.
        process_group: the ranks that hold different responses; by default those of DDP or FSDP2.

    Raises:
        ValueError: for an option outside its range, a model without trainable parameters, or an optimizer that holds
            none of them.

    Reference:
        docs/entropy-change.md.
    """

    METRICS: ClassVar[Mapping[str, Metric]] = METRICS

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
    ) -> None:
        options = EntropyChangeOptions() if options is None else options
        if not isinstance(options, EntropyChangeOptions):
            raise ValueError(f"options must be a sonde.EntropyChangeOptions, got {options!r:.60}")
        check_is_model(model)
        check_group(process_group)
        check_is_statistics(token_statistics)
        check_sampler(sampler)
        parameters = trainable(model)
        check_model(model, parameters, has_checkpoints=options.checkpoint)
        check_optimizer(optimizer, parameters)
        check_grad_scaler(grad_scaler)
        if options.update == "gradient" and options.step_size is None and optimizer is None:
            raise ValueError("update='gradient' takes the optimizer's learning rate, got no optimizer: pass step_size=")
        if options.coefficient_to_hold and why_no_forecast(optimizer):
            raise ValueError(
                "coefficient_to_hold=True needs the optimizer's answer to a bonus, known for torch's SGD, Adam "
                f"and AdamW, got {type(unwrap_optimizer(optimizer)).__name__}: leave coefficient_to_hold out"
            )
        self._options = options
        self._model = model
        self._optimizer = optimizer
        self._sampler = sampler
        self._grad_scaler = grad_scaler
        self._has_checkpoints = options.checkpoint or is_checkpointing(model)
        self._statistics = CausalLMStatistics() if token_statistics is None else token_statistics
        self._group = data_parallel_group(model) if process_group is None else process_group
        self._scorer = Scorer(model, self._statistics, options.micro_batch_prompts, self._group, options.precision)
        self._inputs: StepInputs | None = None
        may_differ = options.coefficient_to_hold or any(p.dtype in NARROW for p in model.parameters())
        if may_differ and not why_no_forecast(optimizer):
            self._inputs = StepInputs(optimizer)
        self._n_calls = 0
        self._n_steps = 0
        self._latest: EntropyForecast | None = None

    def forecast(
        self,
        evaluation: Rollouts,
        update: Rollouts | None = None,
        *,
        gradient_scale: float | Tensor = 1.0,
        causes: bool = False,
        entropy_coefficient: float | None = None,
        applied_scale: float | Tensor = 1.0,
    ) -> EntropyForecast:
        """What the next optimizer step will do. Parameters take the step for one forward, and have their bits again.

        With update="step", call it between the last backward and the optimizer's step, while gradients are in `.grad`.

        Args:
            evaluation: this rank's part of E.
            update: this rank's part of U, with advantages. Needed with update="gradient", and for causes by prompt.
            gradient_scale: factor that gradients are still multiplied by before the step, such as a clip's coefficient.
                Leave out the scale of `grad_scaler` and a clip by `fold_into=`: the probe knows both.
            causes: also split the change into momentum and this batch, and by prompt of U. This takes a backward of E
                and one of U, and passes over U.
            entropy_coefficient: that of the bonus which the loss has now, if it is not the option's; for
                `coefficient_to_hold`.
            applied_scale: factor of the loss's gradient that `.grad` holds already, such as the coefficient of a clip
                that came first. Leave out the scale of `grad_scaler`. For `coefficient_to_hold`.

        Raises:
            ValueError: for responses that cannot be used, or an optimizer whose step cannot be forecast.
            RuntimeError: if there is no gradient yet.
        """
        with together(self._group):
            bonus, scale = self._bonus_in_loss(entropy_coefficient, applied_scale), self._gradient_scale(gradient_scale)
            return self._run(evaluation, update, scale, causes, bonus, sampler=None)

    def measure(
        self,
        evaluation: Rollouts,
        update: Rollouts | None = None,
        *,
        gradient_scale: float | Tensor = 1.0,
        causes: bool = False,
        entropy_coefficient: float | None = None,
        applied_scale: float | Tensor = 1.0,
    ) -> EntropyForecast:
        """`forecast` with the third truth: responses sampled before and after the step, with common random numbers.

        Raises:
            RuntimeError: without a sampler.
        """
        if self._sampler is None:
            raise RuntimeError("truth by fresh rollouts needs a sampler: EntropyChangeProbe(…, sampler=…)")
        with together(self._group):
            bonus, scale = self._bonus_in_loss(entropy_coefficient, applied_scale), self._gradient_scale(gradient_scale)
            return self._run(evaluation, update, scale, causes, bonus, sampler=self._sampler)

    @contextlib.contextmanager
    def around_step(
        self,
        evaluation: Rollouts,
        update: Rollouts | None = None,
        *,
        gradient_scale: float | Tensor = 1.0,
        causes: bool = False,
        entropy_coefficient: float | None = None,
        applied_scale: float | Tensor = 1.0,
    ) -> Iterator[AroundStep]:
        """Around the optimizer's real step, of any optimizer: what the step did to the entropy.

        E is scored on entry and on exit. With update="gradient", the change along the update prompts' gradients is
        forecast on entry, and `finite_step` has the change by the real step beside it.

        Derivatives are taken with causes=True or the option `first_order`. If the optimizer's step can be forecast,
        they are taken along the forecast on entry. On exit, a sample of elements checks that this was the step actually
        taken. If it cannot be forecast, the probe keeps a copy of the parameters and measures the step on exit.

        With `coefficient_to_hold`, or parameters of 16 bits, it also looks at the gradients as the step begins. For
        that, the optimizer has two hooks from the making of the probe until its `close`, which do nothing elsewhere.

        Args:
            evaluation: this rank's part of E, sampled before the step.
            update: this rank's part of U, with advantages. Needed with update="gradient", and for causes by prompt.
            gradient_scale: as for `forecast`, of the gradients before the block.
            causes: as for `forecast`; ignored if the step cannot be forecast.
            entropy_coefficient: as for `forecast`.
            applied_scale: as for `forecast`.

        Raises:
            ValueError: for responses that cannot be used.
            RuntimeError: if there is no gradient yet, where one is needed.

        Example:
            >>> def trained(probe: EntropyChangeProbe, evaluation: Rollouts, optimizer: torch.optim.Optimizer) -> None:
            ...     with probe.around_step(evaluation) as around:
            ...         optimizer.step()
            ...     print(around.forecast)
        """
        around, options = AroundStep(), self._options
        is_gradient = options.update == "gradient"
        with together(self._group):
            present, applied = self._bonus_in_loss(entropy_coefficient, applied_scale)
            scale = self._gradient_scale(gradient_scale)
            n_update = self._check_responses(evaluation, update, causes)
            if is_gradient and update is None:
                raise ValueError(_NO_UPDATE)
            step = PolicyStep(self._model, trainable(self._model), self._optimizer, self._group, self._inputs)
            with self._measuring(evaluation, self._sampler, n_update) as measurement:
                before = step.before(
                    measurement,
                    update,
                    has_derivatives=not is_gradient and (causes or options.first_order),
                    has_bonus=options.coefficient_to_hold,
                    causes=causes,
                    gradient_scale=scale,
                )
                if is_gradient and measurement is not None:
                    assert update is not None
                    before.first_order, _ = measurement.along_gradients(update, self._optimizer, self._learning_rate())
                if options.coefficient_to_hold and measurement is not None:
                    before.bonus = measurement.bonus(
                        self._model,
                        self._optimizer,
                        gradient_scale=scale,
                        applied_scale=applied,
                        present=present,
                        why_not=before.why_no_answer,
                    )
        with step.watched(before, scale):
            yield around
        with together(self._group), self._undisturbed():
            if measurement is None:
                around._forecast = self._unknown(_SCORES_NOT_FINITE)
            else:
                finish = step.after_gradients if is_gradient else step.after
                around._forecast = finish(measurement, before)

    def step(self) -> None:
        """In every `every`-th window, forecast the next optimizer step on fresh responses of the sampler.

        Raises:
            RuntimeError: without a sampler; or with update="gradient", which needs the update's responses: call
                `forecast` with them.
        """
        if self._sampler is None or self._options.update == "gradient":
            raise RuntimeError(
                "step() evaluates an optimizer's step on responses of a sampler: pass sampler=, or call "
                "forecast() with responses"
            )
        is_due, self._n_steps = self._n_steps % self._options.every == 0, self._n_steps + 1
        self._latest = None
        if is_due:
            self._n_calls += 1
            begun = time.perf_counter()
            with together(self._group), preserve_training_state(self._model):
                evaluation = self._sample(self._sampler, self._seed())
            sampling = time.perf_counter() - begun
            self._latest = self.forecast(evaluation).after_sampling(sampling)

    def metrics(self) -> Mapping[str, float | None]:
        """The forecast of this window by metric name; empty if this window had none."""
        return {} if self._latest is None else self._latest.metrics()

    def close(self) -> None:
        """Take the hooks away that the optimizer has for `around_step`: see there. Call it after the last block."""
        if self._inputs is not None:
            self._inputs.close()
            self._inputs = None

    def _run(
        self,
        evaluation: Rollouts,
        update: Rollouts | None,
        gradient_scale: float,
        causes: bool,
        bonus_in_loss: tuple[float, float],
        sampler: Sampler | None,
    ) -> EntropyForecast:
        n_update = self._check_responses(evaluation, update, causes)
        is_step = self._options.update == "step"
        if is_step and (why := why_no_forecast(self._optimizer)):
            raise ValueError(why)
        if not is_step and update is None:
            raise ValueError(_NO_UPDATE)
        with self._measuring(evaluation, sampler, n_update) as measurement:
            if measurement is None:
                return self._unknown(_SCORES_NOT_FINITE)
            first_order, bonus = None, None
            if is_step:
                policy_step = PolicyStep(self._model, trainable(self._model), self._optimizer, self._group)
                step = policy_step.forecast(gradient_scale)
                if not policy_step.is_finite(step):
                    return measurement.unknown(STEP_NOT_FINITE)
                if causes or self._options.first_order:
                    first_order = measurement.along_step(step)
                    del step  # each direction has the size of the parameters, and causes need one of their own
                    if causes:
                        first_order = measurement.with_causes(first_order, self._optimizer, update, gradient_scale)
                    step = policy_step.forecast(gradient_scale)  # again: derivatives change it by rounding
                if self._options.coefficient_to_hold:
                    present, applied = bonus_in_loss
                    bonus = measurement.bonus(
                        self._model,
                        self._optimizer,
                        gradient_scale=gradient_scale,
                        applied_scale=applied,
                        present=present,
                    )
            else:
                assert update is not None
                first_order, step = measurement.along_gradients(update, self._optimizer, self._learning_rate())
            before = measurement.sample()
            # Along gradients, no optimizer rounds the step.
            with (
                taken(step, self._model, keeps_residuals=not is_step) as now,
                self._scorer.adding(now.residuals),
            ):
                scored = measurement.scored_after()
                if is_step and now.rounded_away and measurement.is_unchanged(scored):
                    return measurement.unknown(STEP_ROUNDED_AWAY, rounded_away=now.rounded_away)
                after = measurement.after(scored, before, bonus)
            is_rounded = is_step or not self._scorer.adds_residuals
            return measurement.forecast(first_order, after, rounded_away=now.rounded_away if is_rounded else 0.0)

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """The training state is as before on exit; layers are checkpointed inside, if they are to be."""
        checkpoints = checkpointing(self._model) if self._has_checkpoints else contextlib.nullcontext()
        with preserve_training_state(self._model), checkpoints:
            yield

    @contextlib.contextmanager
    def _measuring(
        self, evaluation: Rollouts, sampler: Sampler | None, n_update: int
    ) -> Iterator[EntropyMeasurement | None]:
        """A measurement that leaves the training state as it was; None if the policy's scores are not finite."""
        self._n_calls += 1
        with self._undisturbed():
            parameters = trainable(self._model)  # of now: some are perhaps unfrozen as training goes on
            if not self._scorer.is_checked:
                self._scorer.check(evaluation)
            cost = Cost(parameters[0].device)
            with cost.phase("scores"):
                base = self._scorer.scored(evaluation)
            if not base.is_finite:
                yield None
                return
            check_sampled_log_prob(base)
            sample = None if sampler is None else functools.partial(self._sample, sampler, self._seed())
            yield EntropyMeasurement(self._options, self._scorer, parameters, base, sample, cost, n_update)

    def _sample(self, sampler: Sampler, seed: int) -> Rollouts:
        """This rank's fresh responses, with the random numbers of a seed."""
        seed_everything(seed)

        def sampled() -> Rollouts:
            rollouts = sampler(self._model)
            check_is_rollouts("what the sampler returns", rollouts)
            check_evaluation(rollouts, self._statistics, "the sampler's")
            if rollouts.log_prob is not None:
                raise ValueError(
                    "the sampler's responses have log_prob=, so another policy sampled them: let the sampler draw from "
                    "the model that it is given, and leave log_prob= out"
                )
            return rollouts

        rollouts = self._scorer.on_all_ranks(sampled)
        set_evaluation_mode(self._model)  # samplers may leave the model in training mode
        return rollouts

    def _seed(self) -> int:
        """A different seed in each call and on each rank."""
        return 1_000_003 * self._n_calls + (self._group.rank() if self._group is not None else 0)

    def _check_responses(self, evaluation: Rollouts, update: Rollouts | None, causes: bool) -> int:
        return check_responses(
            evaluation,
            update,
            self._statistics,
            self._group,
            options=self._options,
            causes=causes,
        )

    def _gradient_scale(self, given: float | Tensor) -> float:
        """The factor of gradients before the step; not finite if they are not."""
        scale = as_factor("gradient_scale", given)
        if scale < 0:
            raise ValueError(f"gradient_scale must not be negative, got {scale!r}: pass the factor of a clip, say")
        return scale / loss_scale(self._grad_scaler, self._optimizer) * float(scale_in_step(self._optimizer))

    def _bonus_in_loss(self, coefficient: float | None, applied_scale: float | Tensor) -> tuple[float, float]:
        """The coefficient of the loss's entropy bonus, and the factor of the loss's gradient in `.grad`."""
        present = self._options.entropy_coefficient
        if coefficient is not None:
            present = as_factor("entropy_coefficient", coefficient)
        applied = as_factor("applied_scale", applied_scale) * loss_scale(self._grad_scaler, self._optimizer)
        if not math.isfinite(present):
            raise ValueError(f"entropy_coefficient must be finite, got {present!r}")
        if self._options.coefficient_to_hold and not 0.0 < applied < math.inf:
            raise ValueError(f"applied_scale must be positive and finite, got {applied!r}")
        return present, applied

    def _learning_rate(self) -> float:
        """η: the `step_size` of the options, or the optimizer's learning rate."""
        if self._options.step_size is not None:
            return self._options.step_size
        rates = {float(group["lr"]) for group in unwrap_optimizer(self._optimizer).param_groups}
        if len(rates) > 1:
            raise ValueError(f"the optimizer has several learning rates, {sorted(rates)}: choose one by step_size=")
        return rates.pop()

    def _unknown(self, reason: str) -> EntropyForecast:
        return unknown(reason, self._options.objective, self._options.update)
