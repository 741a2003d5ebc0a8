"""What the batch schedules of all trainers share: when a trainer's accumulation may change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sonde.batch_size.probe import NoiseScaleProbe
from sonde.schedule.batch_schedule import BatchSchedule

COUNTS_STEPS = (
    "{what} counts optimizer steps, and a growing batch takes fewer of them for the same data, so training would end "
    "later, at a rate that was not meant: {instead}"
)
ACCUMULATES = "{} accumulates by itself, by a number that is fixed at the start: train with DDP or FSDP2"


def begun(probe: NoiseScaleProbe | None, refused: Mapping[str, bool], **options: Any) -> BatchSchedule:
    """The schedule of a training that begins.

    Args:
        probe: of the training; None if nothing is measured.
        refused: reasons for which a training cannot be scheduled, and whether each holds.
        **options: of `BatchSchedule`.

    Raises:
        ValueError: with the reason.
    """
    for reason, holds in refused.items():
        if holds:
            raise ValueError(reason)
    if probe is None:
        raise ValueError(
            "the batch cannot follow the noise scale, since this training is not measured: the logger 'sonde' has the "
            "reason; add the probe before the schedule"
        )
    return BatchSchedule(probe, **options)


def check_monotone(options: dict[str, Any]) -> None:
    """Refuse a schedule that may shrink, in a trainer whose epochs would then be cut short.

    Raises:
        ValueError: with what to do.
    """
    if not options.get("monotone", True):
        raise ValueError(
            "monotone=False is for loops of your own: this trainer ends a group of micro-batches by the batches of the "
            "epoch so far, and has fixed the steps of an epoch. Leave out monotone="
        )


def after(n_batches: int, schedule: BatchSchedule) -> int:
    """The micro-batches of the next window, in a trainer that ends windows where the batches of the epoch divide.

    Such a trainer steps at multiples of its accumulation. After a change in between, the next window would be cut
    short: its losses would be divided by another number than it has, and with transformers ranks would step on
    gradients that were not reduced. So the schedule is asked only where the batches so far are a multiple of both.

    Args:
        n_batches: of this epoch so far, on each rank; 0 at its beginning.
        schedule: of the training.
    """
    is_safe = n_batches % schedule.present == n_batches % schedule.larger == 0
    return schedule.micro_batches if is_safe else schedule.present
