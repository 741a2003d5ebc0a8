"""A batch that follows the noise scale in Lightning's Trainer, through its accumulation."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from sonde.integrations import schedules
from sonde.integrations.lightning import NoiseScale
from sonde.schedule.batch_schedule import BatchSchedule

_FREQUENCY = schedules.COUNTS_STEPS.format(
    "a schedule of the rate with interval 'step' and a frequency above 1", "use frequency 1, or interval 'epoch'"
)
_MANUAL = "the module optimizes manually, so the Trainer accumulates nothing: use sonde.BatchSchedule in training_step"
_SCHEDULER = "GradientAccumulationScheduler sets the accumulation in each epoch: leave it out"


def schedule_batch(noise: NoiseScale, *, largest: int, **options: Any) -> LightningSchedule:
    """Let the batch follow the noise scale: `callbacks=[noise := NoiseScale(), schedule_batch(noise, largest=32)]`.

    The Trainer's `accumulate_grad_batches` is the smallest number of micro-batches, and grows where that is safe. A
    schedule of the rate with interval "step" keeps its end in examples: a window of twice the smallest batch is two of
    its steps. Checkpoints hold where the schedule stands, and a training that resumes goes on from there.

    Args:
        noise: the callback that measures; it stands before this one.
        largest: most micro-batches of a window on each rank.
        **options: others of `sonde.BatchSchedule`.

    Returns:
        The callback that does it; its `schedule` is there from the beginning of training on.

    Raises:
        ValueError: when training starts: for a schedule that may shrink, with `max_steps`, manual optimization, a
            strategy or another callback that accumulates, and as `sonde.BatchSchedule`.
    """
    return LightningSchedule(noise, options | {"largest": largest})


class LightningSchedule(Callback):  # type: ignore[misc]
    """The batch schedule of a Trainer, as `schedule_batch` returns it."""

    def __init__(self, noise: NoiseScale, options: dict[str, Any]) -> None:
        self.schedule: BatchSchedule | None = None
        self._noise, self._options, self._saved = noise, options, None

    # Hooks of Lightning, in their order.

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin: the probe, whose callback comes before, is attached."""
        configs = trainer.lr_scheduler_configs
        refused = {
            schedules.MAX_STEPS: trainer.max_steps != -1,
            schedules.SHRINKS: not self._options.get("monotone", True),
            _MANUAL: not pl_module.automatic_optimization,
            schedules.ACCUMULATES.format("this strategy"): trainer.strategy.handles_gradient_accumulation,
            _SCHEDULER: any(isinstance(each, GradientAccumulationScheduler) for each in trainer.callbacks),
            _FREQUENCY: any(each.interval == "step" and each.frequency > 1 for each in configs),
        }
        smallest = trainer.accumulate_grad_batches
        self.schedule = schedules.begun(self._noise.probe, refused, smallest=smallest, **self._options)
        self.schedule.scale_lr(trainer.optimizers[0], configs[0].scheduler if configs else None)
        saved, self._saved = self._saved, None  # of this training's checkpoint: a later one may have none
        if saved is not None:
            self.schedule.load_state_dict(saved)
            trainer.accumulate_grad_batches = self.schedule.present

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The batches of an epoch are counted anew."""
        self._change(trainer, trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a step, the Trainer has stepped the schedules of the rate once."""
        assert self.schedule is not None
        for _ in range(schedules.further_lr_steps(self.schedule)):
            for config in trainer.lr_scheduler_configs:
                if config.interval == "step" and not config.reduce_on_plateau:
                    pl_module.lr_scheduler_step(config.scheduler, None)
        self._change(trainer, batch_idx + 1)

    def _change(self, trainer: Trainer, n_batches: int) -> None:
        assert self.schedule is not None
        trainer.accumulate_grad_batches = schedules.after(n_batches, self.schedule)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the Trainer as it was."""
        if self.schedule is not None:
            trainer.accumulate_grad_batches = self.schedule.batch_rule.smallest
            self.schedule.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Likewise."""
        self.on_train_end(trainer, pl_module)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule stands."""
        return {} if self.schedule is None else {"schedule": self.schedule.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there when training starts."""
        self._saved = state_dict.get("schedule")
