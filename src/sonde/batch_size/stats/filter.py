"""The noise scale now: a filter in log time.

Window i gives unbiased estimates x_i of tr Σ and y_i of |G|². Windows are averaged in blocks that are
equally long in log time: one that ends at step t is about `_LENGTH` t steps long, so that a run of a million steps has
some 60 of them, whatever part of its windows is measured. Blocks are all that is kept of a run. With x̄ and
ȳ the means of a block and C their covariance, the likelihood of a noise scale B, at the |G|² that suits this B best,
depends on one number:

    r(B) = x̄ − B ȳ        var r = C_xx − 2 B C_xy + B² C_yy        L(B) = (1 + r²/(ν var r))^(−(ν + 1)/2)

This is Student's t with the ν degrees of freedom that C was estimated with. Where ȳ cannot be distinguished from 0, L
is flat for large B, and where x̄ cannot, it is flat for small B. So a bound stays a bound: L is Fieller's set as a
likelihood.

The state is a density over log B. Training resembles itself in log time: B grows about like a power of the steps, and
what 100 steps change after 1,000 steps takes 1,000 steps after 10,000. So between blocks the density drifts by `DRIFTS`
and spreads by `SPREADS`, and a small part of it begins anew far away, since a learning rate or data may change at once.
There is no horizon, and nothing to forget: blocks before lose their weight as the density spreads. The drifts serve the
level alone: a few of them are no measurement of how fast B moves.

Where the learning rate has changed by a factor, B may have changed by as much, up or down: the noise in the steps keeps
|G|² from falling below a size that is in proportion to the rate. So the density spreads by that factor too.

One window cannot own the estimate: it widens the scatter of its own block, which then says little.

The constants were chosen by coverage on recorded trainings: `make bench-present`.

Reference:
    E. C. Fieller, "Some problems in interval estimation", J. R. Stat. Soc. B 16 (1954) 175–185.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sonde.stats.intervals import TOO_FEW_WINDOWS, RatioInterval, unresolved
from sonde.stats.sealed_state import Stateful

_LENGTH = 0.2
"""Length of a block in log time."""
_BEGINNING = 30.0
"""Steps that are added to the time: log time begins slowly, since the first steps do not resemble each other."""
_FEWEST_WINDOWS = 8
"""Fewest windows of a block."""
_JUMPS = math.log(1.5)
"""A change of the log of the learning rate between two windows that ends a block, which would be of two levels."""
_SHORTEST, _FEWEST_BEFORE_JUMP = _LENGTH / 4, 2
"""Log time and windows of a block that ends so; they bound the number of blocks."""
DRIFTS = (-1.0, 0.0, 1.0, 2.5)
"""Change of log B per unit of log time: B falls like 1/t, stays, grows like t, or faster while a model settles."""
_DRIFT_WEIGHTS = (0.15, 0.4, 0.35, 0.1)
SPREADS = (0.12, 0.25, 0.6)
"""Standard deviation of a random change of log B per root of a unit of log time."""
_SPREAD_WEIGHTS = (4 / 7, 2 / 7, 1 / 7)
_PERSISTENCE = 1.5
"""Units of log time in which a drift and a spread become others."""
_BETWEEN_JUMPS = 20.0
"""Units of log time between two sudden changes."""
_MOST_BY_RATE = math.log(10)
"""Most that a change of the learning rate spreads log B by: a rate may fall to 0."""
_JUMP = 1.0
"""Standard deviation of a sudden change of log B."""
_ANYWHERE = 0.01
"""Part of the sudden changes that may be of any size. So no B is ever impossible, whatever was seen before."""
_LOWEST, _HIGHEST, _N_GRID = math.log(1e-3), math.log(1e4), 201
"""The grid of log B, from the log of the batch. A step is about as long as the least spread between two blocks."""
_STEP = (_HIGHEST - _LOWEST) / (_N_GRID - 1)
_MEMORY = 6.0
"""Blocks over which the scatter of single windows is averaged."""
_FEWEST = 3.0
"""Degrees of freedom of the scatter before which nothing is said."""
_LEAST_VARIANCE = 1e-12
"""Of r in units of |F|², so that windows without any scatter do not divide by 0."""
_NORMAL = 1.96
"""Standard errors in half of a 95 % interval."""
_OUTSIDE = math.exp(-(_NORMAL**2) / 2)
"""A density below this part of its maximum is outside the 95 % interval."""
_WIDEST = math.log(30)
"""Between the ends of an interval of log B. If two ends are farther apart, windows have found only one of them: where L
is flat, the density falls by what was seen before, and ends with the grid."""


def on_host(numbers: Sequence[Any]) -> Tensor:
    """Numbers in float64 on the CPU, whatever torch's defaults are."""
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


@dataclass(frozen=True)
class Block:
    """Neighbouring windows. A series is the whole model, or a group of parameters.

    Attributes:
        end: steps of training up to its last window, from where the series begin.
        n_steps: steps of training that it stands for: those since the block before.
        n_windows: how many of them were measured and could be used.
        sizes: mean |F|² of each series; [series].
        means: of tr Σ and |G|², over the size; [series, 2].
        scatter: sums of products of the windows' deviations from these means, likewise over the size; [series, 2, 2].
        rate: the learning rate at its end; None where it is not known.
    """

    end: int
    n_steps: int
    n_windows: int
    sizes: Tensor
    means: Tensor
    scatter: Tensor
    rate: float | None = None

    @property
    def log_time(self) -> float:
        """Its length in log time."""
        return _log_time(self.n_steps, self.end)


def _log_time(n_steps: int, end: int) -> float:
    return math.log((end + _BEGINNING) / (end - n_steps + _BEGINNING))


def change_of_rate(before: float | None, now: float | None) -> float:
    """By how much the log of a learning rate has changed, up or down; 0 where it is not known."""
    if before is None or now is None or before == now:
        return 0.0
    low, high = sorted((before, now))
    return math.log(high / low) if low > 0 else math.inf


class Blocks(Stateful):
    """Collects windows, and makes a block of them when it is long enough."""

    STATE = ("n_steps", "rate", "n_windows", "_n")

    def __init__(self) -> None:
        self.complete: list[Block] = []
        """In order."""
        self.n_windows = self.n_steps = 0
        """All windows so far, and steps of training up to the last of them, from where the series begin."""
        self.rate: float | None = None
        """The learning rate of the last window; None where it is not known."""
        self._n = 0
        """Windows since the last complete block. No window is kept: a block of a long run may have many thousands."""
        self._means = self._scatter = on_host([])
        """Their mean tr Σ, |G|² and |F|², [series, 3], and sums of products of deviations, [series, 2, 2]."""

    def add(self, end: int, estimates: Tensor, v: float, rate: float | None = None) -> Block | None:
        """Add a window.

        Args:
            end: steps of training up to it, from where the series begin.
            estimates: unbiased tr Σ and |G|²; float64 on the CPU, [series, 2].
            v: of the window, in |F|² = |G|² + v tr Σ.
            rate: the learning rate; None where it is not known.

        Returns:
            The block that it completes, or that ends before it, if one does.
        """
        has_jumped = change_of_rate(self.rate, rate) > _JUMPS
        ended = self._complete(_SHORTEST, _FEWEST_BEFORE_JUMP) if has_jumped else None
        sizes = (estimates[:, 1] + v * estimates[:, 0]).clamp(min=0.0)
        window = torch.cat([estimates, sizes[:, None]], 1)
        if self._n == 0:
            self._means, self._scatter = torch.zeros_like(window), estimates.new_zeros(len(estimates), 2, 2)
        self.n_steps, self.rate, self._n, self.n_windows = end, rate, self._n + 1, self.n_windows + 1
        # Means and sums of products as each window comes, without the cancellation that sums of squares would have:
        # B. P. Welford, "Note on a method for calculating corrected sums of squares and products", Technometrics 4
        # (1962) 419–420.
        away = window - self._means
        self._means = self._means + away / self._n
        self._scatter = self._scatter + (1 - 1 / self._n) * away[:, :2, None] * away[:, None, :2]
        return ended or self._complete(_LENGTH, _FEWEST_WINDOWS)

    def _complete(self, shortest: float, fewest: int) -> Block | None:
        """End the block under way, if it is as long as this in log time and has windows enough."""
        if self._n < fewest or _log_time(self.n_steps - self._before, self.n_steps) < shortest:
            return None
        block = self.unfinished
        assert block is not None
        self._n = 0
        self.complete.append(block)
        return block

    @property
    def unfinished(self) -> Block | None:
        """The windows since the last complete block; None if there are none."""
        if not self._n:
            return None
        sizes = self._means[:, 2]
        # A group whose parameters got no gradient has no size, and nothing to be divided.
        scale = torch.where(sizes > 0, sizes, 1.0)
        means, scatter = self._means[:, :2] / scale[:, None], self._scatter / scale.square()[:, None, None]
        return Block(self.n_steps, self.n_steps - self._before, self._n, sizes, means, scatter, self.rate)

    @property
    def _before(self) -> int:
        """Steps of training up to the last complete block."""
        return self.complete[-1].end if self.complete else 0

    @property
    def all(self) -> list[Block]:
        """The complete blocks, and the one under way."""
        return self.complete if (last := self.unfinished) is None else [*self.complete, last]

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs, as JSON values."""
        blocks = [[b.sizes.tolist(), b.means.tolist(), b.scatter.tolist()] for b in self.complete]
        numbers = [[b.end, b.n_steps, b.n_windows, b.rate] for b in self.complete]
        under_way = [self._means.tolist(), self._scatter.tolist()]
        return super().state_dict() | {"blocks": blocks, "numbers": numbers, "under_way": under_way}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state)
        pairs = zip(state["numbers"], state["blocks"], strict=True)
        self.complete = [Block(*n[:3], *map(on_host, tensors), *n[3:]) for n, tensors in pairs]
        self._means, self._scatter = map(on_host, state["under_way"])


class NoiseScaleFilter:
    """A density over log B for each of several series, such as the whole model and its groups of parameters.

    Args:
        n_series: how many.
        batch: units of a window, around which the grid lies. Later windows may have more or fewer.
    """

    def __init__(self, n_series: int, batch: float) -> None:
        log_b = torch.linspace(_LOWEST, _HIGHEST, _N_GRID, dtype=torch.float64, device="cpu") + math.log(batch)
        self._log_b, self._b = log_b, log_b.exp()
        self._prior = torch.outer(on_host(_DRIFT_WEIGHTS), on_host(_SPREAD_WEIGHTS))[:, :, None]
        self._density = (self._prior / _N_GRID).repeat(n_series, 1, 1, _N_GRID)
        """[series, drifts, spreads, grid], of sum 1 for each series."""
        self._scatter = torch.zeros(n_series, 2, 2, dtype=torch.float64, device="cpu")
        """Sums of products of deviations of single windows from the means of their blocks; older blocks weigh less."""
        self._freedom = 0.0
        self._rate: float | None = None
        """The learning rate at the end of the last block."""

    def update(self, block: Block) -> None:
        """Take the next block."""
        self._density = self._with(block)
        self._scatter, self._freedom = self._scatter_with(block)
        self._rate = block.rate

    def levels(self, unfinished: Block | None = None, *, n_series: int | None = None) -> list[RatioInterval]:
        """The noise scale now: of each series its interval and, as the ratio, the median within the interval.

        Args:
            unfinished: the block under way, which counts as far as it has come.
            n_series: how many series to read, from the first on; all by default.
        """
        freedom = self._freedom if unfinished is None else self._scatter_with(unfinished)[1]
        if freedom < _FEWEST:
            return [TOO_FEW_WINDOWS] * (len(self._density) if n_series is None else n_series)
        density = self._density[:n_series] if unfinished is None else self._with(unfinished, n_series)
        # Lists, since a few hundred numbers take longer as tensors.
        lowest = float(self._log_b[0])
        return [_level(lowest, over_b) for over_b in density.sum((1, 2)).tolist()]

    def _with(self, block: Block, n_series: int | None = None) -> Tensor:
        # The means of a block speak of its middle. Taken for its end, they would lag by half a block.
        half = block.log_time / 2
        density = _moved(self._density[:n_series], self._prior, half)
        if (by_rate := min(change_of_rate(self._rate, block.rate), _MOST_BY_RATE)) > _STEP:
            density = _spread(density, on_host((by_rate,)))
        density = density * self._likelihood(block, n_series)[:, None, None]
        density = _moved(density, self._prior, half)
        return density / density.sum((1, 2, 3), keepdim=True)

    def _scatter_with(self, block: Block) -> tuple[Tensor, float]:
        kept = 1 - 1 / _MEMORY
        return kept * self._scatter + block.scatter, kept * self._freedom + block.n_windows - 1

    def _likelihood(self, block: Block, n_series: int | None) -> Tensor:
        """L(B) of each series, over its maximum; [series, grid]."""
        scatter, freedom = self._scatter_with(block)
        # Of the block's means.
        covariance = scatter[:n_series, :, :, None] / (max(freedom, 1.0) * block.n_windows)
        x, y = block.means[:n_series, :, None].unbind(1)
        b = self._b
        variance = covariance[:, 0, 0] - 2 * b * covariance[:, 0, 1] + b * b * covariance[:, 1, 1]
        nu = max(freedom, _FEWEST)
        t_sq = (x - b * y).square() / (variance + _LEAST_VARIANCE * (1 + b * b))
        log_l = -(nu + 1) / 2 * torch.log1p(t_sq / nu)
        # Over its maximum: of many windows, or of windows that hardly scatter, every point of the grid is so far from B
        # that L itself would be 0.
        return torch.exp(log_l - log_l.amax(-1, keepdim=True))


def _moved(density: Tensor, prior: Tensor, time: float) -> Tensor:
    """The density after some log time in which nothing was measured; [series, drifts, spreads, grid]."""
    moved = _spread(_shifted(density, on_host(DRIFTS) * (time / _STEP)), on_host(SPREADS) * math.sqrt(time))
    total = moved.sum((1, 2), keepdim=True)
    stays, jumps = math.exp(-time / _PERSISTENCE), -math.expm1(-time / _BETWEEN_JUMPS)
    far = (1 - _ANYWHERE) * (total @ _jumped()) + _ANYWHERE * total.mean(-1, keepdim=True)
    anew = (1 - jumps) * (1 - stays) * total + jumps * far
    return (1 - jumps) * stays * moved + prior * anew


@functools.cache
def _jumped() -> Tensor:
    """Where each point of the grid lands by a sudden change; [from, to]. As a product, it is fast."""
    points = torch.eye(_N_GRID, dtype=torch.float64, device="cpu")
    return _spread(points[:, None, None], on_host((_JUMP,)))[:, 0, 0]


def _shifted(density: Tensor, steps: Tensor) -> Tensor:
    """Each drift moved up the grid. At its ends, the density goes on as it is there: what is flat stays flat."""
    places = torch.arange(_N_GRID, dtype=torch.float64, device="cpu")
    at = (places - steps[:, None, None]).clamp(0, _N_GRID - 1)  # [drifts, 1, grid]
    below = at.floor().clamp(max=_N_GRID - 2)
    index = below.long().expand(density.shape)
    return torch.lerp(density.gather(-1, index), density.gather(-1, index + 1), at - below)


def _spread(density: Tensor, deviations: Tensor) -> Tensor:
    """Each spread convolved with a normal density, along the grid; at its ends, the density goes on as it is there."""
    n = len(deviations)
    reach = math.ceil(4 * float(deviations[-1]) / _STEP)
    offsets = torch.arange(-reach, reach + 1, dtype=torch.float64, device="cpu") * _STEP
    kernels = torch.exp(-0.5 * (offsets / deviations[:, None]).square())
    kernels = (kernels / kernels.sum(1, keepdim=True))[:, None]
    rows = F.pad(density.reshape(-1, n, _N_GRID), (reach, reach), mode="replicate")
    return F.conv1d(rows, kernels, groups=n).view(density.shape)


def _level(lowest: float, density: Sequence[float]) -> RatioInterval:
    """Read one series.

    Args:
        lowest: log B at the beginning of the grid.
        density: over log B, [grid].
    """
    limit = max(density) * _OUTSIDE
    inside = [i for i, p in enumerate(density) if p >= limit]
    low = _crossing(density, inside[0], inside[0] - 1, limit) if inside[0] > 0 else None
    high = _crossing(density, inside[-1], inside[-1] + 1, limit) if inside[-1] < len(density) - 1 else None
    if low is not None and high is not None and _STEP * (high - low) > _WIDEST:
        low, high = (low, None) if density[0] < density[-1] else (None, high)
    lower, upper = (math.exp(lowest + _STEP * (at or 0.0)) for at in (low, high))
    if low is not None and high is not None:
        median = math.exp(lowest + _STEP * min(max(_median(density, inside), low), high))
        return RatioInterval("resolved", lower, upper, "", median, _STEP * (high - low) / (2 * _NORMAL))
    if low is not None:
        return RatioInterval("lower_bound", lower, math.inf, "|G|² cannot yet be distinguished from 0")
    if high is not None:
        return RatioInterval("upper_bound", 0.0, upper, "the noise tr Σ cannot yet be distinguished from 0")
    return unresolved("neither the noise tr Σ nor |G|² can yet be distinguished from 0")


def _crossing(density: Sequence[float], inside: int, outside: int, limit: float) -> float:
    """Where the density falls below a limit between two neighbours, in steps; its log is about linear there."""
    over, under = density[inside] / limit, max(density[outside] / limit, 1e-300)
    return inside + (outside - inside) * math.log(over) / math.log(over / under)


def _median(density: Sequence[float], inside: Sequence[int]) -> float:
    """The median of the part of the density that is inside, in steps."""
    half = math.fsum(density[i] for i in inside) / 2
    below = 0.0
    for i in inside:
        if below + density[i] >= half:
            return i - 0.5 + (half - below) / density[i]
        below += density[i]
    return float(inside[-1])
