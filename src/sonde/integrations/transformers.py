"""The noise scale of a run of transformers' Trainer, or TRL's SFTTrainer and DPOTrainer, in the trainer's own logs."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from sonde.integrations.guarded import (
    Counts,
    GuardedProbe,
    OnError,
    WrappedMethods,
    warn_if_untested,
)
from sonde.records import LogOrPlaces
from sonde.version import TESTED, install_hint

try:
    import transformers
    from transformers import Trainer, TrainerCallback

    from sonde.integrations.transformers_batches import MicroBatches, UnitsOfBatch, WeightOfBatch
except ImportError as error:
    raise ImportError(f"this needs transformers: {install_hint('transformers')}") from error

SAVED_AS = "sonde_noise_scale"
"""The entry of `TrainerState.stateful_callbacks` with the averages. transformers saves that mapping with a checkpoint.
No callback has this name, so transformers restores no callback from the entry."""


def attach(
    trainer: Trainer,
    *,
    unit: str | Sequence[str] | None = None,
    units: UnitsOfBatch | None = None,
    weight: WeightOfBatch | None = None,
    log: LogOrPlaces = None,
    on_error: OnError = "warn",
    verbose: bool = True,
    **options: Any,
) -> TransformersProbe:
    """Measure the gradient noise scale of a trainer's run. Call it before `trainer.train()`.

    Weights are bit for bit those of a run without it. The probe is attached when training begins, and reads each
    `training_step` as a piece. Sequences are weighed by their loss tokens, and so are pieces where the loss is divided
    by the tokens of the whole window. The trainer's own logs have the headline's metrics, so `log_history` and every
    reporter have them. A training that resumes from a checkpoint goes on with its averages.

    Args:
        trainer: a `Trainer`, `SFTTrainer` or `DPOTrainer`; a trainer of your own whose batches have one row per unit.
        unit: plural name of the independent sample; by default "sequences" (also of packed documents), "pairs" for
            preferences, or "examples" where the model does not read tokens. Several names need `units`.
        units: called with each batch of a measured window, if its rows or packed documents are not the units. It
            returns their number, the weight of each in the batch's loss, [units], or a number for each name.
        weight: called with each batch of a measured window, it returns the batch's weight in the loss. By default, the
            graph of the first loss shows whether batches weigh by their loss tokens or all the same.
        log: of the run, the folder for a log of its own, or whatever else `RunLog` takes: "wandb", a function, several.
        on_error: "warn" logs errors of the probe, and training goes on; "raise" raises them, for tests.
        verbose: print the set-up that was found, and the reading at the end, on rank 0.
        **options: others of `sonde.attach`: `groups`, `metric`, `per_example`, `budget`, `allowance`, `every` and
            the like.

    Returns:
        The callback that measures; `reading()` is the present reading.

    Raises:
        ValueError: for something that is no trainer, one that has a probe already, a GRPOTrainer, another trainer of
            TRL without `units`, or an option outside its range.
        TypeError: for an option that does not exist.

    Example:
        `sonde.integrations.transformers.attach(trainer, log="runs/my-run")`, then `trainer.train()`.
    """
    if not isinstance(trainer, Trainer):
        raise ValueError(f"trainer must be a transformers.Trainer, got {trainer!r:.80}: pass the object that trains")
    if any(isinstance(callback, TransformersProbe) for callback in trainer.callback_handler.callbacks):
        raise ValueError("this trainer has a probe already: attach once, or close the first")
    warn_if_untested("transformers", transformers.__version__, TESTED["transformers"])
    batches = MicroBatches(trainer, units, weight)
    if batches.is_trl_trainer:
        warn_if_untested("trl", importlib.metadata.version("trl"), TESTED["trl"])
    if batches.has_pairs:
        options.setdefault("per_example", "never")  # a pair has two rows, and each row's gradient is a part of its own
    options |= {"unit": unit or batches.unit, "trainer": batches.trainer_name}
    guarded = {"units": units, "weight": weight, "log": log, "on_error": on_error, "verbose": verbose}
    return TransformersProbe(trainer, batches, options, **guarded)


class TransformersProbe(GuardedProbe, TrainerCallback):  # type: ignore[misc]
    """The probe of a trainer, as `attach` returns it: already a callback of the trainer."""

    def __init__(self, trainer: Trainer, batches: MicroBatches, options: Mapping[str, Any], **guarded: Any) -> None:
        super().__init__(options, **guarded)
        self._trainer: Any = trainer
        self._batches: Any = batches
        self.backward = "self.accelerator.backward(loss)"
        self.reads_parts = True  # the trainer logs item() of the norm
        methods: dict[str, Any] = {"train": self.train, "training_step": self._training_step, "log": self._log}
        methods["_save_checkpoint"] = self._save_checkpoint
        self.undo.enter_context(WrappedMethods(trainer, **methods))
        self.undo.enter_context(WrappedMethods(trainer.accelerator, clip_grad_norm_=self.watched))
        self.undo.callback(trainer.pop_callback, self)
        trainer.add_callback(self)

    # Wrappers of the trainer's methods.

    def _training_step(
        self, original: Callable[..., Any], model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> Any:
        """The first backward begins the piece, since its loss shows how it is normalised."""
        inputs_of_piece, piece = dict(inputs), contextlib.ExitStack()  # a loss may take some of the inputs out

        def backward(original: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            piece.enter_context(self.piece(lambda: self._count(inputs_of_piece, loss, num_items_in_batch)))
            return original(loss, *args, **kwargs)

        with WrappedMethods(self._trainer.accelerator, backward=backward), piece:
            return original(model, inputs, num_items_in_batch)

    def _count(self, inputs: Mapping[str, Any], loss: Tensor, n_items: Any) -> Counts:
        counts: Counts = self._batches.count(inputs, loss, n_items)
        if self._batches.weighting is not None:
            self.say_once(self._batches.weighting)
        return counts

    def _log(self, original: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        self.log_also(**{name: logs[name] for name in ("loss", "learning_rate", "eval_loss") if name in logs})
        if "loss" in logs:  # not of an evaluation, nor the summary at the end
            logs = {**logs, **self.metrics()}
        return original(logs, *args, **kwargs)

    def _save_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Add the averages to the trainer's state. A callback after this one may have asked for the checkpoint."""
        if (averages := self.averages()) is not None:
            self._trainer.state.stateful_callbacks[SAVED_AS] = averages
        return original(*args, **kwargs)

    # Events of the trainer, in their order.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach: the model has its wrapper, and the optimizer exists."""
        trainer, averages = self._trainer, state.stateful_callbacks.get(SAVED_AS)
        scaler = trainer.accelerator.scaler
        self.begin(trainer.model_wrapped, trainer.optimizer, state=averages, grad_scaler=scaler)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the window: gradients are whole, and clipped."""
        self.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the log."""
        is_whole = state.global_step >= state.max_steps
        self.end("training ended" if is_whole else f"stopped at step {state.global_step} of {state.max_steps}")
