"""A batch that follows the noise scale in transformers' Trainer, through its accumulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from sonde.integrations.guarded import WrappedMethods
from sonde.integrations.schedules import ACCUMULATES, MAX_STEPS, SHRINKS, after, begun, further_lr_steps
from sonde.integrations.transformers import TransformersProbe
from sonde.schedule.batch_schedule import BatchSchedule, follows_loss

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
        ValueError: when training begins: with `max_steps`, with DeepSpeed, for a schedule that may shrink, for a
            training that resumes, and as `sonde.BatchSchedule`.

    Example:
        `schedule_batch(sonde.integrations.transformers.attach(trainer), largest=32)`, then `trainer.train()`.
    """
    return TransformersSchedule(probe, options | {"largest": largest})


class TransformersSchedule(TrainerCallback):  # type: ignore[misc]
    """The batch schedule of a trainer, as `schedule_batch` returns it: already a callback of the trainer."""

    def __init__(self, probe: TransformersProbe, options: dict[str, Any]) -> None:
        self.schedule: BatchSchedule | None = None
        self._probe, self._options, self._n_batches = probe, options, 0
        probe.trainer.add_callback(self)
        probe.undo.callback(probe.trainer.remove_callback, self)
        probe.undo.enter_context(WrappedMethods(probe.trainer, train=self._train))

    def _train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Leave the trainer as it was, also after a training that raises."""
        own, smallest = self._probe.trainer.args, self._probe.trainer.args.gradient_accumulation_steps
        try:
            return original(*args, **kwargs)
        finally:
            own.gradient_accumulation_steps = smallest
            if self.schedule is not None:
                self.schedule.close()

    # Events of the trainer, in their order.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin: the probe, whose callback comes before, is attached."""
        trainer = self._probe.trainer
        refused = {
            MAX_STEPS: args.max_steps > 0,
            SHRINKS: not self._options.get("monotone", True),
            _RESUMED: state.global_step > 0,
            ACCUMULATES.format("DeepSpeed"): trainer.is_deepspeed_enabled,
        }
        smallest = args.gradient_accumulation_steps
        self.schedule = begun(self._probe.probe, refused, smallest=smallest, **self._options)
        self.schedule.scale_lr(trainer.optimizer, trainer.lr_scheduler)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The batches of an epoch are counted anew."""
        self._change(args, 0)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A micro-batch after which no step is due: it is counted."""
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A micro-batch, and perhaps its step, after which the trainer has stepped the schedule of the rate once."""
        assert self.schedule is not None
        trainer, n = self._probe.trainer, further_lr_steps(self.schedule)
        if not follows_loss(trainer.lr_scheduler) and not trainer.accelerator.optimizer_step_was_skipped:
            for _ in range(n):
                trainer.lr_scheduler.step()
        self._change(args, self._n_batches + 1)

    def _change(self, args: Any, n_batches: int) -> None:
        """Take the schedule's next number, after so many batches of the epoch."""
        assert self.schedule is not None
        self._n_batches = n_batches
        args.gradient_accumulation_steps = after(n_batches, self.schedule)
