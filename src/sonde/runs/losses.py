"""Which of the values that a user logged is the loss, and its last value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sonde.runs.run import PolicyReading, Reading, Run

_RECENT = 1000
"""Readings in which a loss is looked for, from the last one back."""


def is_held_out(name: str) -> bool:
    """Whether a value is of data that is not trained on, by its name."""
    return name.lower().startswith(("eval", "val", "test", "held"))


def losses_first(names: Iterable[str]) -> list[str]:
    """Names of a user's values: held-out losses, then other losses, then the rest."""
    return sorted(names, key=lambda name: ("loss" not in name.lower(), not is_held_out(name)))


@dataclass(frozen=True)
class LastLoss:
    """The last value of a loss.

    Attributes:
        name: as the user logged it.
        value: the mean since the reading before.
        reading: that holds it.
    """

    name: str
    value: float
    reading: Reading | PolicyReading


def last_loss(run: Run) -> LastLoss | None:
    """The last held-out loss of a run; its last training loss if there is none; None if there is neither."""
    recent: list[Reading | PolicyReading] = [*run.policy[-_RECENT:], *run.readings[-_RECENT:]]
    last = {name: reading for reading in recent for name, value in reading.metrics.items() if value is not None}
    names = [name for name in last.keys() - run.metrics.keys() if "loss" in name.lower()]
    if not names:
        return None
    name = losses_first(sorted(names))[0]
    return LastLoss(name, last[name].metrics[name] or 0.0, last[name])
