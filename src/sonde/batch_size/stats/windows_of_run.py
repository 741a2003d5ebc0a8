"""The windows of a run, for the whole model and for its groups of parameters, and the noise scale that they show."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sonde.batch_size.stats.filter import Block, Blocks, NoiseScaleFilter, on_host
from sonde.batch_size.stats.window_row import SolvedWindow
from sonde.stats.intervals import TOO_FEW_WINDOWS, RatioInterval, fieller_interval, unresolved
from sonde.stats.sealed_state import Stateful

_FEWEST = 4
"""Fewest windows of an average over the run."""
_RISES = 1.01
"""A learning rate that rises by more than this factor warms up. Rounding changes it by less."""
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


def average_of(blocks: Sequence[Block]) -> RatioInterval:
    """B_simple of the run so far, of the first series, with Fieller's interval.

    A block counts for all the steps that it stands for, however many of its windows were measured. tr Σ and |G|² are
    over the size |F|²: so each step weighs by the progress that it makes (McCandlish et al. 2018, arXiv:1812.06162,
    appendix D).
    """
    blocks = [block for block in blocks if block.n_windows > 1]  # a single window does not show its scatter
    if sum(block.n_windows for block in blocks) < _FEWEST:
        return TOO_FEW_WINDOWS
    n, n_steps = on_host([[block.n_windows, block.n_steps] for block in blocks]).T
    parts = n_steps / n_steps.sum()
    x, y = (parts @ torch.stack([block.means[0] for block in blocks])).tolist()
    of_mean = (parts.square() / (n * (n - 1)))[:, None, None] * torch.stack([block.scatter[0] for block in blocks])
    (xx, xy), (_, yy) = of_mean.sum(0).tolist()
    # Satterthwaite's degrees of freedom of a sum of variances, here that of |G|².
    spread = float((of_mean[:, 1, 1].square() / (n - 1)).sum())
    freedom = yy * yy / spread if spread > 0 else float((n - 1).sum())
    return fieller_interval(
        x, y, var_numerator=xx, var_denominator=yy, covariance=xy, n_samples=max(freedom + 1.0, 2.0)
    )


class WindowsOfRun(Stateful):
    """Takes windows; knows the noise scale now, and on average over the run.

    Args:
        groups: names of the parameter groups, in the order of a window's entries.
    """

    STATE = ("_origin", "_batch", "blocks")

    def __init__(self, groups: Sequence[str]) -> None:
        self.groups = tuple(groups)
        self._begin(0)

    def _begin(self, number: int) -> None:
        self.blocks = Blocks()
        self._filter: NoiseScaleFilter | None = None
        self._batch, self._origin = 0.0, number

    def add(self, window: SolvedWindow, number: int, rate: float | None = None) -> None:
        """Add a window.

        Args:
            window: its estimates.
            number: of the window in training.
            rate: the learning rate; None where it is not known.
        """
        estimates = window.estimates.T
        if self._filter is None:
            self._batch = window.effective_units
            self._filter = NoiseScaleFilter(len(estimates), self._batch)
        block = self.blocks.add(number - self._origin, estimates, 1 / window.effective_units, rate)
        if block is not None:
            self._filter.update(block)

    @property
    def warms_up(self) -> bool:
        """Whether the learning rate has only risen so far, and is higher than two blocks ago: in a third of the run."""
        rates = [block.rate for block in self.blocks.all]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(rates) or len(known) < 2 or any(b * _RISES < a for a, b in itertools.pairwise(known)):
            return False
        return known[-1] > _RISES * known[-min(_RECENT, len(known))]

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
        """The noise scale of the whole model over the run so far."""
        return average_of(self.blocks.all)

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
