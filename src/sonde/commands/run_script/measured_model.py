"""A model of the script with its probe: ends a window before each step of its optimizers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sonde
from sonde.batch_size.taps.autograd_internals import in_backward
from sonde.commands.run_script.counted_units import units_of
from sonde.commands.run_script.endings import PATIENCE, say_where
from sonde.commands.run_script.found_models import (
    ModelOfOptimizers,
    enabled_grad_scalers,
    is_reduced,
    trainable,
    why_not_reduced,
)
from sonde.commands.run_script.messages import is_first_rank, say
from sonde.commands.run_script.settings import Settings
from sonde.parallel.placements import is_dtensor
from sonde.parallel.unwrap import unwrap_model

_MOST_ERRORS = 3
"""Windows in a row that could not be ended, after which measuring stops."""


class MeasuredModel:
    """Measures one model of the script.

    Args:
        found: the model, and the optimizers that step it.
        settings: of `sonde run`.
        n_steps: steps of all measured models so far.

    Raises:
        ValueError: when the model cannot be measured, with the reason.
    """

    def __init__(self, found: ModelOfOptimizers, settings: Settings, *, n_steps: int = 0) -> None:
        self.name = type(unwrap_model(found.model)).__name__
        self._parameters = trainable(found.model.parameters()).keys()
        log, self._file = settings.log()
        self._probe: sonde.NoiseScaleProbe | None = _attached(found, settings, log)
        self._reading: sonde.NoiseScaleReading | None = None
        """The last one, once the model is measured no more."""
        self._lacks_parameters = self._was_explained = False
        """Whether parameters came later, which the reading is not of; whether an alert has said why there is none."""
        self._writes_report, self._has_said = settings.report, False
        self._has_micro_batches = settings.micro_batches
        self._optimizers = weakref.WeakSet(found.optimizers)
        """Those that step the model. When all are gone, the script is done with its training."""
        self._stepped: set[int] = set()
        """Optimizers that have stepped since the last window was ended, by identity."""
        self._n_errors = self._n_ended = 0
        self._why_stopped = ""
        self.begins_at, self._last_step = n_steps, 0
        """Of all steps of measured models: when it was attached, and its own last one; 0 before that."""

    def holds(self, tensors: Mapping[int, object]) -> bool:
        """Whether any of these tensors, by identity, is a parameter of the model."""
        return not self._parameters.isdisjoint(tensors)

    def is_held_by(self, tensors: Mapping[int, object]) -> bool:
        """Whether all parameters of the model are among these tensors, by identity."""
        return self._parameters <= tensors.keys()

    @property
    def is_stopped(self) -> bool:
        """Whether it measures no more, and is not closed yet."""
        return self._probe is not None and self._why_stopped != ""

    @property
    def is_over(self) -> bool:
        """Whether the script has let go of all its optimizers."""
        return not self._optimizers

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer of the model has taken a step, measured or not."""
        return self._last_step > 0

    def was_done_before(self, other: MeasuredModel) -> bool:
        """Whether it has taken its last step before the other model was attached, as that of an earlier fold has."""
        return 0 < self._last_step <= other.begins_at

    def is_stepped_by(self, optimizer: Any) -> None:
        """Note a new optimizer of the model."""
        self._optimizers.add(optimizer)

    def before_step(self, optimizer: Any, *, is_alone: bool, n_steps: int) -> None:
        """End the window, unless another optimizer of the model has ended it already.

        Args:
            optimizer: that is about to step.
            is_alone: whether the script trains no other model now.
            n_steps: steps of all measured models so far, with this one.
        """
        self._last_step = n_steps
        if (probe := self._probe) is None or self._why_stopped:
            return
        if in_backward():
            self._say_stop("an optimizer steps inside backward: its gradients are gone before they can be compared")
        elif self._stepped and id(optimizer) not in self._stepped and not probe.n_pieces:
            self._stepped.add(id(optimizer))
        elif not (is_alone or self._has_micro_batches) and probe.n_pieces > 1:
            self._say_stop(
                f"the script trains several models, and a step of {self.name} has {probe.n_pieces} backwards. "
                "Losses of different kinds (of real and of generated images) are no micro-batches of one batch: if "
                "these are, pass --micro-batches"
            )
        else:
            self._stepped = {id(optimizer)}
            self._end_window(probe)

    def _end_window(self, probe: sonde.NoiseScaleProbe) -> None:
        try:
            probe.step()
            self._n_errors, self._n_ended = 0, self._n_ended + 1
        except Exception as error:
            self._n_errors += 1
            if self._n_errors == _MOST_ERRORS:
                self._say_stop(str(error))
            else:
                self.zeroed()  # the next window begins anew

    def zeroed(self) -> None:
        """Forget backwards whose gradients the script has zeroed without a step."""
        if self._probe is not None and not self._why_stopped:
            self._probe.discard()

    def clipped(self, norm: Any, max_norm: float) -> None:
        """Note the script's own clip of all of the model's gradients."""
        if self._probe is not None and not self._why_stopped and isinstance(norm, Tensor) and not is_dtensor(norm):
            self._probe.note_clip(norm, max_norm)

    def _say_stop(self, why: str) -> None:
        say(f"measuring stops: {why}. The script goes on")
        self.stop(why)

    def stop(self, why: str) -> None:
        """Measure no more. `close` follows, where hooks may be removed: not in the hook of a step."""
        if not in_backward():
            self.zeroed()  # a step that ends no window would raise the probe's own alert
        self._why_stopped = self._why_stopped or f"measuring stopped: {why}"

    def close(self, reason: str = "closed") -> None:
        """Remove all hooks, end the log and let go of the model. Other ranks may be gone: they are not waited for long.

        Args:
            reason: for the log, unless measuring was stopped.
        """
        probe, self._probe = self._probe, None
        if probe is not None:
            with contextlib.suppress(Exception):
                probe.close(self._why_stopped or reason, patience=PATIENCE)
            self._keep_reading(probe)

    def _keep_reading(self, probe: sonde.NoiseScaleProbe) -> None:
        with contextlib.suppress(Exception):
            self._reading = reading = probe.reading()
            self._lacks_parameters = "not_watched" in probe.alerts
            said = " ".join(probe.alerts.values())
            self._was_explained = reading.windows == 0 and reading.reason is not None and reading.reason in said

    def say_end(self, number: int | None) -> None:
        """Say the reading, and write the report; once, and nothing where measuring was stopped with its reason.

        Args:
            number: of the model among those of the script; None for a single one.
        """
        if not is_first_rank() or self._why_stopped or self._has_said:
            return
        self._has_said = True
        before = "" if number is None else f"{number}. "
        if not self._n_ended or self._reading is None:
            say(f"{before}no step of {self.name} was measured")
            return
        if self._was_explained:
            say(f"{before}no step of {self.name} could be measured: see above")
        else:
            say(f"{before}{self.name}: {self._reading}" if before else str(self._reading))
        if self._lacks_parameters:
            say("parameters that came or became trainable after measuring began are not in it")
        say_where(self._file, writes_report=self._writes_report)


def _attached(found: ModelOfOptimizers, settings: Settings, log: sonde.RunLog) -> sonde.NoiseScaleProbe:
    """A probe of the model.

    Raises:
        ValueError: on all ranks of the model, when it cannot be measured on one of them.
    """
    model = found.model
    try:
        group = _group_by_hand(model, settings)
        units = units_of(settings.units_from, settings.weights_from, model)
        scaler = _grad_scaler()
    except ValueError as error:
        # With a unit that attach refuses, its peers raise too: they would wait for this rank.
        try:
            sonde.attach(model, unit=(), verbose=False)
        except ValueError as of_attach:
            for note in getattr(of_attach, "__notes__", ()):
                error.add_note(note)
        raise
    with torch.autocast("cpu", enabled=False), torch.autocast(_device_type(model), enabled=False):
        return sonde.attach(
            model,
            found.optimizers,
            unit=settings.unit or "rows",
            units_per_piece=units,
            **settings.averaging,
            grad_scaler=scaler,
            process_group=group,
            log=log,
        )


def _device_type(model: nn.Module) -> str:
    return next(model.parameters()).device.type


def _group_by_hand(model: nn.Module, settings: Settings) -> dist.ProcessGroup | None:
    """The ranks over which the script averages gradients by itself; None where DDP or FSDP2 does.

    Raises:
        ValueError: for a plain model in a job of several processes, unless the option says how it is reduced.
    """
    if why := why_not_reduced(model, by_hand=settings.reduced_by_hand):
        raise ValueError(why)
    is_in_job = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.group.WORLD if is_in_job and not is_reduced(model) else None


def _grad_scaler() -> torch.amp.GradScaler | None:
    """The GradScaler of the script; None without one.

    Raises:
        ValueError: when there are several, since nothing shows which of them scales this model's loss.
    """
    scalers = enabled_grad_scalers()
    if len(scalers) > 1:
        raise ValueError(
            f"the script uses {len(scalers)} GradScalers, and nothing shows which of them scales this model's loss: "
            "use one for all models, as torch allows, or attach by sonde.attach(grad_scaler=...)"
        )
    return scalers[0] if scalers else None
