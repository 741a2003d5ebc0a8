"""Exponential averages of two numbers over windows, and the interval of their ratio."""

from __future__ import annotations

import math

from sonde.stats.intervals import TOO_FEW_WINDOWS, RatioInterval, fieller_interval
from sonde.stats.sealed_state import Stateful


class RatioAverage(Stateful):
    """Exponential averages of two numbers, kept apart, with the covariance that their ratio's interval needs.

    The window before last counts 1 − 1/horizon times as much as the last one. The averages are normalised by the
    weights seen so far, so they are unbiased from the first window on, and they are not clamped.

    Args:
        horizon: length of the average, in windows; `math.inf` for the plain average.
    """

    STATE = ("windows", "weight", "_sq_weight", "x", "y", "_xx", "_xy", "_yy")

    def __init__(self, horizon: float = 100.0) -> None:
        if not horizon > 1:
            raise ValueError(f"horizon must be more than 1 window, got {horizon}: use 100, or math.inf to average all")
        self._decay = 1.0 - 1.0 / horizon
        self.windows = 0
        self.weight = self._sq_weight = 0.0
        """Σ d^i and Σ d^2i, of the windows' weights."""
        self.x = self.y = 0.0
        self._xx = self._xy = self._yy = 0.0  # weighted sums of products of deviations from the means

    def update(self, x: float, y: float = 1.0) -> None:
        """Add one window.

        Raises:
            ValueError: when it is not finite: one such value would stay in the average for ever.
        """
        if not (math.isfinite(x) and math.isfinite(y)):
            raise ValueError(f"a window must be finite to be averaged, got {x} and {y}: drop it and count it")
        decay, old = self._decay, self._decay * self.weight
        self.weight, self._sq_weight, self.windows = old + 1.0, decay**2 * self._sq_weight + 1.0, self.windows + 1
        # West's update for weighted moments: stable where Σx² − (Σx)² would cancel.
        dx, dy, gain = x - self.x, y - self.y, old / self.weight
        self._xx = decay * self._xx + gain * dx * dx
        self._xy = decay * self._xy + gain * dx * dy
        self._yy = decay * self._yy + gain * dy * dy
        self.x += dx / self.weight
        self.y += dy / self.weight

    @property
    def effective_windows(self) -> float:
        """1/Σω² for the weights ω of the average: how many equally weighted windows it is worth."""
        return self.weight**2 / self._sq_weight if self.windows else 0.0

    @property
    def error_of_x(self) -> float:
        """Standard error of the mean of x, from the scatter of the windows."""
        return math.sqrt(self._xx / self.weight / self.effective_windows) if self.windows else math.inf

    @property
    def standard_errors(self) -> float:
        """The mean of x over its standard error, if x has the variance 1 in each window."""
        return self.x * self.weight / math.sqrt(self._sq_weight) if self.windows else 0.0

    def interval(self, level: float = 0.95) -> RatioInterval:
        """Fieller's interval for the ratio of x to y; with fewer than 2 effective windows it is unresolved."""
        n = self.effective_windows
        if n < 2:
            return TOO_FEW_WINDOWS
        # Unbiased for weights of unit sum: Σω(x−x̄)²/(1−Σω²); the mean's variance is Σω² times that.
        of_mean = 1.0 / (self.weight * (n - 1.0))
        return fieller_interval(
            self.x,
            self.y,
            var_numerator=self._xx * of_mean,
            var_denominator=self._yy * of_mean,
            covariance=self._xy * of_mean,
            n_samples=n,
            level=level,
        )
