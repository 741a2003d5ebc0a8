"""A batch that follows the noise scale in a loop with Accelerate, through `accelerator.accumulate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import DistributedType

from sonde.integrations.accelerate import AccelerateProbe
from sonde.integrations.guarded import WrappedMethods
from sonde.integrations.schedules import begun
from sonde.schedule.batch_schedule import BatchSchedule

_DEEPSPEED = (
    "DeepSpeed accumulates by itself, by a number that is fixed at the start: prepare the model for DDP or FSDP2"
)


def schedule_batch(probe: AccelerateProbe, *, largest: int, lr_scheduler: Any = None, **options: Any) -> BatchSchedule:
    """Let the batch of a loop follow the noise scale: one line after `attach`, outside the loop.

    The accelerator's `gradient_accumulation_steps` is the smallest number of micro-batches. It changes right after a
    step, and Accelerate's count of micro-batches begins anew there, so that each window is whole.

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
    accelerator, optimizer = probe.accelerator, probe.optimizer
    refused = _DEEPSPEED if accelerator.distributed_type == DistributedType.DEEPSPEED else ""
    smallest = accelerator.gradient_accumulation_steps
    schedule = begun(probe.probe, refused, largest=largest, smallest=smallest, **options)
    schedule.scale_lr(optimizer, lr_scheduler)

    def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if accelerator.sync_gradients and schedule.micro_batches != accelerator.gradient_accumulation_steps:
            accelerator.gradient_accumulation_steps = schedule.present
            accelerator.step = 0  # windows end at multiples of it
        return result

    probe.undo.enter_context(WrappedMethods(optimizer, step=step))
    probe.undo.callback(schedule.close)
    return schedule
