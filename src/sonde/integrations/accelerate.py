"""The noise scale of a loop with Accelerate."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sonde.batch_size.forward_units import FIRST_DIM, CountsOfForward
from sonde.batch_size.hooks import why_no_hook
from sonde.gradient_norm.clip import clip_grad_norm_
from sonde.integrations.guarded import (
    GuardedProbe,
    OnError,
    WrappedMethods,
    is_wrapped,
    warn_if_untested,
)
from sonde.records import LogOrPlaces, logger
from sonde.version import TESTED, install_hint

try:
    import accelerate
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise ImportError(f"this needs accelerate: {install_hint('accelerate')}") from error

SAVED_AS = "sonde_noise_scale.json"
"""The file with the averages in a folder that `accelerator.save_state` writes."""


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    *,
    unit: str | Sequence[str] = "examples",
    units: Callable[..., Any] | None = None,
    weight: Callable[..., float | Tensor] | None = None,
    clips: bool = False,
    log: LogOrPlaces = None,
    on_error: OnError = "warn",
    verbose: bool = True,
    **options: Any,
) -> AccelerateProbe:
    """Measure the gradient noise scale of a loop. Call it after `accelerator.prepare`.

    Each `accelerator.backward` is a piece, and each step of the optimizer with `sync_gradients` ends a window; the loop
    needs no other line. `accelerator.log` also gets the headline's metrics, at the user's own step. `save_state` and
    `load_state` take the averages along, in a file of their own: a checkpoint from before sonde was attached is loaded
    as it was.

    Args:
        accelerator: of the loop.
        model: as `prepare` has returned it.
        optimizer: as `prepare` has returned it.
        unit: plural name of the independent sample. Several names need `units`.
        units: called as the model is, it returns the number of units of a micro-batch, the weight of each in the
            micro-batch's loss, [units], or a number for each name; by default the rows of what the model is called
            with.
        weight: called as the model is, it returns the micro-batch's weight in the loss, such as its loss tokens where
            the loss is divided by the tokens of the whole window. By default, micro-batches weigh the same.
        clips: have `accelerator.clip_grad_norm_` clip by `sonde.clip_grad_norm_`: one collective for parameters on any
            meshes. The log has the share of windows that were clipped in any case.
        log: of the run, the folder for a log of its own, or whatever else `RunLog` takes: "wandb", a function, several.
        on_error: "warn" logs errors of the probe, and training goes on; "raise" raises them, for tests.
        verbose: print the set-up that was found, and the reading at the end, on rank 0.
        **options: others of `sonde.attach`: `units_per_piece` (a number, without `units` and `weight`, where
            forwards do not show it), `groups`, `metric`, `per_example`, `budget`, `allowance`, `every` and the like.

    Returns:
        The probe: `reading()` is the present reading, `close()` ends it, and so does `accelerator.end_training()`.

    Raises:
        ValueError: for something that is no Accelerator, one that has a probe already, an optimizer that is not
            prepared, or an option outside its range.
        TypeError: for an option that does not exist.
    """
    if not isinstance(accelerator, Accelerator):
        raise ValueError(f"accelerator must be an accelerate.Accelerator, got {accelerator!r:.80}")
    if is_wrapped(accelerator, "backward"):
        raise ValueError(
            "this accelerator has a probe already: close it first; for several models that are trained side by side, "
            "use sonde.attach for each, with 'with probe.piece():' around its backwards"
        )
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise ValueError(
            "the optimizer is not one that accelerator.prepare has returned: attach after 'model, optimizer = "
            "accelerator.prepare(model, optimizer)', with what it returns"
        )
    if why := why_no_hook(model):
        raise ValueError(f"units are counted in the forwards of the model, and {why}: prepare a module around it")
    warn_if_untested("accelerate", accelerate.__version__, TESTED["accelerate"])
    how = None if units or weight else options.pop("units_per_piece", FIRST_DIM)
    options |= {"unit": unit, "trainer": "Accelerate"}
    guarded = {"units": units, "weight": weight, "log": log, "on_error": on_error, "verbose": verbose}
    return AccelerateProbe(accelerator, model, optimizer, how, clips, options=options, **guarded)


class AccelerateProbe(GuardedProbe):
    """The probe of a loop with Accelerate, as `attach` returns it; `accelerator.end_training()` closes it too."""

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, optimizer: Any, how: Any, clips: bool, **guarded: Any
    ) -> None:
        super().__init__(**guarded)
        self._accelerator, self._model, self._n_logged = accelerator, model, 0
        self.begin(model, optimizer, grad_scaler=accelerator.scaler, units_per_piece=how or self._counts)
        self._clips = clips
        wrappers: dict[str, Any] = {"clip_grad_norm_": self._clip_grad_norm_, "backward": self._backward}
        wrappers |= {"log": self._log, "end_training": self._end_training}
        self.undo.enter_context(WrappedMethods(accelerator, **wrappers))
        self.undo.enter_context(WrappedMethods(optimizer, step=self._step, zero_grad=self._zero_grad))
        self.undo.callback(accelerator.register_save_state_pre_hook(self._save).remove)
        self.undo.callback(accelerator.register_load_state_pre_hook(self._load).remove)

    def _counts(self, *args: Any, **kwargs: Any) -> CountsOfForward:
        """The counts of a micro-batch, by what the model is called with."""
        return CountsOfForward(**self.counts(lambda *a, **k: FIRST_DIM, *args, **kwargs))

    # Wrappers of the accelerator's methods, and of its optimizer's.

    def _backward(self, original: Callable[..., Any], loss: Tensor, **kwargs: Any) -> Any:
        self.log_also(loss=loss.detach())
        return original(loss, **kwargs)

    def _clip_grad_norm_(
        self, original: Callable[..., Any], parameters: Any, max_norm: float, norm_type: float = 2
    ) -> Any:
        if not self._clips:
            return self.watched(original, parameters, max_norm, norm_type)
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        is_whole = {id(p) for p in parameters} == {id(p) for p in self._model.parameters()}
        self._accelerator.unscale_gradients()
        clip = self.clip if is_whole and self._accelerator.sync_gradients else clip_grad_norm_
        return clip(parameters, max_norm, norm_type)

    def _step(self, original: Callable[..., Any], closure: Callable[[], Any] | None = None) -> Any:
        loss = original(closure)  # ends the window, unless a GradScaler leaves it out
        if self._accelerator.sync_gradients:
            self.step()
        return loss

    def _zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """A loop may zero gradients without a step, as where the loss has a spike."""
        if self._accelerator.sync_gradients:  # otherwise Accelerate leaves the gradients as they are
            self.zeroed()
        original(*args, **kwargs)

    def _log(self, original: Callable[..., Any], values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self.n_windows != self._n_logged:
            self._n_logged, values = self.n_windows, {**values, **self.metrics()}
        return original(values, *args, **kwargs)

    def _end_training(self, original: Callable[..., Any]) -> Any:
        self.close("training ended")
        return original()

    # Checkpoints.

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        state = self.averages()
        if state is not None and self._accelerator.is_main_process:
            with self.forgiven("the checkpoint lacks the averages of the noise scale"):
                (Path(folder) / SAVED_AS).write_text(json.dumps(state))

    def _load(self, models: Any, folder: str) -> None:
        file = Path(folder) / SAVED_AS
        if not file.exists():
            logger.warning("sonde: the checkpoint has no %s: the averages of the noise scale begin anew", SAVED_AS)
            return
        with self.forgiven("the averages of the checkpoint are not used, and begin anew"):
            self.resume(json.loads(file.read_text()))
