"""The law of batch sizes, 1 + B_crit/B, and numbers that are known as a range."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sonde.wording import in_units

FEWEST_STEPS = 100
"""Steps of training before a decision: in the first ones the noise scale grows by tens of times."""
FAR = 4.0
"""A batch is far from B_crit from so many times above it, or below it."""
FURTHEST = 64.0
"""No batch is considered so many times above the present one, or below it: the study tried rates up to there."""
_SAME_BATCH = 1.2
"""Batches within this factor count as one."""
_ALIKE = 0.01
"""Units weigh alike if their effective number is smaller than their number by no more than this part."""


@dataclass(frozen=True)
class Range:
    """A number as far as it is known.

    Attributes:
        middle: the best guess; None where only the ends are known.
        low: lower end.
        high: upper end; may be infinite.
    """

    middle: float | None
    low: float
    high: float

    @property
    def likely(self) -> float:
        """The middle; where there is none, the end that is known, or the worse end of a cost."""
        if self.middle is not None:
            return self.middle
        return self.low if math.isinf(self.high) else self.high

    def times(self, factor: float) -> Range:
        """The same in another unit."""
        return Range(None if self.middle is None else self.middle * factor, self.low * factor, self.high * factor)

    def by(self, other: Range) -> Range:
        """Times another number above 0, which is uncertain for reasons of its own."""
        middle = None if self.middle is None or other.middle is None else self.middle * other.middle
        return Range(middle, self.low * other.low, self.high * other.high)

    def over(self, other: Range) -> Range:
        """This over another number above 0, which is uncertain for reasons of its own."""
        return self.by(Range(None if other.middle is None else 1 / other.middle, 1 / other.high, 1 / other.low))

    def of(self, cost: Callable[[float], float]) -> Range:
        """A cost that rises, or falls, with this number everywhere."""
        low, high = sorted((cost(self.low), cost(self.high)))
        return Range(None if self.middle is None else cost(self.middle), low, high)

    def in_words(self, unit: str) -> str:
        """With its unit, such as "38.1 sequences [31.2 – 46.9]" or "more than 120 sequences"."""
        return in_units(self.middle, self.low, self.high, unit)


def exactly(value: float) -> Range:
    """A number that is known."""
    return Range(value, value, value)


@dataclass(frozen=True)
class Tradeoff:
    """Cost of training at one batch size, relative to the least possible.

    Attributes:
        steps: S/S_min, optimizer steps relative to training at an infinite batch.
        examples: E/E_min, units consumed relative to training at an infinitesimal batch.
    """

    steps: float
    examples: float


def steps_and_examples(batch: float, critical_batch: float) -> Tradeoff:
    """The trade-off (S/S_min − 1)(E/E_min − 1) = 1 at a given batch size.

    Args:
        batch: units per optimizer step.
        critical_batch: B_crit in the same units; the noise scale is its usual proxy.

    Returns:
        S/S_min = 1 + B_crit/B and E/E_min = 1 + B/B_crit: both 2 where B = B_crit.

    Raises:
        ValueError: unless both are positive and finite.

    Reference:
        McCandlish et al. 2018, arXiv:1812.06162, equations 2.11 and 5.1.

    Example:
        >>> steps_and_examples(64, 192)
        Tradeoff(steps=4.0, examples=1.3333333333333333)
    """
    if not (0 < batch < math.inf and 0 < critical_batch < math.inf):
        raise ValueError(f"batch and critical_batch must be positive and finite, got {batch} and {critical_batch}")
    return Tradeoff(steps=1 + critical_batch / batch, examples=1 + batch / critical_batch)


def relative_steps(other: float, batch: float, critical_batch: float) -> float:
    """Steps that training takes at another batch size, over those at this one: (1 + B_crit/b′)/(1 + B_crit/b)."""
    if math.isinf(critical_batch):
        return batch / other
    return (1 + critical_batch / other) / (1 + critical_batch / batch)


def as_weighed(batch: float, effective: float | None, unit: str) -> tuple[float, str]:
    """A batch as the noise scale counts it: in effective units, where these are fewer, and the name of what it counts.

    Args:
        batch: units per optimizer step.
        effective: their effective number (Kish); None where it is not known.
        unit: plural name of the unit.
    """
    if effective is None or effective > (1 - _ALIKE) * batch:
        return batch, unit
    return effective, f"effective {unit}"


def are_alike(batch: float, other: float) -> bool:
    """Whether two batches are so near to each other that they count as one."""
    return max(batch, other) <= _SAME_BATCH * min(batch, other)
