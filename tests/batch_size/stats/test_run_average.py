"""The run's average: a block counts for the steps that it stands for, and intervals hold the mean over all steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from sonde.batch_size.stats.averages import average_of
from sonde.batch_size.stats.filter import Block, Blocks
from sonde.stats.intervals import RatioInterval, fieller_interval
from tests.batch_size.stats.windows import gaussian_windows

N_STEPS, BATCH = 1000, 32.0
ALL = range(1, N_STEPS + 1)
DENSE_THEN_SPARSE = [*range(1, 101), *range(120, N_STEPS + 1, 20)]
PATHS: dict[str, Callable[[int], float]] = {
    "still": lambda t: 128.0,
    "grows like t": lambda t: 0.3 * (t + 30),
    "grows from almost 0": lambda t: 1.0 + 256.0 * (1 - math.exp(-t / 200)),
    "falls": lambda t: 32.0 + 224.0 * math.exp(-t / 300),
}


def exact(path: Callable[[int], float]) -> float:
    """Each step's tr Σ and |G|² over the size |F|² of its gradient, summed over all steps, then their ratio."""
    trace_cov, grad_sq = 1.0, [1 / path(t) for t in ALL]
    sizes = [y + trace_cov / BATCH for y in grad_sq]
    return sum(trace_cov / size for size in sizes) / sum(y / size for y, size in zip(grad_sq, sizes, strict=True))


def average(blocks: Sequence[Block]) -> tuple[float | None, RatioInterval]:
    level = average_of(blocks)
    return level.ratio, level


def averages(
    path: Callable[[int], float], ends: Sequence[int], *, n_runs: int, seed: int
) -> list[tuple[float | None, RatioInterval]]:
    blocks = Blocks()  # each run is a series of them
    for end, runs in zip(ends, gaussian_windows([path(t) for t in ends], n_runs=n_runs, seed=seed), strict=True):
        blocks.add(end, runs, 1 / BATCH)
    return [
        average(
            [replace(b, sizes=b.sizes[i, None], means=b.means[i, None], scatter=b.scatter[i, None]) for b in blocks.all]
        )
        for i in range(n_runs)
    ]


def block(end: int, n_steps: int, means: tuple[float, float], variances: tuple[float, float], n_windows: int) -> Block:
    scatter = torch.diag(torch.tensor(variances, dtype=torch.float64))[None] * (n_windows - 1)
    return Block(end, n_steps, n_windows, torch.ones(1).double(), torch.tensor([means], dtype=torch.float64), scatter)


def test_two_blocks_by_hand() -> None:
    """100 steps, all measured, then 300 of which 10 were: three quarters of the weight are the second's."""
    first = block(100, 100, (8.0, 2.0), (1.0, 0.04), 100)
    second = block(400, 300, (16.0, 1.0), (4.0, 0.09), 10)
    b_simple, interval = average([first, second])
    assert b_simple == pytest.approx((0.25 * 8 + 0.75 * 16) / (0.25 * 2 + 0.75 * 1))
    var_y = [0.25**2 * 0.04 / 100, 0.75**2 * 0.09 / 10]
    freedom = sum(var_y) ** 2 / (var_y[0] ** 2 / 99 + var_y[1] ** 2 / 9)  # Satterthwaite's
    assert interval == fieller_interval(
        14.0,
        1.25,
        var_numerator=pytest.approx(0.25**2 * 1.0 / 100 + 0.75**2 * 4.0 / 10).expected,
        var_denominator=sum(var_y),
        covariance=0.0,
        n_samples=freedom + 1,
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ends", [ALL, DENSE_THEN_SPARSE], ids=["all measured", "dense, then sparse"])
def test_intervals_hold_the_mean_over_all_steps(path: str, ends: Sequence[int]) -> None:
    n_runs = 120
    truth = exact(PATHS[path])
    found = averages(PATHS[path], ends, n_runs=n_runs, seed=1)
    held = statistics.mean(
        interval.low is not None and interval.low <= truth <= (interval.high or 0) for _, interval in found
    )
    # 95 % within three standard deviations of 120 runs: 89 % and more. Blocks in which B itself moves count that as
    # scatter, so more may hold.
    assert held >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / n_runs)
    known = [math.log(b / truth) for b, _ in found if b is not None]
    assert len(known) >= 0.98 * n_runs
    # A ratio is biased at second order, and a block's size is that of its mean: a few hundredths in all.
    assert abs(statistics.fmean(known)) < 0.05 + 3 * statistics.stdev(known) / math.sqrt(len(known))
    widths = [(interval.high or math.inf) / (interval.low or 0.0) for b, interval in found if b is not None]
    assert statistics.median(widths) < (1.3 if ends is ALL else 3.0)


def test_too_few_windows_give_a_reason() -> None:
    one = Block(1, 1, 1, torch.ones(1), torch.ones(1, 2, dtype=torch.float64), torch.zeros(1, 2, 2).double())
    for blocks in ([], [one], [block(3, 3, (8.0, 2.0), (1.0, 0.04), 3)]):
        b_simple, interval = average(blocks)
        assert b_simple is None
        assert (interval.status, interval.low) == ("unresolved", None)
        assert interval.reason == "too few windows for an interval: measure more"
    known = block(8, 8, (8.0, 2.0), (1.0, 0.04), 8)
    assert average_of([known, one]) == average_of([known])  # one window shows no scatter
