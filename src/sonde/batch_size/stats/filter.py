"""The noise scale now: a filter in log time.

Window i gives unbiased estimates x_i of tr Σ and y_i of |G|². Windows are averaged in blocks (`blocks.py`). With x̄ and
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
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from sonde.batch_size.stats.blocks import Block, change_of_rate, on_host
from sonde.stats.intervals import TOO_FEW_WINDOWS, RatioInterval, unresolved

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
