"""The optimizer's real step: forecast before it is taken, and checked or measured after it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sonde.parallel.placements import local_tensor, reshard
from sonde.parallel.process_groups import gather_from_all_ranks
from sonde.parallel.unwrap import unwrap_optimizer
from sonde.policy.entropy_bonus import EntropyBonus
from sonde.policy.entropy_measurement import EntropyMeasurement
from sonde.policy.scoring.optimizer_step import (
    Direction,
    StepMeter,
    StepWatch,
    StepWitness,
    forecast_step,
    has_second_moment,
    has_sparse_gradient,
    why_no_forecast,
)
from sonde.policy.scoring.precision import NARROW
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.scorer import Scored
from sonde.policy.scoring.step_inputs import Inputs, InputsWatch, StepInputs
from sonde.policy.scoring.step_rounding import StepRounding
from sonde.policy.stats.entropy_forecast import EntropyForecast, FirstOrder

_LARGEST_DEPARTURE = 0.01
"""Relative difference between the step that was taken and its forecast, above which they count as different steps."""
_ANOTHER_STEP = 0.5
"""The same for parameters of 16 bits, whose step is rounded: a few elements are rounded to another neighbour."""
STEP_NOT_FINITE = "the step is not finite"
_FORECAST_NOT_FINITE = "the step that the optimizer would take on entry is not finite"
_SPARSE = "the optimizer's answer to a bonus is not known for a sparse gradient: build the layer with sparse=False"
STEP_ROUNDED_AWAY = (
    "the step changes nothing, since parameters of 16 bits round it away as a whole: train parameters in fp32, or use "
    "a larger learning rate"
)
_NO_GRADIENT = (
    "all gradients were 0, as where the advantages of a whole batch are: the step in the block of around_step() "
    "changed nothing"
)
_STEP_SKIPPED = (
    "no parameter moved in the block of around_step(): the step was skipped, as a GradScaler does after gradients that "
    "are not finite, or it was not called, or its learning rate is 0, or it is too small for parameters of 16 bits"
)
_OTHER_INPUTS = {
    Inputs.UNSEEN: (
        "the gradients of the step were not seen, and the step itself does not show whether they were those on entry, "
        "as with parameters of 16 bits or in Adam's first step: call optimizer.step() in the block, without a closure "
        "and before zero_grad(), and close the probe only after its last block"
    ),
    Inputs.HOOKED: (
        "a step pre-hook that is newer than the probe may have changed gradients: register it before the probe is "
        "made. If it stays on the optimizer, the probe looks at gradients after it from the next step on"
    ),
    Inputs.SEVERAL: "the block of around_step() took several steps: take one in each block",
    Inputs.OPTIONS: (
        "the optimizer's options, such as its learning rate, were changed in the block of around_step() before the "
        "step: change them before the block"
    ),
    Inputs.GRADIENTS: (
        "gradients were changed in the block of around_step(): clip before the block, and pass applied_scale=; or pass "
        "the factor that the block multiplies them by as gradient_scale="
    ),
}
"""Why the optimizer would answer a bonus otherwise than on entry."""
_MOVED_OTHERS = (
    "parameters moved in the block of around_step() that are not in the probe's optimizer, or had no gradient, so "
    "derivatives and the coefficient to hold leave them out: pass an optimizer that holds all parameters of the model"
)


@dataclass
class BeforeStep:
    """What is known of a step before it is taken.

    Attributes:
        sample: fresh responses, scored; None without a sampler.
        first_order: the change along the forecast step, or along the update prompts' gradients; None if no derivative
            is wanted, or if the step has no forecast, or is not finite.
        watch: sees whether a step is taken; where derivatives or a bonus are wanted, it also compares this step with
            its forecast, or measures it.
        bonus: what an entropy bonus adds to the step; None if not asked for.
        inputs: sees what the step of the block begins with; None if that does not matter.
        rounding: sees how much of the step parameters of 16 bits do not hold.
        why_no_answer: why the optimizer's answer to a bonus is not known; empty if it is.
        shows_gradients: whether the step that is taken shows if its gradients were others than on entry.
    """

    sample: Scored | None
    first_order: FirstOrder | None
    watch: StepWatch | StepWitness | StepMeter
    bonus: EntropyBonus | None = None
    inputs: InputsWatch | None = None
    rounding: StepRounding | None = None
    why_no_answer: str = ""
    shows_gradients: bool = True


class PolicyStep:
    """The step of a policy's optimizer, judged alike on all ranks.

    Args:
        model: the policy.
        parameters: its trainable parameters.
        optimizer: its optimizer, which may hold other parameters too.
        group: the ranks that hold different responses; None for this process alone.
        inputs: sees what a step begins with; None if that does not matter.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        optimizer: Any,
        group: dist.ProcessGroup | None,
        inputs: StepInputs | None = None,
    ) -> None:
        self._inputs = inputs
        self._model, self._parameters = model, list(parameters)
        self._optimizer, self._group = optimizer, group
        self._is_narrow = any(p.dtype in NARROW for p in self._parameters)

    def forecast(self, gradient_scale: float) -> Direction:
        """The next step of the model's parameters.

        Args:
            gradient_scale: factor that gradients are still multiplied by before the step.

        Raises:
            RuntimeError: if there is no gradient yet.
        """
        step = forecast_step(self._optimizer, gradient_scale=gradient_scale, of=self._parameters)
        if not step:
            raise RuntimeError("no parameter has a gradient: call this after the backward and before zero_grad()")
        return step

    def is_finite(self, step: Direction) -> bool:
        """Whether the step is finite on all ranks."""
        return not self._on_any_rank(not all(bool(local_tensor(delta).isfinite().all()) for delta in step.values()))

    def before(
        self,
        measurement: EntropyMeasurement | None,
        update: Rollouts | None,
        *,
        has_derivatives: bool,
        has_bonus: bool,
        causes: bool,
        gradient_scale: float,
    ) -> BeforeStep:
        """Put a watch on the step before it is taken, and take derivatives along its forecast.

        Args:
            measurement: None if the policy's scores are not finite.
            update: this rank's part of U, for causes by prompt.
            has_derivatives: whether derivatives are wanted along the step.
            has_bonus: whether the coefficient of an entropy bonus is wanted, which is that of the forecast step.
            causes: whether to split the change to first order into its causes.
            gradient_scale: factor that gradients are still multiplied by before the step.
        """
        sample = None if measurement is None else measurement.sample()
        rounding = None
        if self._is_narrow:
            rounding = StepRounding(self._optimizer, self._parameters, gradient_scale)
        if not (has_derivatives or has_bonus):
            return BeforeStep(sample, None, StepWatch(self._parameters), rounding=rounding)
        is_sparse = self._on_any_rank(has_sparse_gradient(self._parameters))
        if why_no_forecast(self._optimizer) or is_sparse:
            meter = StepMeter(self._parameters)
            return BeforeStep(sample, None, meter, rounding=rounding, why_no_answer=_SPARSE if is_sparse else "")
        step = self.forecast(gradient_scale)
        witness, first_order, is_finite = StepWitness(step, self._parameters), None, self.is_finite(step)
        if has_derivatives and measurement is not None and is_finite:
            first_order = measurement.along_step(step)
        del step  # each direction has the size of the parameters, and causes need one of their own
        if causes and measurement is not None and first_order is not None:
            first_order = measurement.with_causes(first_order, self._optimizer, update, gradient_scale)
        return BeforeStep(
            sample,
            first_order,
            witness,
            rounding=rounding,
            why_no_answer="" if is_finite else _FORECAST_NOT_FINITE,
            shows_gradients=not self._on_any_rank(self._is_narrow or self._is_first_of_adam()),
        )

    @contextlib.contextmanager
    def watched(self, before: BeforeStep, gradient_scale: float) -> Iterator[None]:
        """Around the block of the user: notes what its step begins with, if that matters.

        Args:
            before: of this step; gets the notes.
            gradient_scale: factor that gradients are still multiplied by before the step.
        """
        if self._inputs is None:
            yield
            return
        with self._inputs.watched(self._optimizer, self._parameters, gradient_scale) as before.inputs:
            yield

    def after(self, measurement: EntropyMeasurement, before: BeforeStep) -> EntropyForecast:
        """The change by the step that was taken. Parameters hold θ⁺.

        Args:
            measurement: that `before` was made with.
            before: the result of `before`; its watch is given up.
        """
        watch, first_order = before.watch, before.first_order
        now = measurement.scored_after()
        # A watch sees a few elements of each parameter. A step of others alone shows in the scores.
        if self._is_to_move() and not self._on_any_rank(watch.has_moved()) and measurement.is_unchanged(now):
            return measurement.unknown(self._why_unmoved())
        bonus, before.bonus = before.bonus, None
        inputs = self._worst_inputs(before)
        if isinstance(watch, StepWitness) and bonus is not None:
            bonus.why_not = bonus.why_not or self._why_another_bonus(watch, inputs, before.shows_gradients)
        after = measurement.after(now, before.sample, bonus)
        del bonus  # it holds several vectors of the size of the parameters
        if isinstance(watch, StepWitness) and first_order is not None:
            first_order = dataclasses.replace(first_order, doubt=self._why_another_step(watch) or first_order.doubt)
        elif isinstance(watch, StepMeter):
            first_order = self._along_measured_step(measurement, watch)
        del watch, before.watch  # a meter holds a copy of the parameters
        return measurement.forecast(first_order, after, rounded_away=self._rounded_away(before, inputs))

    def after_gradients(self, measurement: EntropyMeasurement, before: BeforeStep) -> EntropyForecast:
        """The change along the update prompts' gradients, beside that by the step that was taken."""
        now = measurement.scored_after()
        if self._is_to_move() and not self._on_any_rank(before.watch.has_moved()) and measurement.is_unchanged(now):
            return measurement.unknown(self._why_unmoved())
        after = measurement.after(now, before.sample)
        rounded_away = self._rounded_away(before, self._worst_inputs(before))
        return measurement.forecast(before.first_order, after, is_same_step=False, rounded_away=rounded_away)

    def _worst_inputs(self, before: BeforeStep) -> Inputs:
        """What the step began with: the worst that a rank saw; UNSEEN if nobody looked."""
        seen = Inputs.UNSEEN if before.inputs is None else before.inputs.seen()
        return Inputs(int(max(self._gather_from_ranks(float(seen)))))

    def _rounded_away(self, before: BeforeStep, inputs: Inputs) -> float | None:
        """The part of the step that parameters of 16 bits do not hold; 0 if there are none.

        None if it is unknown: if the step has no forecast, or began with other things than on entry, or was not seen.
        """
        if before.rounding is None:
            return 0.0
        rounding = before.rounding
        sums = gather_from_all_ranks(self._group, lambda: {"of": torch.tensor([rounding.sq_norms()])})["of"].sum(0)
        sq_lost, sq_step, sq_other, sq_moved = sums.tolist()
        is_another = inputs is not Inputs.SAME or sq_other > _ANOTHER_STEP**2 * max(sq_moved, sq_other)
        return min(math.sqrt(sq_lost / sq_step), 1.0) if sq_step and not is_another else None

    def _why_another_step(self, witness: StepWitness) -> str:
        """How the step that was taken differs from its forecast; empty if it does not."""
        if self._on_any_rank(witness.has_moved_others()):
            return _MOVED_OTHERS
        departure = max(self._gather_from_ranks(witness.departure()))
        if departure > _LARGEST_DEPARTURE and self._is_narrow:
            return (
                f"rounding to 16 bits has moved the step that was taken by {departure:.0%} from that of the derivatives"
            )
        if departure > _LARGEST_DEPARTURE:
            return f"derivatives are along another step, {_off(departure)} the one taken: clip before the block"
        return ""

    def _why_another_bonus(self, witness: StepWitness, inputs: Inputs, shows_gradients: bool) -> str:
        """Why the optimizer would answer a bonus otherwise than on entry; empty if it would not.

        Rounding to 16 bits does not matter.
        """
        if self._on_any_rank(witness.has_moved_others()):
            return _MOVED_OTHERS
        if inputs > (Inputs.HOOKED if shows_gradients else Inputs.SAME):
            return _OTHER_INPUTS[inputs]
        departure = max(self._gather_from_ranks(witness.departure()))
        if departure > (_ANOTHER_STEP if self._is_narrow else _LARGEST_DEPARTURE):
            return (
                f"the step that was taken is {_off(departure)} the one forecast on entry: in the block, change nothing "
                "that the step depends on, such as gradients, before the step"
            )
        return ""

    def _along_measured_step(self, measurement: EntropyMeasurement, meter: StepMeter) -> FirstOrder | None:
        """The change along the step that was taken; None if this step is not finite. Parameters hold θ⁺."""
        step, after = meter.step(), StepMeter(self._parameters)
        if not self.is_finite(step):
            return None
        # Derivatives are taken at θ. Afterwards parameters have the bits of θ⁺ again, whatever fails.
        meter.restore()
        try:
            return measurement.along_step(step)
        finally:
            after.restore()
            reshard(self._model)

    def _is_first_of_adam(self) -> bool:
        """Whether this is Adam's first step for any parameter: it moves by the gradient's sign, whatever its size."""
        state = unwrap_optimizer(self._optimizer).state
        return has_second_moment(self._optimizer) and any(
            p.grad is not None and not state.get(p) for p in self._parameters
        )

    def _is_to_move(self) -> bool:
        """Whether a step is expected to move anything; without a learning rate, as a warm-up begins, it is not."""
        groups = getattr(unwrap_optimizer(self._optimizer), "param_groups", ())
        return any(float(group.get("lr", 1.0)) != 0.0 for group in groups) or not groups

    def _why_unmoved(self) -> str:
        """Why no parameter moved, by the gradients that are still there."""
        gradients = [local_tensor(p.grad) for p in self._parameters if p.grad is not None]
        is_zero = bool(gradients) and not any(bool(g.any()) for g in gradients)
        return _STEP_SKIPPED if self._on_any_rank(not is_zero) else _NO_GRADIENT

    def _on_any_rank(self, is_so: bool) -> bool:
        return any(self._gather_from_ranks(float(is_so)))

    def _gather_from_ranks(self, value: float) -> list[float]:
        values: list[float] = gather_from_all_ranks(self._group, lambda: {"v": torch.tensor([value])})["v"].tolist()
        return values


def _off(departure: float) -> str:
    """How far one step is off another."""
    return "far off" if departure > 10.0 else f"{departure:.0%} off"
