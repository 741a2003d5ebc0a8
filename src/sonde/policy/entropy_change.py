"""What will this update do to the policy's entropy, how sure is that, and which prompts cause it?"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonde.call_site import stack_level
from sonde.parallel.placements import local_tensor, reshard
from sonde.parallel.process_groups import data_parallel_group, gather_from_all_ranks
from sonde.parallel.wrappers import unwrap_optimizer
from sonde.policy.cost import Cost
from sonde.policy.entropy_measurement import EntropyMeasurement, EntropySettings
from sonde.policy.scoring.checkpointing import can_checkpoint, checkpointing, is_checkpointing
from sonde.policy.scoring.optimizer_step import Direction, StepMeter, StepWitness, forecast_step, taken, why_no_forecast
from sonde.policy.scoring.rollouts import Rollouts, TokenStatistics
from sonde.policy.scoring.scorer import Scorer
from sonde.policy.scoring.summed_gradient import DTYPES
from sonde.policy.scoring.token_statistics import CausalLMStatistics
from sonde.policy.scoring.training_state import preserve_training_state, seed_everything, set_evaluation_mode
from sonde.policy.stats.entropy_change import Objective
from sonde.policy.stats.entropy_forecast import EntropyForecast, Update, unknown
from sonde.policy.stats.importance import Weighting

Sampler = Callable[[nn.Module], Rollouts]
"""Samples responses of a model, to the same prompts in each call, with the global random numbers of torch, numpy or
Python."""

NOT_FINITE = "the policy's scores are not finite"
_FARTHEST = 0.01
"""Part of a step that may differ from its forecast before the forecast is taken to be of another step."""


class AroundStep:
    """What `EntropyChangeProbe.around_step` yields; it knows the result once its block has ended."""

    _forecast: EntropyForecast | None = None

    @property
    def forecast(self) -> EntropyForecast:
        """The forecast along the step that was taken, with its truths.

        Raises:
            RuntimeError: inside the block.
        """
        if self._forecast is None:
            raise RuntimeError("what the step did is known after the with block of around_step() has ended")
        return self._forecast


class EntropyChangeProbe:
    """Forecasts what an update will do to a policy's entropy, measures what it did, and tells which prompts caused it.

    Two batches of the policy's own responses: E, on which the change is evaluated, sampled without truncation and
    independent of the update; and U, which the update learns from. The unit is the prompt with its group of responses.
    Nothing of the training changes, whatever fails: parameters have their bits afterwards; `.grad`, the optimizer,
    modes and random numbers are as they were.

    Args:
        model: the policy: plain, compiled, in DDP or FSDP2.
        optimizer: its optimizer; SGD, Adam and AdamW of torch are forecast, others measured by `around_step`.
        token_statistics: scores responses; by default that of a causal language model of transformers.
        objective: "per_token" for R = E[Σ H]/E[T], in nats a token; "sequence" for E[−Σ w s], in nats a response.
        update: "step" for the optimizer's own step; "gradient" for η times the mean of the update prompts' gradients,
            preconditioned by Adam's second moment, whose scatter then counts too.
        sequence_weights: w of the "sequence" objective: "one", or one over the response's "length".
        step_size: η of update="gradient"; by default the optimizer's learning rate.
        micro_batch_prompts: prompts scored at a time.
        derivatives: by "forward" mode, by "central" differences, or "auto": the first where the model has it.
        weighting: of importance sampling: "snis", or "clip" for less variance and some bias.
        sampler: for `measure` and `around_step`, truth by fresh rollouts; for `step`, the responses to evaluate on.
        every: how many windows `step` waits from one forecast to the next.
        buffer_dtype: of summed gradients, where backwards are needed.
        offload: keep these on the CPU while they are not needed.
        checkpoint: turn on gradient checkpointing of a model of transformers meanwhile.
        strict: refuse E and U that share prompts, rather than warn.
        level: of confidence.
        process_group: ranks that hold responses of their own; by default DDP's or FSDP2's.

    Raises:
        ValueError: for an argument outside its range.

    Reference:
        docs/entropy-change.md.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        token_statistics: TokenStatistics | None = None,
        objective: Objective = "per_token",
        update: Update = "step",
        sequence_weights: Literal["one", "length"] = "one",
        step_size: float | None = None,
        micro_batch_prompts: int = 2,
        derivatives: Literal["auto", "forward", "central"] = "auto",
        weighting: Weighting = "snis",
        sampler: Sampler | None = None,
        every: int = 1,
        buffer_dtype: torch.dtype = torch.float32,
        offload: bool = False,
        checkpoint: bool = False,
        strict: bool = False,
        level: float = 0.95,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        _check_choice("objective", objective, ("per_token", "sequence"))
        _check_choice("update", update, ("step", "gradient"))
        _check_choice("sequence_weights", sequence_weights, ("one", "length"))
        _check_choice("derivatives", derivatives, ("auto", "forward", "central"))
        _check_choice("weighting", weighting, ("snis", "clip"))
        _check_choice("buffer_dtype", buffer_dtype, DTYPES)
        for name, n in (("micro_batch_prompts", micro_batch_prompts), ("every", every)):
            if isinstance(n, bool) or not isinstance(n, int) or n < 1:
                raise ValueError(f"{name} must be a whole number from 1 up, got {n!r}")
        if not 0 < level < 1:
            raise ValueError(f"level must be between 0 and 1, got {level!r}")
        if step_size is not None and not 0 < step_size < math.inf:
            raise ValueError(f"step_size must be positive and finite, got {step_size!r}")
        reshard(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if not self._parameters:
            raise ValueError(f"the model ({type(model).__name__}) has no trainable parameters: no update changes it")
        if checkpoint and not can_checkpoint(model):
            raise ValueError("checkpoint=True needs a model of transformers: turn yours on by yourself")
        self._settings = EntropySettings(
            objective, update, sequence_weights, derivatives, weighting, buffer_dtype, offload, level
        )
        self._model = model
        self._optimizer = optimizer
        self._step_size = step_size
        self._sampler = sampler
        self._checkpoint = checkpoint or is_checkpointing(model)
        self._strict = strict
        self._statistics = CausalLMStatistics() if token_statistics is None else token_statistics
        self._group = data_parallel_group(model) if process_group is None else process_group
        self._scorer = Scorer(model, self._statistics, micro_batch_prompts, self._group)
        self._is_repeatable = False
        self._n_calls = 0
        self._every = every
        self._n_steps = 0
        self._latest: EntropyForecast | None = None

    def forecast(
        self,
        evaluation: Rollouts,
        update: Rollouts | None = None,
        *,
        gradient_scale: float | Tensor = 1.0,
        causes: bool = False,
    ) -> EntropyForecast:
        """What the step that is about to be taken will do, to first order, with its truth on these responses.

        With update="step" call it between the last backward and the optimizer's step: gradients are in `.grad`.

        Args:
            evaluation: E, this rank's.
            update: U, this rank's, with advantages. Needed with update="gradient", and for causes by prompt.
            gradient_scale: what gradients will still be multiplied by before the step: a clip's coefficient, one over
                a GradScaler's scale.
            causes: tell momentum from this batch, and which prompts of U do what: takes a backward of E and passes
                over U besides.

        Raises:
            ValueError: for responses that do not serve, or an optimizer whose step cannot be forecast.
            RuntimeError: when there is no gradient yet.
        """
        return self._run(evaluation, update, float(gradient_scale), causes, sampler=None)

    def measure(
        self,
        evaluation: Rollouts,
        update: Rollouts | None = None,
        *,
        gradient_scale: float | Tensor = 1.0,
        causes: bool = False,
    ) -> EntropyForecast:
        """The same with the third truth: what the policy samples before and after the step, with common random numbers.

        Raises:
            RuntimeError: without a sampler.
        """
        if self._sampler is None:
            raise RuntimeError("truth by fresh rollouts needs a sampler: EntropyChangeProbe(…, sampler=…)")
        return self._run(evaluation, update, float(gradient_scale), causes, sampler=self._sampler)

    @contextlib.contextmanager
    def around_step(
        self, evaluation: Rollouts, update: Rollouts | None = None, *, causes: bool = False
    ) -> Iterator[AroundStep]:
        """Around the optimizer's real step: the forecast along it, and its truths.

        The step of an optimizer that can be forecast is, when the block begins, and a sample of its elements tells
        whether it was that which was taken. Otherwise a copy of the parameters is kept, and the step measured.

        Args:
            evaluation: E, this rank's, sampled before.
            update: U, this rank's, with advantages, for causes by prompt.
            causes: as for `forecast`; only where the step can be forecast.

        Raises:
            ValueError: for responses that do not serve, or a probe made with update="gradient".
            RuntimeError: when there is no gradient yet.

        Example:
            >>> def trained(probe: EntropyChangeProbe, evaluation: Rollouts, optimizer: torch.optim.Optimizer) -> None:
            ...     with probe.around_step(evaluation) as around:
            ...         optimizer.step()
            ...     print(around.forecast)
        """
        if self._settings.update == "gradient":
            raise ValueError("around_step() measures the optimizer's own step: make the probe with update='step'")
        around = AroundStep()
        self._check(evaluation, update)
        meter = witness = first_order = before = None
        with self._measuring(evaluation, self._sampler) as measurement:
            problem = "" if measurement is not None else NOT_FINITE
            if measurement is not None:
                before = measurement.sample()
            if why_no_forecast(self._optimizer):
                meter = StepMeter(self._parameters)
            else:
                step = self._forecast_step(1.0)
                witness = StepWitness(step)
                problem = problem or self._why_not_finite(step)
                if measurement is not None and not problem:
                    first_order = measurement.along_step(step)
                del step  # a second direction is needed for causes
                if causes and measurement is not None and first_order is not None:
                    first_order = measurement.with_causes(first_order, self._optimizer, update, 1.0)
        yield around
        with preserve_training_state(self._model):
            if meter is not None and measurement is not None:
                step, after = meter.step(), StepMeter(self._parameters)
                if not (problem := self._why_not_finite(step)):
                    # Parameters hold θ⁺, and derivatives are taken at θ.
                    meter.restore()
                    try:
                        first_order = measurement.along_step(step)
                    finally:
                        after.restore()
                        reshard(self._model)
                del step, after, meter
            if measurement is None or first_order is None:
                around._forecast = unknown(problem, self._settings.objective, self._settings.update)
                return
            truths = measurement.truths(before)
            departure = max(self._gather_from_ranks(witness.departure() if witness else 0.0))
            if departure > _FARTHEST:
                problem = f"the step that was taken differs from the forecast by {departure:.0%}: clip before the block"
            around._forecast = measurement.forecast(first_order, truths, problem)

    def step(self) -> None:
        """In each `every`-th window, forecast the step that is about to be taken, on fresh responses of the sampler.

        Raises:
            RuntimeError: without a sampler, or with update="gradient", which needs the update's responses: call
                `forecast` with them.
        """
        if self._sampler is None or self._settings.update == "gradient":
            raise RuntimeError(
                "step() evaluates an optimizer's step on responses of a sampler: pass sampler=, or call "
                "forecast() with responses"
            )
        is_due, self._n_steps = self._n_steps % self._every == 0, self._n_steps + 1
        self._latest = None
        if is_due:
            self._n_calls += 1
            with preserve_training_state(self._model):
                evaluation = self._sample(self._sampler, self._seed())
            self._latest = self.forecast(evaluation)

    def metrics(self) -> Mapping[str, float | None]:
        """The forecast of this window by metric name; empty where there was none."""
        return {} if self._latest is None else self._latest.metrics()

    def close(self) -> None:
        """Nothing is held."""

    def _run(
        self,
        evaluation: Rollouts,
        update: Rollouts | None,
        gradient_scale: float,
        causes: bool,
        sampler: Sampler | None,
    ) -> EntropyForecast:
        self._check(evaluation, update)
        is_step = self._settings.update == "step"
        if is_step and (why := why_no_forecast(self._optimizer)):
            raise ValueError(f"{why}; or use around_step()")
        if not is_step and update is None:
            raise ValueError("update='gradient' forecasts along the update prompts' gradients: pass their rollouts")
        with self._measuring(evaluation, sampler) as measurement:
            if measurement is None:
                return unknown(NOT_FINITE, self._settings.objective, self._settings.update)
            if is_step:
                step = self._forecast_step(gradient_scale)
                if problem := self._why_not_finite(step):
                    return unknown(problem, self._settings.objective, self._settings.update)
                first_order = measurement.along_step(step)
                del step  # before the next direction is made: each has the size of the parameters
                if causes:
                    first_order = measurement.with_causes(first_order, self._optimizer, update, gradient_scale)
                step = self._forecast_step(gradient_scale)  # again: derivatives leave the direction only approximately
            else:
                assert update is not None
                first_order, step = measurement.along_gradients(update, self._optimizer, self._rate())
            before = measurement.sample()
            with taken(step, self._model):
                truths = measurement.truths(before)
            return measurement.forecast(first_order, truths)

    @contextlib.contextmanager
    def _measuring(self, evaluation: Rollouts, sampler: Sampler | None) -> Iterator[EntropyMeasurement | None]:
        """A measurement that leaves the training state as it was; None if the policy's scores are not finite."""
        self._n_calls += 1
        with (
            preserve_training_state(self._model),
            checkpointing(self._model) if self._checkpoint else contextlib.nullcontext(),
        ):
            if not self._is_repeatable:
                self._scorer.check_repeatable(evaluation)
                self._is_repeatable = True
            cost = Cost(self._parameters[0].device)
            with cost.phase("scores"):
                base = self._scorer.scored(evaluation)
            if not base.is_finite:
                yield None
                return
            sample = None if sampler is None else functools.partial(self._sample, sampler, self._seed())
            yield EntropyMeasurement(self._settings, self._scorer, self._parameters, base, sample, cost)

    def _sample(self, sampler: Sampler, seed: int) -> Rollouts:
        """This rank's fresh responses, with random numbers of a seed."""
        seed_everything(seed)
        rollouts = self._scorer.on_all_ranks(lambda: sampler(self._model))
        set_evaluation_mode(self._model)  # samplers may leave the model in training mode
        return rollouts

    def _seed(self) -> int:
        """Another in each call and on each rank."""
        return 1_000_003 * self._n_calls + (self._group.rank() if self._group is not None else 0)

    def _forecast_step(self, gradient_scale: float) -> Direction:
        """Of the model's parameters alone."""
        step = forecast_step(self._optimizer, gradient_scale=gradient_scale, of=self._parameters)
        if not step:
            raise RuntimeError("no parameter has a gradient: call this after the backward and before zero_grad()")
        return step

    def _rate(self) -> float:
        """η: the one that was given, or the optimizer's."""
        if self._step_size is not None:
            return self._step_size
        rates = {float(group["lr"]) for group in unwrap_optimizer(self._optimizer).param_groups}
        if len(rates) > 1:
            raise ValueError(f"the optimizer has learning rates {sorted(rates)}: say which is meant, step_size=")
        return rates.pop()

    def _why_not_finite(self, step: Direction) -> str:
        is_finite = all(bool(local_tensor(delta).isfinite().all()) for delta in step.values())
        return "" if all(self._gather_from_ranks(float(is_finite))) else "the step is not finite"

    def _gather_from_ranks(self, value: float) -> list[float]:
        values: list[float] = gather_from_all_ranks(self._group, lambda: {"v": torch.tensor([value])})["v"].tolist()
        return values

    def _check(self, evaluation: Rollouts, update: Rollouts | None) -> None:
        """Refuse what does not serve, on every rank alike."""

        def check() -> dict[str, Tensor]:
            if evaluation.is_truncated:
                raise ValueError(
                    "the evaluation responses were sampled with top_p < 1 or the like, whose entropy is not the "
                    "policy's: sample them untruncated"
                )
            temperature = getattr(self._statistics, "temperature", evaluation.temperature)
            for name, rollouts in (("evaluation", evaluation), ("update", update)):
                if rollouts is not None and rollouts.temperature != temperature:
                    raise ValueError(
                        f"{name} responses were sampled at temperature {rollouts.temperature}, and are scored at "
                        f"{temperature}: token_statistics=CausalLMStatistics(temperature={rollouts.temperature})"
                    )
            if update is not None and update.advantage is None:
                raise ValueError("update responses need their advantages: pass advantage= to Rollouts")
            none = torch.zeros(0, dtype=torch.long)
            return {"E": evaluation.prompt.cpu(), "U": none if update is None else update.prompt.cpu()}

        prompts = gather_from_all_ranks(self._group, check)
        shared = sorted(set(prompts["E"].tolist()) & set(prompts["U"].tolist()))
        if shared:
            said = (
                f"evaluation and update share {len(shared)} prompts, {shared[:3]} among them: the forecast is biased "
                "by what an update does to its own prompts; evaluate on others"
            )
            if self._strict:
                raise ValueError(said)
            warnings.warn(said, stacklevel=stack_level())


def _check_choice(name: str, got: object, choices: Sequence[object]) -> None:
    if got not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {got!r}")
