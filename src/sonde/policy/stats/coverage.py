"""How many of a run's forecast intervals held the truth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from sonde.policy.stats.forecast_point import Point, Z


@dataclass(frozen=True)
class Coverage:
    """How many intervals held the truth.

    Attributes:
        n: number of forecasts that were to be trusted and whose truth was measured on fresh rollouts.
        n_held: number of these whose interval held the truth.
        low: lower end of the 95 % interval of the true share; 0 without forecasts.
        high: upper end; 1 without forecasts.
    """

    n: int
    n_held: int
    low: float
    high: float

    @classmethod
    def of(cls, n: int, n_held: int) -> Self:
        """Coverage with Wilson's interval (1927): the true shares that `n_held` out of `n` does not contradict."""
        if not n:
            return cls(0, 0, 0.0, 1.0)
        centre = (n_held + Z**2 / 2) / (n + Z**2)
        half = Z / (n + Z**2) * math.sqrt(n_held * (n - n_held) / n + Z**2 / 4)
        return cls(n, n_held, max(centre - half, 0.0), min(centre + half, 1.0))

    @property
    def fraction(self) -> float | None:
        """n_held over n; None without forecasts."""
        return self.n_held / self.n if self.n else None


def coverage(points: Sequence[Point]) -> Coverage:
    """Coverage of the forecasts so far.

    Example:
        >>> held = Point(1, 1.0, -0.02, -0.03, -0.01, True, -0.025, 0.001, True)
        >>> coverage([held, held]).n_held
        2
    """
    judged = [p for p in points if is_judged(p)]
    return Coverage.of(len(judged), sum(p.held for p in judged))


def is_judged(point: Point) -> bool:
    """Whether a forecast was to be trusted and its truth was measured on fresh rollouts."""
    return point.is_valid and point.is_independent and point.has_truth
