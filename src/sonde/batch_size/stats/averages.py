"""The noise scale over windows: now and on average over a run, or of a model that does not train.

At fixed weights every window has the same expectation, so all windows together are averaged, in place of a filter.
Window i holds M_i units and gives unbiased estimates x_i of tr Σ and y_i of |G|², with

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sonde.batch_size.stats.filter import Block, Blocks, NoiseScaleFilter, on_host
from sonde.batch_size.stats.reading import GroupReading, Series, group_reading
from sonde.batch_size.stats.window_row import SolvedWindow
from sonde.decision.law import FEWEST_STEPS
from sonde.stats.intervals import TOO_FEW_WINDOWS, RatioInterval, fieller_interval, unresolved
from sonde.stats.sealed_state import Stateful
from sonde.wording import number

WELL_KNOWN = 0.2 / 1.96
"""Standard error of log B_simple at ± 20 %."""
BARELY_KNOWN = 0.45
"""Standard error of log B_simple at which |G|² or tr Σ can just be distinguished from 0: about 1 over Student's t."""
_WIDE = 0.25
"""Standard error of log B_simple at about ± 50 %: a two-sided interval that is wider deserves advice."""
GUESSED = 1.5
"""Standard error of log B_simple beyond which first order says nothing, and a remedy ten times too large or too small
would be computed."""
_MOST_LONGER = 4.0
"""More training than so many times the present is no advice."""
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
            "average": total if self._units else None,
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


# What would make the noise scale known better: measuring more windows, more training, or more units.


def windows_needed(log_error: float | None, n_windows: int, *, power: int = 2) -> int | None:
    """How many more windows until the standard error of log B_simple is that of ± 20 %.

    Args:
        log_error: the standard error now; None where it is not known.
        n_windows: windows that it rests on.
        power: of the error's ratio by which the number of windows grows.

    Returns:
        The number, 0 when it is reached; None when it is not known.
    """
    if log_error is None or log_error > GUESSED or not n_windows:
        return None
    return max(math.ceil(n_windows * ((log_error / WELL_KNOWN) ** power - 1) - 1e-9), 0)


def what_helps(status: str, log_error: float | None, *, n_steps: int, every: float) -> str:
    """What to do about a noise scale of which only a bound, or a wide interval, is known.

    Args:
        status: of the reading.
        log_error: standard error of log B_simple to first order; None where |G|² or tr Σ is not positive so far.
        n_steps: steps of training so far.
        every: one window in so many was measured of late.

    Returns:
        One sentence without its full stop; empty where nothing is needed.
    """
    if not n_steps or (status == "resolved" and (log_error is None or log_error <= _WIDE)):
        return ""
    target = _WIDE if status == "resolved" else BARELY_KNOWN
    factor = None  # of windows
    if log_error is not None and log_error <= GUESSED and n_steps >= FEWEST_STEPS:
        factor = max((log_error / target) ** 2, 1.5)  # below 1.5, a remedy would change little
    if every > 1.5:
        denser = 1 if factor is None else int(every / factor)
        if denser <= 1:
            return "measure every window (every=1)"
        return f"measure one window in {denser} (every={denser}, or a larger budget=)"
    if factor is None:
        what = "tr Σ" if status == "upper_bound" else "|G|²"
        more = "split each batch into more pieces" if status == "upper_bound" else "use more units in each window"
        return f"train on, or {more}; how much cannot be computed before {what} is known better"
    if factor <= _MOST_LONGER:
        return f"train about {_rounded(n_steps * (factor - 1))} more steps"
    # The variance of |G|² falls with the square of the units, where noise is large; that of tr Σ with the pieces.
    if status == "upper_bound":
        return f"split each batch into {factor:.1f} times as many pieces, or use as many times the units in such pieces"
    return f"use about {math.sqrt(factor):.1f} times as many units in each window"


def _rounded(count: float) -> int:
    """Two digits, upwards: the count is no better known, and a log repeats it less often."""
    step = int(10 ** max(math.floor(math.log10(count)) - 1, 0))
    return math.ceil(count / step - 1e-9) * step
