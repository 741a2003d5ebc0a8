"""The noise scale of a run of Lightning's Trainer, as a callback."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from sonde.batch_size.batch_dim import units_in_batch
from sonde.integrations.guarded import GuardedProbe, OnError, warn_if_untested
from sonde.records import LogOrPlaces
from sonde.version import TESTED, install_hint

try:
    import lightning
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(f"this needs lightning: {install_hint('lightning')}") from error


class NoiseScale(GuardedProbe, Callback):  # type: ignore[misc]
    """Measures the gradient noise scale of a Lightning run: `L.Trainer(callbacks=[NoiseScale(unit="images")])`.

    Weights are bit for bit those of a run without it, with automatic and with manual optimization. The probe is
    attached when training starts. Each batch is a piece, and each optimizer step ends a window. The trainer's loggers
    have the headline's metrics every `log_every_n_steps`. Checkpoints hold the averages, and a training that resumes
    goes on with them.

    Args:
        unit: plural name of the independent sample. Several names need `units`.
        units: called with each batch of a measured window, it returns the number of units, the weight of each in the
            batch's loss, [units], or a number for each name; by default dim 0 of its tensors, where they
            agree, so pass it if that is time.
        weight: called with each batch, it returns the batch's weight in the loss. By default, batches weigh the same,
            as means of batches do.
        log: of the run, the folder for a log of its own, or whatever else `RunLog` takes: "wandb", a function, several.
        on_error: "warn" logs errors of the probe, and training goes on; "raise" raises them, for tests.
        verbose: print the set-up that was found, and the reading at the end, on rank 0.
        **options: others of `sonde.attach`: `groups`, `metric`, `per_example`, `budget`, `allowance`, `every` and
            the like.

    Raises:
        ValueError: for an option outside its range.
        TypeError: for an option that does not exist.
    """

    def __init__(
        self,
        *,
        unit: str | Sequence[str] = "examples",
        units: Callable[[Any], Any] | None = None,
        weight: Callable[[Any], float | Tensor] | None = None,
        log: LogOrPlaces = None,
        on_error: OnError = "warn",
        verbose: bool = True,
        **options: Any,
    ) -> None:
        warn_if_untested("lightning", lightning.__version__, TESTED["lightning"])
        options |= {"unit": unit, "trainer": "Lightning"}
        super().__init__(options, units=units, weight=weight, log=log, on_error=on_error, verbose=verbose)
        self._saved: Any = None
        self._batch: Any = None
        self._piece, self._norms = contextlib.ExitStack(), contextlib.ExitStack()
        self._has_stepped, self._n_before = False, 0

    # Hooks of Lightning, in their order.

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the model in its wrapper."""
        refused, loaders = "", trainer.train_dataloader
        if self.units is None and isinstance(loaders, Mapping | list | tuple) and len(loaders) > 1:
            refused = (
                f"each batch comes from {len(loaders)} dataloaders, so its rows do not show all of its units: "
                "pass units= to NoiseScale, a function of the batch"
            )
        elif len(trainer.optimizers) != 1:
            refused = (
                f"the module has {len(trainer.optimizers)} optimizers, and steps of one are the windows: train with "
                "one, or optimize manually with sonde.attach(part, its optimizer, units_per_piece='first dim') for the "
                "part that each of them steps, and with step() of that probe before the optimizer's"
            )
        self.backward = None if pl_module.automatic_optimization else "self.manual_backward(loss)"
        state, self._saved = self._saved, None  # of this training's checkpoint: a later one may have none
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.begin(trainer.model, trainer.optimizers, state=state, refused=refused, grad_scaler=scaler)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the batch, whose units are counted if its window is measured."""
        self._batch, self._has_stepped = batch, False
        self._norms.enter_context(self.watch_norms())

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Begin the piece, which further backwards of the same batch join."""
        self._piece.enter_context(self.piece(lambda: self.counts(_rows, self._batch)))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """End the piece, whose backward ran in the optimizer's closure: gradients are unscaled.

        Where Lightning clips by the norm, that comes next, and the optimizer's step ends the window. Other ways to clip
        change the direction of the gradient, so the window ends before.
        """
        self._piece.close()
        self._has_stepped, self._n_before = True, self.n_windows
        is_own = type(pl_module).configure_gradient_clipping is not LightningModule.configure_gradient_clipping
        if is_own or trainer.gradient_clip_algorithm == "value" or not pl_module.automatic_optimization:
            self.step()
            self._norms.close()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the piece of a batch without a step; after steps, log."""
        self._piece.close()
        self._norms.close()
        if self._has_stepped and self.n_windows == self._n_before:  # a GradScaler has left the step out
            self.step()
        if isinstance(outputs, Mapping) and isinstance(loss := outputs.get("loss"), Tensor):
            self.log_also(loss=loss * trainer.accumulate_grad_batches)  # Lightning has divided it
        self._batch = None
        every = trainer.log_every_n_steps  # 0 for a Trainer that never logs
        if self._has_stepped and every and trainer.global_step % every == 0:
            pl_module.log_dict(self.metrics())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what the validation has logged, by names such as val_loss."""
        validated = {name: value for name, value in trainer.callback_metrics.items() if name.startswith("val")}
        self.log_also(**validated)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the log."""
        self.end("training ended")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the log, without waiting for ranks that may be gone."""
        self._piece.__exit__(type(exception), exception, None)  # the backward of this piece may have failed
        self._norms.close()
        self.fail(exception)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The averages so far."""
        return {} if (averages := self.averages()) is None else {"averages": averages}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with these averages when training starts."""
        self._saved = state_dict.get("averages")


def _rows(batch: Any) -> int:
    return units_in_batch(batch, "pass units= to NoiseScale, a function of the batch")
