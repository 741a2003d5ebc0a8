"""How many intervals of a run's forecasts held the truth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from sonde.policy.stats.forecast_point import Point

LEVEL = 0.95
"""Of the intervals that are judged."""
_Z = 1.959964


@dataclass(frozen=True)
class Coverage:
    """How many intervals held the truth.

    Attributes:
        n: forecasts that were to be trusted and whose truth was measured on other responses.
        n_held: those whose interval held it.
        low: lower end of the 95 % interval of the share that hold; 0 without forecasts.
        high: upper end; 1 without.
    """

    n: int
    n_held: int
    low: float
    high: float

    @classmethod
    def of(cls, n: int, n_held: int) -> Self:
        """With Wilson's interval (1927): the shares that n_held of n does not contradict."""
        if not n:
            return cls(0, 0, 0.0, 1.0)
        centre = (n_held + _Z**2 / 2) / (n + _Z**2)
        half = _Z / (n + _Z**2) * math.sqrt(n_held * (n - n_held) / n + _Z**2 / 4)
        return cls(n, n_held, max(centre - half, 0.0), min(centre + half, 1.0))

    @property
    def fraction(self) -> float:
        """n_held over n; NaN without forecasts."""
        return self.n_held / self.n if self.n else math.nan


def coverage(points: Sequence[Point]) -> Coverage:
    """Of the forecasts so far.

    Example:
        >>> held = Point(1, 1.0, -0.02, -0.03, -0.01, True, -0.025, 0.001, True)
        >>> coverage([held, held]).n_held
        2
    """
    judged = [p for p in points if p.is_valid and p.is_independent and p.has_truth]
    return Coverage.of(len(judged), sum(p.held for p in judged))
