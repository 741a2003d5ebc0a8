"""What `sonde.measure(curvature=…)` is asked for, and what its log gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sonde.batch_size.stats.one_step import CurvatureReading
from sonde.probe import ReportSection
from sonde.record_values import whole_number
from sonde.stats.columns import Metric
from sonde.wording import count


@dataclass(frozen=True)
class Curvature:
    """How `measure` looks at the curvature of the loss.

    Attributes:
        optimizer: that trains the model, or several in a list: the direction is what its step would be for a batch's
            gradient alone, without momentum and weight decay, and a step size of 1 is its present learning rate. None
            for the plain gradient, whose step size is a learning rate of SGD.
        batches: micro-batches of their own, on each rank; by default those of the measurement, of which an iterator
            gives its first and another iterable is gone through twice.
        sizes: micro-batches of each rank in each batch, ascending.
        draws: of nested batches, each of as many micro-batches as the largest size. One more is drawn, to find steps.
        held_out: micro-batches of each rank at whose loss is looked. They are kept in memory.

    Raises:
        ValueError: for fewer than two sizes, sizes that do not rise, or fewer than 4 draws or held-out batches.

    Example:
        >>> Curvature(draws=2)
        Traceback (most recent call last):
        ValueError: draws must be a whole number from 4 up, got 2: 12 are usual
    """

    optimizer: Any = None
    batches: Any = None
    sizes: Sequence[int] = (1, 3, 9, 27, 81)
    draws: int = 12
    held_out: int = 16

    def __post_init__(self) -> None:
        for name, usual in (("draws", 12), ("held_out", 16)):
            if whole_number(f"{name} must be a whole number", value := getattr(self, name)) < 4:
                raise ValueError(f"{name} must be a whole number from 4 up, got {value}: {usual} are usual")
        rising = all(a < b for a, b in zip((0, *self.sizes), self.sizes, strict=False))
        if len(self.sizes) < 2 or not rising:
            raise ValueError(f"sizes must be two or more rising numbers of micro-batches, got {self.sizes}: (1, 8, 64)")

    @property
    def need(self) -> str:
        """How many micro-batches it takes, in words."""
        n = self.held_out + (self.draws + 1) * self.sizes[-1]
        return f"give {count(n)} on each rank, or ask for fewer by sonde.Curvature(held_out=, draws=, sizes=)"


class CurvatureLog:
    """Metrics of a reading, for a log; `RunLog.measure` takes it.

    Args:
        reading: what is logged.
    """

    SECTION = ReportSection(
        "The noise scale with curvature",
        "B_noise is the batch size at which gradient noise halves the best step and the fall of the loss in one step.",
        ("gns/b_noise", "gns/b_noise_low", "gns/b_noise_high"),
    )

    def __init__(self, reading: CurvatureReading) -> None:
        known, unit = reading.b_noise, reading.unit
        high = None if known.status == "lower_bound" else known.high
        self._values = dict(zip(self.SECTION.metrics, (known.ratio, known.low, high), strict=True))
        meanings = (
            "noise scale with curvature, by single steps",
            "lower end of its 95 % interval; 0 for an upper bound",
            "upper end of its 95 % interval; null without one",
        )
        self.METRICS = {name: Metric(unit, text) for name, text in zip(self._values, meanings, strict=True)}

    def metrics(self) -> dict[str, float | None]:
        """B_noise and its interval."""
        return self._values

    def step(self) -> None:
        """Nothing: the reading is there."""

    def close(self) -> None:
        """Nothing was installed."""
