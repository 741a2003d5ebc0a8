"""The windows of a run, for the whole model and for its groups of parameters, and the noise scale that they show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sonde.batch_size.stats.blocks import Blocks, on_host
from sonde.batch_size.stats.filter import NoiseScaleFilter
from sonde.batch_size.stats.group_estimates import estimates_table
from sonde.batch_size.stats.run_average import RunAverage
from sonde.batch_size.stats.solved_window import SolvedWindow
from sonde.stats.intervals import RatioInterval, unresolved
from sonde.stats.sealed_state import Stateful

_RISES = 1.01
"""A learning rate that rises by more than this factor warms up. Rounding changes it by less."""
_LEVEL_FOR, _LEVEL_AT_LEAST = 0.1, 10
"""Part of the steps so far, and steps, after which a rate that has not risen stays level."""
_LONGER = 1.5
"""So many times longer than between two rises before, since a warm-up may rise epoch by epoch."""
_RECENT = 3
"""Blocks that count as recent: about the last half of the run."""


@dataclass(frozen=True)
class Recent:
    """The last windows, averaged.

    Attributes:
        trace_cov: tr Σ of each series.
        grad_sq: |G|² of each series; may be negative.
        n_windows: how many were measured and could be used.
        n_steps: steps of training that they stand for.
        scatter: standard deviation of log(tr Σ/|G|²) of single windows of the first series; None where one of the two
            averages is not positive.
    """

    trace_cov: Sequence[float]
    grad_sq: Sequence[float]
    n_windows: int
    n_steps: int
    scatter: float | None


class WindowsOfRun(Stateful):
    """Takes windows; knows the noise scale now, and on average over the run.

    Args:
        groups: names of the parameter groups, in the order of a window's entries.
    """

    STATE = (
        *("last_window", "_origin", "_batch", "blocks"),
        *("_peak_rate", "_peaked_at", "_n_rises", "_longest_stay", "_has_fallen"),
    )

    def __init__(self, groups: Sequence[str]) -> None:
        self.groups = tuple(groups)
        self.last_window = 0
        """Number of the last window that was used."""
        self._peak_rate, self._peaked_at = 0.0, 0
        """The highest learning rate so far, and the number of the first window with it."""
        self._n_rises, self._longest_stay = 0, 0
        """How often a rate was the highest so far, the first included; and most steps between two of them."""
        self._has_fallen = False
        """Whether the learning rate has fallen: a later rise, as of a cycle or a restart, is no warm-up."""
        self._begin(0)

    def _begin(self, number: int) -> None:
        self.blocks, self._average = Blocks(), RunAverage()
        self._filter: NoiseScaleFilter | None = None
        self._batch, self._origin = 0.0, number

    def add(self, window: SolvedWindow, number: int, rate: float | None = None) -> None:
        """Add a window.

        Args:
            window: its estimates.
            number: of the window in training.
            rate: the learning rate; None where it is not known.
        """
        self.last_window = number
        total = on_host([[window.total.trace_cov], [window.total.grad_sq]])
        estimates = torch.cat([total, estimates_table(window.per_group)], 1).T
        if self._filter is None:
            self._batch = window.effective_units
            self._filter = NoiseScaleFilter(len(estimates), self._batch)
        block = self.blocks.add(number - self._origin, estimates, 1 / window.effective_units, rate)
        if block is not None:
            self._filter.update(block)
            self._average.add(block)
        if rate is not None:
            self._see_rate(rate, number)

    def _see_rate(self, rate: float, number: int) -> None:
        if rate > _RISES * self._peak_rate:
            if self._n_rises > 1:  # the first rate may have stayed for any time
                self._longest_stay = max(self._longest_stay, number - self._peaked_at)
            self._peak_rate, self._peaked_at, self._n_rises = rate, number, self._n_rises + 1
        self._has_fallen |= rate * _RISES < self._peak_rate

    @property
    def warms_up(self) -> bool:
        """Whether the learning rate has only risen, and has not stayed level since for longer than before."""
        stays = self.last_window - self._peaked_at
        if self._has_fallen or self._n_rises < 2 or self.blocks.rate is None:
            return False
        return stays <= max(_LEVEL_AT_LEAST, _LEVEL_FOR * self.last_window, _LONGER * self._longest_stay)

    def begin_anew(self, first: int) -> None:
        """Forget all windows before one, the first that counts: they speak of other parameters."""
        self._begin(max(first - 1, 0))

    @property
    def first_step(self) -> int:
        """The first step of training that counts, from 1."""
        return self._origin + 1

    def levels(self, *, with_groups: bool = True) -> list[RatioInterval]:
        """The noise scale now: of the whole model and, after it, of each group."""
        if self._filter is None:
            since = f" since step {self._origin:,}, where it began anew" if self._origin else ""
            return [unresolved(f"no window has ended yet{since}")] * (1 + len(self.groups) * with_groups)
        return self._filter.levels(self.blocks.unfinished, n_series=None if with_groups else 1)

    def average(self) -> RatioInterval:
        """The noise scale of the whole model over the run so far; see `RunAverage`."""
        return self._average.level(self.blocks.unfinished)

    def recent(self) -> Recent | None:
        """The last windows; None before the first."""
        blocks = self.blocks.all[-_RECENT:]
        if not blocks:
            return None
        n_windows, n_steps = sum(b.n_windows for b in blocks), sum(b.n_steps for b in blocks)
        parts = on_host([b.n_windows for b in blocks]) / n_windows
        over_size = torch.stack([b.means for b in blocks])  # [blocks, series, 2]
        sizes = torch.stack([torch.where(b.sizes > 0, b.sizes, 1.0) for b in blocks])
        trace_cov, grad_sq = torch.einsum("b,bs,bsi->is", parts, sizes, over_size).tolist()
        # The standard deviation of log(x/y), to first order, of the first series.
        x, y = (parts @ over_size[:, 0]).tolist()
        freedom, scatter = n_windows - len(blocks), None
        if freedom > 0 and x > 0 and y > 0:
            (xx, xy), (_, yy) = (torch.stack([b.scatter[0] for b in blocks]).sum(0) / freedom).tolist()
            scatter = math.sqrt(max(xx / x**2 - 2 * xy / (x * y) + yy / y**2, 0.0))
        return Recent(trace_cov, grad_sq, n_windows, n_steps, scatter)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, of a run with the same groups."""
        self._begin(0)
        super().load_state_dict(state)
        if self._batch > 0:
            self._filter = NoiseScaleFilter(1 + len(self.groups), self._batch)
            for block in self.blocks.complete:
                self._filter.update(block)
                self._average.add(block)
