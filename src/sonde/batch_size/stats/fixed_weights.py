"""The noise scale of a model that does not train: plain averages over windows, in place of a filter.

At fixed weights every window has the same expectation, so all windows together are averaged. Window i holds M_i units
and gives unbiased estimates x_i of tr Σ and y_i of |G|², with

    var y_i = 4 GᵀΣG/M_i + 2 tr(Σ²)/M_i²

The first term does not depend on how the units are divided into windows. The second falls as windows grow. It comes
from comparing units with the units of the same window alone. So windows grow (`window_lengths`), and ω_i = M_i/ΣM.
Fieller's interval takes the covariance of the two averages from the scatter of the windows, whatever variance each has:

    V = Σ ω_i² r_i r_iᵀ/(1 − ω_i)        r_i = (x_i, y_i) − (x̄, ȳ)

which is unbiased where var ∝ 1/M, since r_i then has 1 − ω_i of the variance of window i.

Reference:
    E. C. Fieller, "Some problems in interval estimation", J. R. Stat. Soc. B 16 (1954) 175–185.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sonde.batch_size.stats.critical_batch import BARELY_KNOWN, GUESSED, WELL_KNOWN, Estimate, windows_needed
from sonde.batch_size.stats.filter import on_host
from sonde.batch_size.stats.reading import GroupReading, Series, group_reading
from sonde.batch_size.stats.window_row import SolvedWindow
from sonde.stats.intervals import TOO_FEW_WINDOWS, RatioInterval, fieller_interval, unresolved
from sonde.wording import number

_MIN_WINDOWS = 4
"""Fewest windows that give an interval."""


def window_lengths(n_ranks: int, *, longest: float = math.inf) -> Iterator[int]:
    """Pieces of each window on each rank, in turn, so that windows have 2, 4, 6, 8, … pieces on all ranks together.

    After m pieces there are about √m windows, the last of them of 2 √m pieces, whatever m will be. More windows would
    compare fewer pieces with each other, and fewer windows would leave the error of the averages poorly known.

    Args:
        n_ranks: that measure together; where they do not divide a window, it has a few more pieces.
        longest: most pieces of a window on a rank.

    Example:
        >>> import itertools
        >>> list(itertools.islice(window_lengths(1), 5)), list(itertools.islice(window_lengths(3), 5))
        ([2, 4, 6, 8, 10], [1, 2, 2, 3, 4])
    """
    for n in itertools.count(1):
        yield int(min(-(-2 * n // n_ranks), longest))


class FixedWeights:
    """The windows of one and the same model.

    Args:
        batch: the batch size that the reading is to judge, in units: windows are as long as the measurement needs, and
            have nothing to do with it. None for no verdict.
    """

    def __init__(self, batch: float | None = None) -> None:
        self.batch = batch
        self._units: list[float] = []
        self._estimates: list[Tensor] = []
        """tr Σ and |G|² of the model and of each group, of the mean gradient; [windows], each [2, 1 + groups]."""

    def add(self, window: SolvedWindow, *, weight: float) -> None:
        """Add a window.

        Args:
            window: its estimates.
            weight: of its pieces, averaged over ranks: its gradient is their sum, and here it becomes their mean, since
                windows differ in length.
        """
        self._units.append(window.effective_units)
        self._estimates.append(window.estimates / weight**2)

    @property
    def n_windows(self) -> int:
        """Windows so far."""
        return len(self._units)

    def total(self) -> GroupReading:
        """The noise scale of the whole model, whatever doubts there are."""
        return group_reading(*self.series(0)[0])

    def series(self, n_groups: int) -> list[Series]:
        """The averages of the whole model and, after it, of each group."""
        if not self._units:
            return [(unresolved("no window has ended yet"), None, None)] * (1 + n_groups)
        units = on_host(self._units)
        table = torch.stack(self._estimates)  # [windows, 2, 1 + groups]
        return [_average(table[:, :, i], units / units.sum()) for i in range(1 + n_groups)]

    def facts(self, total: RatioInterval, unit: str) -> dict[str, Any]:
        """The other fields of a reading, by name.

        Args:
            total: of the whole model.
            unit: plural name of the unit.
        """
        return {
            "advice": self._advice(total, unit),
            "average": Estimate(total.ratio, total.low, total.high) if self._units else None,
            # Windows grow, so their number grows as the root of that of units.
            "windows_needed": windows_needed(total.log_error, len(self._units), power=1),
        }

    def _advice(self, total: RatioInterval, unit: str) -> str:
        status, error = total.status, total.log_error
        if not self._units or (status == "resolved" and error is not None and error <= WELL_KNOWN):
            return ""
        if error is None or error > GUESSED:
            what = "tr Σ" if status == "upper_bound" else "|G|²"
            return f"measure more {unit}; how many cannot be computed before {what} is known better"
        target = WELL_KNOWN if status == "resolved" else BARELY_KNOWN
        needed = math.fsum(self._units) * ((error / target) ** 2 - 1.0)
        return f"measure about {number(needed, 2)} more {unit}" if needed > 0 else f"measure more {unit}"


def _average(windows: Tensor, weights: Tensor) -> Series:
    """Average the windows of one series.

    Args:
        windows: x_i and y_i; [windows, 2].
        weights: ω_i, which sum to 1; [windows].
    """
    mean = weights @ windows
    trace_cov, grad_sq = mean.tolist()
    n_effective = float(1.0 / weights.square().sum())
    if len(weights) < _MIN_WINDOWS or n_effective < 2:
        return TOO_FEW_WINDOWS, grad_sq, trace_cov
    residuals, of_mean = windows - mean, weights.square() / (1.0 - weights)
    (var_x, covariance), (_, var_y) = ((residuals * of_mean[:, None]).T @ residuals).tolist()
    interval = fieller_interval(
        trace_cov,
        grad_sq,
        var_numerator=var_x,
        var_denominator=var_y,
        covariance=covariance,
        n_samples=n_effective,
    )
    if trace_cov > 0 and grad_sq > 0:
        # Delta method: log(x̄/ȳ) changes by dx̄/x̄ − dȳ/ȳ.
        variance = float(of_mean @ (residuals / mean).diff(dim=1).square().squeeze(1))
        interval = replace(interval, log_error=math.sqrt(max(variance, 0.0)))
    return interval, grad_sq, trace_cov
