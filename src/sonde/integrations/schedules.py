"""What the batch schedules of all trainers share: when a trainer's accumulation may change, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sonde.batch_size.probe import NoiseScaleProbe
from sonde.schedule.batch_schedule import BatchSchedule

COUNTS_STEPS = "{} counts optimizer steps, of which a growing batch takes fewer, so training would end later: {}"
MAX_STEPS = COUNTS_STEPS.format("max_steps=", "leave it out, and give the number of epochs")
ACCUMULATES = "{} accumulates by itself, by a number that is fixed at the start: train with DDP or FSDP2"
SHRINKS = "monotone=False is for loops of your own: this trainer has fixed the steps of an epoch, so leave it out"
_NOT_MEASURED = "this training is not measured, so its batch cannot follow its noise scale: the logger 'sonde' says why"


def begun(probe: NoiseScaleProbe | None, refused: Mapping[str, bool], **options: Any) -> BatchSchedule:
    """The schedule of a training that begins.

    Args:
        probe: of the training; None if nothing is measured.
        refused: reasons for which a training cannot be scheduled, and whether each holds.
        **options: of `BatchSchedule`.

    Raises:
        ValueError: with the reason.
    """
    if reason := next((reason for reason, holds in refused.items() if holds), "" if probe else _NOT_MEASURED):
        raise ValueError(reason)
    assert probe is not None
    return BatchSchedule(probe, **options)


def further_lr_steps(schedule: BatchSchedule) -> int:
    """Steps of the schedule of the rate that are due after a micro-batch, beside the one that the trainer has taken."""
    schedule.counted = (schedule.counted or 0) + 1
    if n_due := schedule.lr_steps_due():
        schedule.counted = 0
    return max(n_due - 1, 0)


def after(n_batches: int, schedule: BatchSchedule) -> int:
    """The micro-batches of the next window, in a trainer that ends windows where the batches of the epoch divide.

    Such a trainer steps at multiples of its accumulation. After a change in between, the next window would be cut
    short: its losses would be divided by another number than it has, and with transformers ranks would step on
    gradients that were not reduced. So the schedule is asked only where the batches so far are a multiple of both.

    Args:
        n_batches: of this epoch so far, on each rank; 0 at its beginning.
        schedule: of the training.
    """
    n = schedule.present
    larger = min((each for each in schedule.batch_rule.allowed if each > n), default=n)
    return schedule.micro_batches if n_batches % n == n_batches % larger == 0 else n
