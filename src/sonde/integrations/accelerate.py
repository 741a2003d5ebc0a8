"""The noise scale of a loop with Accelerate."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from sonde.batch_size.batch_dim import UnclearUnitsError
from sonde.batch_size.forward_units import FIRST_DIM, CountsOfForward, ForwardUnits
from sonde.batch_size.module_hook import why_no_hook
from sonde.batch_size.probe import NoiseScaleProbe
from sonde.batch_size.stats.reading import NoiseScaleReading
from sonde.gradient_norm.clip import clip_grad_norm_
from sonde.integrations.on_error import OnError
from sonde.integrations.trainer_probe import Counts, TrainerProbe, as_counts
from sonde.integrations.versions import warn_if_untested
from sonde.integrations.wrapped_methods import WrappedMethods, is_wrapped
from sonde.records import LogOrPlaces, logger
from sonde.version import install_hint

try:
    import accelerate
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise ImportError(f"this needs accelerate: {install_hint('accelerate')}") from error

TESTED = ("1.15", "1.16")
"""The first version that the tests ran with, and the first one above it that they did not."""
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
            meshes, and the log has the share of windows that were clipped.
        log: of the run, the folder for a log of its own, or whatever else `RunLog` takes: "wandb", a function, several.
        on_error: "warn" logs errors of the probe, and training goes on; "raise" raises them, for tests.
        verbose: print the set-up that was found, and the reading at the end, on rank 0.
        **options: others of `sonde.attach`: `groups`, `metric`, `per_example`, `budget`, `allowance`, `every` and
            the like.

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
    warn_if_untested("accelerate", accelerate.__version__, TESTED)
    options["unit"] = unit
    probe = TrainerProbe(
        options,
        units=units,
        weight=weight,
        log=log,
        backward="accelerator.backward(loss)",
        on_error=on_error,
        verbose=verbose,
    )
    return AccelerateProbe(accelerator, model, optimizer, probe, units=units, weight=weight, clips=clips)


class AccelerateProbe:
    """The probe of a loop with Accelerate, as `attach` returns it."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        probe: TrainerProbe,
        *,
        units: Callable[..., Any] | None,
        weight: Callable[..., float | Tensor] | None,
        clips: bool,
    ) -> None:
        self._accelerator, self._model, self._probe = accelerator, model, probe
        self._units, self._weight = units, weight
        self._has_ended = self._has_news = False
        probe.begin(model, optimizer, grad_scaler=accelerator.scaler)
        self._forwards = ForwardUnits(model, self._counts)
        of_accelerator: dict[str, Callable[..., Any]] = {
            "backward": self._backward,
            "log": self._log,
            "end_training": self._end_training,
        }
        if clips:
            of_accelerator["clip_grad_norm_"] = self._clip_grad_norm_
        of_optimizer = {"step": self._step, "zero_grad": self._zero_grad}
        self._wrapped = [WrappedMethods(accelerator, **of_accelerator), WrappedMethods(optimizer, **of_optimizer)]
        self._hooks = [
            accelerator.register_save_state_pre_hook(self._save),
            accelerator.register_load_state_pre_hook(self._load),
        ]

    @property
    def probe(self) -> NoiseScaleProbe | None:
        """The probe while it measures."""
        return self._probe.probe

    def reading(self) -> NoiseScaleReading | None:
        """The present reading, or that of the end; None if nothing is measured."""
        return self._probe.reading()

    def close(self, reason: str = "closed") -> None:
        """End the log, and leave the accelerator and the optimizer as they were."""
        self._probe.end(reason)
        self._forwards.close()
        for wrapped in self._wrapped:
            wrapped.restore()
        for hook in self._hooks:
            hook.remove()

    def _counts(self, *args: Any, **kwargs: Any) -> CountsOfForward:
        """The counts of a micro-batch, by what the model is called with."""
        found: Any = FIRST_DIM if self._units is None else self._units(*args, **kwargs)
        counts = as_counts(found, None if self._weight is None else self._weight(*args, **kwargs))
        return CountsOfForward(**counts)

    def _of_forward(self) -> Counts:
        try:
            counts: CountsOfForward = self._forwards.take()
        except UnclearUnitsError as question:
            raise ValueError(
                f"{question}: pass units= to attach, a function that is called as the model is; add up the losses of "
                "one forward and call accelerator.backward once; or use sonde.attach with 'with "
                "probe.piece(units=…):' around the backwards of a micro-batch, as for several models that are trained "
                "side by side"
            ) from None
        return cast("Counts", vars(counts))

    # Wrappers of the accelerator's methods, and of its optimizer's.

    def _backward(self, original: Callable[..., Any], loss: Tensor, **kwargs: Any) -> Any:
        self._probe.log(loss=loss.detach())
        with self._probe.piece(self._of_forward):
            return original(loss, **kwargs)

    def _clip_grad_norm_(
        self, original: Callable[..., Any], parameters: Any, max_norm: float, norm_type: float = 2
    ) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._accelerator.unscale_gradients()
        is_whole = {id(p) for p in parameters} == {id(p) for p in self._model.parameters()}

        def clip_alone() -> Tensor:
            return clip_grad_norm_(parameters, max_norm, norm_type)

        if not (is_whole and self._accelerator.sync_gradients) or self._has_ended:
            return clip_alone()
        self._has_ended = self._has_news = True
        return self._probe.clip(clip_alone, max_norm, norm_type)

    def _step(self, original: Callable[..., Any], closure: Callable[[], Any] | None = None) -> Any:
        if not self._accelerator.sync_gradients:
            return original(closure) if closure is not None else original()
        if closure is None:
            self._end_window()
            result = original()
        else:
            result = original(self._ending(closure))
        self._has_ended, self._has_news = False, True
        self._forwards.begin_window(is_measured=self.probe is not None and self.probe.measures_now)
        return result

    def _zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """A loop may zero gradients without a step, as where the loss has a spike."""
        if self._accelerator.sync_gradients:  # otherwise Accelerate leaves the gradients as they are
            self._probe.zeroed()
            self._has_ended = False
        original(*args, **kwargs)

    def _ending(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure of a step, which runs the backward. The window ends after it."""

        def then_end() -> Any:
            loss = closure()
            self._end_window()
            self._has_ended = True
            return loss

        return then_end

    def _end_window(self) -> None:
        """End the window, unless the clip has done so."""
        if not self._has_ended:
            self._probe.end_window()

    def _log(self, original: Callable[..., Any], values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self._has_news:
            self._has_news, values = False, {**values, **self._probe.metrics()}
        return original(values, *args, **kwargs)

    def _end_training(self, original: Callable[..., Any]) -> Any:
        self.close("training ended")
        return original()

    # Checkpoints.

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        state = self._probe.state_dict()
        if state is not None and self._accelerator.is_main_process:
            with self._probe.forgiven("the checkpoint lacks the averages of the noise scale"):
                (Path(folder) / SAVED_AS).write_text(json.dumps(state))

    def _load(self, models: Any, folder: str) -> None:
        file = Path(folder) / SAVED_AS
        if file.exists():
            with self._probe.forgiven("the averages of the checkpoint are not used, and begin anew"):
                self._probe.resume(json.loads(file.read_text()))
        else:
            logger.warning("sonde: the checkpoint has no %s: the averages of the noise scale begin anew", SAVED_AS)
