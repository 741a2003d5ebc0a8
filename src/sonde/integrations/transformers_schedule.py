"""A batch that follows the noise scale in transformers' Trainer, through its accumulation."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback
from transformers.optimization import GreedyLR

from sonde.integrations.schedules import ACCUMULATES, COUNTS_STEPS, after, begun, check_monotone
from sonde.integrations.transformers import TransformersProbe
from sonde.schedule.batch_schedule import BatchSchedule

_MAX_STEPS = COUNTS_STEPS.format(what="max_steps=", instead="leave out max_steps=, and give num_train_epochs=")
_RESUMED = (
    "this training resumes, and transformers works out where the data go on from its steps times "
    "gradient_accumulation_steps, which is wrong once the batch has grown: begin a training of the data that are left, "
    "with the last gradient_accumulation_steps"
)


def schedule_batch(probe: TransformersProbe, *, largest: int, **options: Any) -> TransformersSchedule:
    """Let the batch of a trainer follow the noise scale. Call it after `attach`, before `trainer.train()`.

    The trainer's `gradient_accumulation_steps` is the smallest number of micro-batches, and grows where that is safe.
    The schedule of the rate keeps its end in examples: a window of twice the smallest batch is two of its steps.
    Steps of the trainer's own, such as those between logs and checkpoints, are optimizer steps.

    Args:
        probe: of the trainer, as `sonde.integrations.transformers.attach` has returned it.
        largest: most micro-batches of a window on each rank.
        **options: others of `sonde.BatchSchedule`.

    Returns:
        The callback that does it; its `schedule` is there from the beginning of training on.

    Raises:
        ValueError: for a schedule that may shrink. When training begins: with `max_steps`, with DeepSpeed, for a
            training that resumes, and as `sonde.BatchSchedule`.

    Example:
        `schedule_batch(sonde.integrations.transformers.attach(trainer), largest=32)`, then `trainer.train()`.
    """
    check_monotone(options)
    return TransformersSchedule(probe, options | {"largest": largest})


class TransformersSchedule(TrainerCallback):  # type: ignore[misc]
    """The batch schedule of a trainer, as `schedule_batch` returns it: already a callback of the trainer."""

    def __init__(self, probe: TransformersProbe, options: dict[str, Any]) -> None:
        self.schedule: BatchSchedule | None = None
        self._probe, self._options = probe, options
        self._n_batches = self._n_before = 0
        probe.trainer.add_callback(self)

    # Events of the trainer, in their order.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin: the probe, whose callback comes before, is attached."""
        trainer = self._probe.trainer
        refused = {
            _MAX_STEPS: args.max_steps > 0,
            _RESUMED: state.global_step > 0,
            ACCUMULATES.format("DeepSpeed"): trainer.is_deepspeed_enabled,
        }
        smallest = args.gradient_accumulation_steps
        self.schedule = begun(self._probe.probe, refused, smallest=smallest, **self._options)
        self.schedule.scale_lr(trainer.optimizer, trainer.lr_scheduler)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The batches of an epoch are counted anew."""
        self._n_batches = self._n_before = 0
        self._change(args)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A micro-batch after which no step is due."""
        self._n_batches += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A micro-batch and its step, after which the trainer has stepped the schedule of the rate once."""
        self._n_batches += 1
        assert self.schedule is not None
        self.schedule.counted = self._n_batches - self._n_before
        trainer, n_due, self._n_before = self._probe.trainer, self.schedule.lr_steps_due(), self._n_batches
        follows_losses = isinstance(trainer.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau | GreedyLR)
        if not follows_losses and not trainer.accelerator.optimizer_step_was_skipped:
            for _ in range(n_due - 1):
                trainer.lr_scheduler.step()
        self._change(args)

    def _change(self, args: Any) -> None:
        assert self.schedule is not None
        args.gradient_accumulation_steps = after(self._n_batches, self.schedule)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the trainer as it was."""
        if self.schedule is not None:
            args.gradient_accumulation_steps = self.schedule.batch_rule.smallest
            self.schedule.close()
