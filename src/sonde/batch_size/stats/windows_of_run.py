"""The windows of a run, for the whole model and for its groups of parameters, and the noise scale that they show."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sonde.batch_size.stats.blocks import Block, Blocks, on_host
from sonde.batch_size.stats.filter import Level, NoiseScaleFilter
from sonde.batch_size.stats.group_estimates import estimates_table
from sonde.batch_size.stats.run_average import average_of_run
from sonde.batch_size.stats.solved_window import SolvedWindow
from sonde.stats.intervals import unresolved
from sonde.stats.state import check_keys

_RISES = 1.01
"""A learning rate rises by more than this factor in a block of a warm-up, and by less through rounding."""
_LEVEL_FOR = 0.1
"""Part of the steps so far, and at least `_LEVEL_AT_LEAST` steps, after which a rate that has not risen stays level."""
_LEVEL_AT_LEAST = 10
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

    @property
    def steps_per_window(self) -> float:
        """Steps of training for each measured window."""
        return self.n_steps / self.n_windows


class WindowsOfRun:
    """Takes windows; knows the noise scale now, and on average over the run.

    Args:
        groups: names of the parameter groups, in the order of a window's entries.
    """

    def __init__(self, groups: Sequence[str]) -> None:
        self.groups = tuple(groups)
        self.gone: frozenset[str] = frozenset()
        """The groups in which no parameter is trained now."""
        self.last_window = 0
        """Number of the last window that was used."""
        self._peak_rate = 0.0
        """The highest learning rate so far."""
        self._peaked_at = 0
        """Number of the first window with that rate."""
        self._is_warm = False
        """Whether the learning rate has fallen or stayed level since the run began."""
        self._begin(0)

    def _begin(self, number: int) -> None:
        self._blocks = Blocks()
        self._filter: NoiseScaleFilter | None = None
        self._batch = 0.0
        self._origin = number

    def add(self, window: SolvedWindow, number: int, rate: float | None = None) -> None:
        """Add a window.

        Args:
            window: its estimates.
            number: of the window in training.
            rate: the learning rate; None where it is not known.
        """
        # Of a window that was under way when everything began anew, the numbers may come later.
        if number <= self._origin:
            return
        self.last_window = number
        total = on_host([[window.total.trace_cov], [window.total.grad_sq]])
        estimates = torch.cat([total, estimates_table(window.per_group)], 1).T
        if self._filter is None:
            self._batch = window.effective_units
            self._filter = NoiseScaleFilter(len(estimates), self._batch)
        block = self._blocks.add(number - self._origin, estimates, 1 / window.effective_units, rate)
        if block is not None:
            self._filter.update(block)
        if rate is not None:
            self._see_rate(rate, number)

    def _see_rate(self, rate: float, number: int) -> None:
        """Note whether the warm-up is over. A later rise, as of a cycle or a restart, does not begin it again."""
        if rate > self._peak_rate:
            self._peak_rate, self._peaked_at = rate, number
        elif rate < self._peak_rate or number - self._peaked_at > max(_LEVEL_AT_LEAST, _LEVEL_FOR * number):
            self._is_warm = True

    @property
    def warms_up(self) -> bool:
        """Whether the learning rate has risen over about the last quarter of the steps, and has only risen before."""
        if self._is_warm or len(self._blocks.complete) < 2:
            return False
        before, now = self._blocks.complete[-2].rate, self._blocks.rate
        return before is not None and now is not None and now > _RISES * before

    def begin_anew(self, first: int, *, gone: Collection[str] = ()) -> None:
        """Forget all windows: they speak of other parameters.

        Args:
            first: number of the first window that counts.
            gone: the groups in which no parameter is trained now.
        """
        self.gone = frozenset(gone)
        self._begin(max(first - 1, 0))

    @property
    def n_windows(self) -> int:
        """Windows that are kept, in blocks."""
        return self._blocks.n_windows

    @property
    def n_steps(self) -> int:
        """Steps of training up to the last window, from the beginning or from where everything began anew."""
        return max(self.last_window - self._origin, 0)

    @property
    def first_step(self) -> int:
        """The first of these steps, from 1."""
        return self._origin + 1

    def levels(self, *, with_groups: bool = True) -> list[Level]:
        """The noise scale now: of the whole model and, after it, of each group."""
        if self._filter is None:
            return [Level(unresolved("no window has ended yet"))] * (1 + len(self.groups) * with_groups)
        return self._filter.levels(self._blocks.unfinished, n_series=None if with_groups else 1)

    def average(self) -> Level:
        """The noise scale of the whole model over the run so far; see `average_of_run`."""
        return average_of_run(self._blocks.all)

    def recent(self) -> Recent | None:
        """The last windows; None before the first."""
        blocks = self._blocks.all[-_RECENT:]
        if not blocks:
            return None
        n = [block.n_windows for block in blocks]
        n_windows, n_steps = sum(n), sum(block.n_steps for block in blocks)
        parts = on_host(n) / n_windows
        means = torch.stack([b.means * torch.where(b.sizes > 0, b.sizes, 1.0)[:, None] for b in blocks])
        trace_cov, grad_sq = (parts[:, None, None] * means).sum(0).T.tolist()
        return Recent(trace_cov, grad_sq, n_windows, n_steps, _log_scatter(blocks))

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs; numbers, strings and containers of them."""
        return {
            "groups": list(self.groups),
            "gone": sorted(self.gone),
            "last_window": self.last_window,
            "origin": self._origin,
            "batch": self._batch,
            "peak_rate": self._peak_rate,
            "peaked_at": self._peaked_at,
            "is_warm": self._is_warm,
            "blocks": self._blocks.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: when keys or groups differ.
        """
        label = "windows of the state"
        check_keys(label, state, set(self.state_dict()))
        if state["groups"] != list(self.groups):
            raise ValueError(f"{label}: it has the groups {state['groups']}, this probe has {list(self.groups)}")
        self.gone, self.last_window = frozenset(state["gone"]), state["last_window"]
        self._begin(state["origin"])
        self._peak_rate, self._peaked_at, self._is_warm = state["peak_rate"], state["peaked_at"], state["is_warm"]
        self._blocks.load_state_dict(state["blocks"])
        if (batch := state["batch"]) > 0:
            self._batch, self._filter = batch, NoiseScaleFilter(1 + len(self.groups), batch)
            for block in self._blocks.complete:
                self._filter.update(block)


def _log_scatter(blocks: Sequence[Block]) -> float | None:
    """Standard deviation of log(tr Σ/|G|²) of single windows of the first series, to first order."""
    n_windows = sum(block.n_windows for block in blocks)
    freedom = n_windows - len(blocks)
    x, y = (sum(b.n_windows * float(b.means[0, i]) for b in blocks) / n_windows for i in (0, 1))
    if freedom < 1 or x <= 0 or y <= 0:
        return None
    (xx, xy), (_, yy) = (sum(b.scatter[0] for b in blocks) / freedom).tolist()  # type: ignore[union-attr]
    return math.sqrt(max(xx / x**2 - 2 * xy / (x * y) + yy / y**2, 0.0))
