"""A batch that follows the noise scale in a loop with Accelerate, through `accelerator.accumulate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import DistributedType

from sonde.integrations.accelerate import AccelerateProbe
from sonde.integrations.guarded import WrappedMethods
from sonde.integrations.schedules import ACCUMULATES, begun
from sonde.schedule.batch_schedule import BatchSchedule


def schedule_batch(probe: AccelerateProbe, *, largest: int, lr_scheduler: Any = None, **options: Any) -> BatchSchedule:
    """Let the batch of a loop follow the noise scale: one line after `attach`, outside the loop.

    The accelerator's `gradient_accumulation_steps` is the smallest number of micro-batches. It changes between two
    windows, where Accelerate's count of micro-batches begins anew, so that each window is whole. For checkpoints, call
    `accelerator.register_for_checkpointing(schedule)`.

    Args:
        probe: of the loop, as `sonde.integrations.accelerate.attach` has returned it. The loop uses
            `accelerator.accumulate`.
        largest: most micro-batches of a window on each rank.
        lr_scheduler: the schedule of the rate, if there is one, prepared or not: call `schedule.step_lr(lr_scheduler)`
            in place of `lr_scheduler.step()`, which keeps its end in examples.
        **options: others of `sonde.BatchSchedule`.

    Returns:
        The schedule.

    Raises:
        ValueError: with DeepSpeed, and as `sonde.BatchSchedule`, also when a schedule of the rate counts steps.
    """
    accelerator = probe.accelerator
    refused = {ACCUMULATES.format("DeepSpeed"): accelerator.distributed_type == DistributedType.DEEPSPEED}
    smallest = accelerator.gradient_accumulation_steps
    schedule = begun(probe.probe, refused, largest=largest, smallest=smallest, **options)
    schedule.scale_lr(probe.optimizer, lr_scheduler)

    def accumulate(original: Callable[..., Any], *models: Any) -> Any:
        """A micro-batch begins; the first one, and one after a step, begin a window."""
        if schedule.counted is None or accelerator.sync_gradients:
            schedule.counted = 0
            if schedule.micro_batches != accelerator.gradient_accumulation_steps:
                accelerator.gradient_accumulation_steps = schedule.present
                accelerator.step = 0  # windows end at multiples of the number
        schedule.counted += 1
        return original(*models)

    probe.undo.callback(setattr, accelerator, "gradient_accumulation_steps", smallest)
    probe.undo.callback(schedule.close)
    probe.undo.enter_context(WrappedMethods(accelerator, accumulate=accumulate))
    return schedule
