"""What a budget of 1 % costs, and what sparse windows do to the noise scale's interval.

    python -m benchmarks.budget [--windows 1500] [--runs 60] [--out benchmarks/results]

**Cost.** A residual network of 75, 750 or 7,500 parameter tensors trains beside itself without a probe, window by
window in turn. Once the pace has settled, the table has the share that the probe says it costs, and how much longer the
probed windows took: the median over blocks of windows, with its 95 % interval by the sign test.

**Interval.** The runs of `benchmarks.present_noise_scale`, of which one window in 1, 4 or 16 is measured: how often the
interval holds the present value, with a horizon of 50 measured windows, and with one of 50 windows of training.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

import sonde
from benchmarks.machine import describe
from benchmarks.present_noise_scale import HORIZON, Windows, as_window, holds, simulate
from sonde.batch_size.budget import REVIEW, Pace
from sonde.batch_size.stats.history import WindowHistory
from sonde.batch_size.stats.trend import TrendFit, fit_trends

SIZES = ((75, 256), (750, 64), (7500, 16))
"""Parameter tensors, and the width of the layers."""
BUDGET = 0.01
N_PIECES, UNITS_PER_PIECE = 4, 32
BLOCKS = 20
"""Blocks of windows that are compared."""
MOST_SETTLING = 6000
"""Windows after which the cost is measured even if the pace still changes."""
EVERIES = (1, 4, 16)
SETTINGS = (("sgd", 0.05), ("sgd", 0.2), ("momentum", 0.005), ("momentum", 0.02), ("adamw", 0.001), ("adamw", 0.003))
N_WINDOWS = 800
CHECKPOINTS = (200, 400, 800)


class Residual(nn.Module):
    """Layers of three parameter tensors each: a matrix, a bias and a gain.

    Args:
        n_tensors: parameter tensors, a multiple of 3.
        width: of each layer.
    """

    def __init__(self, n_tensors: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(n_tensors // 3))
        self.gains = nn.ParameterList(nn.Parameter(torch.full((width,), 0.1)) for _ in range(n_tensors // 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, gain in zip(self.layers, self.gains, strict=True):
            x = x + gain * torch.tanh(layer(x))
        return x


class Loop:
    """One training loop, with a probe or without.

    Args:
        n_tensors: parameter tensors.
        width: of the layers.
        budget: of the probe; None for no probe.
    """

    def __init__(self, n_tensors: int, width: int, budget: float | None) -> None:
        torch.manual_seed(0)
        self.model = Residual(n_tensors, width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.data = torch.randn(N_PIECES, UNITS_PER_PIECE, width)
        self.probe = None
        if budget is not None:
            self.probe = sonde.attach(
                self.model, self.optimizer, unit="rows", units_per_piece=UNITS_PER_PIECE, budget=budget, verbose=False
            )

    def window(self) -> float:
        """One optimizer step. Returns its duration in seconds."""
        start = time.perf_counter()
        for piece in self.data:
            (self.model(piece).square().mean() / N_PIECES).backward()
        if self.probe is not None:
            self.probe.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


@dataclass(frozen=True)
class CostOfSize:
    """One size of the model.

    Attributes:
        n_tensors: parameter tensors.
        window_seconds: duration of a window without the probe, median.
        every: one window in so many was measured.
        share: cost over time, as the probe says; None where too few windows were measured to say it.
        error: its standard error.
        slower: how much longer probed windows took, median over blocks.
        low: lower end of the 95 % interval of that median.
        high: upper end.
    """

    n_tensors: int
    window_seconds: float
    every: int
    share: float | None
    error: float | None
    slower: float
    low: float
    high: float


def cost_of(n_tensors: int, width: int, n_windows: int, budget: float = BUDGET) -> CostOfSize:
    """Train both loops in turn, and compare them once the pace has settled."""
    plain, probed = Loop(n_tensors, width, None), Loop(n_tensors, width, budget)
    assert probed.probe is not None
    settled, before, n = 0, 1, 0
    while settled < 200 and n < min(MOST_SETTLING, 4 * n_windows):
        for _ in range(REVIEW):
            plain.window()
            probed.window()
        n += REVIEW
        every = probed.probe.cost().every
        settled, before = (settled + REVIEW if every == before and n > 200 else 0), every
    without, with_probe = [], []
    for k in range(n_windows):
        for loop in (plain, probed) if k % 2 else (probed, plain):
            (with_probe if loop is probed else without).append(loop.window())
    cost = probed.probe.cost()
    probed.probe.close()
    size = max(n_windows // BLOCKS, 1)
    ratios = sorted(
        math.fsum(with_probe[i : i + size]) / math.fsum(without[i : i + size]) - 1
        for i in range(0, n_windows - size + 1, size)
    )
    low, high = sign_test(ratios)
    return CostOfSize(
        n_tensors,
        statistics.median(without),
        cost.every,
        cost.share,
        cost.error,
        statistics.median(ratios),
        low,
        high,
    )


def sign_test(ordered: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median: each value is above it with probability one half."""
    n, tail, k = len(ordered), 0.0, 0
    while (tail := tail + math.comb(n, k) / 2**n) <= 0.025:
        k += 1
    k = max(k - 1, 0)
    return ordered[k], ordered[n - 1 - k]


@dataclass(frozen=True)
class Coverage:
    """Sparse windows, over all settings and checkpoints.

    Attributes:
        every: one window in so many was measured.
        horizon: "measured" or "training": what the horizon counts.
        first: windows that were all measured before.
        covered: share of the runs whose interval holds the present value, mean over cells.
        worst: the lowest of them.
        resolved: share of the runs with a two-sided interval.
        width: upper over lower end, median over cells; None without any.
    """

    every: int
    horizon: str
    first: int
    covered: float
    worst: float
    resolved: float
    width: float | None


def coverage(n_runs: int) -> Iterator[Coverage]:
    """Judge the intervals for each pace and each meaning of the horizon."""
    runs = [simulate(optimizer, lr, n_runs=n_runs, n_windows=N_WINDOWS) for optimizer, lr in SETTINGS]
    kinds = [(1, "measured", 0)]
    for n in EVERIES[1:]:
        kinds += [(n, "measured", 0), (n, "measured", 100), (n, "training", 0)]
    for every, horizon, first in kinds:
        cells = [cell for windows in runs for cell in judge(windows, every, horizon, first)]
        widths = [width for _, _, width in cells if width is not None]
        covered = [share for share, _, _ in cells]
        yield Coverage(
            every,
            horizon,
            first,
            statistics.mean(covered),
            min(covered),
            statistics.mean(resolved for _, resolved, _ in cells),
            statistics.median(widths) if widths else None,
        )


def judge(windows: Windows, every: int, horizon: str, first: int) -> Iterator[tuple[float, float, float | None]]:
    """At each checkpoint: the share of intervals that hold the present value, that are two-sided, and their width."""
    n_runs = len(windows.trace_cov)
    histories = [WindowHistory(["first layer", "second layer"], HORIZON) for _ in range(n_runs)]
    x, y = windows.trace_cov.tolist(), windows.grad_sq.tolist()
    pace = Pace(every=every)
    for t in range(N_WINDOWS):
        if pace.is_measured or t < first:
            for history, own_x, own_y in zip(histories, x, y, strict=True):
                if horizon == "measured":
                    history.spacing.measured(t + 1, 1 if t < first else every)
                history.add(as_window(list(zip(own_x[t], own_y[t], strict=True))), t + 1)
        pace.window_ends()
        if t + 1 not in CHECKPOINTS:
            continue
        fits = [present_fit(history, t + 1) for history in histories]
        exact_x, exact_y = (e[:, t].sum(1) for e in (windows.exact_trace_cov, windows.exact_grad_sq))
        present = (exact_x / exact_y).tolist()
        resolved = [fit.interval for fit in fits if fit.interval.status == "resolved"]
        widths = [(i.high or 0.0) / (i.low or 1.0) for i in resolved]
        yield (
            sum(holds(fit.interval, now) for fit, now in zip(fits, present, strict=True)) / n_runs,
            len(resolved) / n_runs,
            statistics.median(widths) if widths else None,
        )


def present_fit(history: WindowHistory, now: int) -> TrendFit:
    """The trend of the whole model at a window, measured or not, as `probe.reading()` computes it."""
    series = history.series(now, with_groups=False)[0][1]
    spacing = history.spacing.per_measured(history.horizon)
    return fit_trends(series.trace_cov, series.grad_sq, series.ages, history.horizon, spacing=spacing)[0]


def as_tables(costs: Sequence[CostOfSize], covered: Sequence[Coverage]) -> str:
    """Both tables."""
    lines = [
        "| parameter tensors | window | measured | cost, as the probe says | probed beside plain |",
        "|---|---|---|---|---|",
        *(
            f"| {c.n_tensors:,} | {1e3 * c.window_seconds:.1f} ms | one in {c.every} | {share_in_words(c)} | "
            f"{100 * c.slower:+.2f} % [{100 * c.low:.2f}, {100 * c.high:.2f}] |"
            for c in costs
        ),
        "",
        "| one window in | horizon of 50 | all measured at first | coverage, mean | lowest cell | two-sided | width |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {c.every} | {c.horizon} windows | {c.first} | {100 * c.covered:.1f} % | {100 * c.worst:.0f} % | "
            f"{100 * c.resolved:.0f} % | {f'{c.width:.1f}' if c.width else '–'} |"
            for c in covered
        ),
    ]
    return "\n".join(lines)


def share_in_words(cost: CostOfSize) -> str:
    """The probe's own figure with twice its standard error."""
    if cost.share is None or cost.error is None:
        return "not known"
    return f"{100 * cost.share:.2f} % ± {200 * cost.error:.2f}"


def main() -> None:
    """Measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--windows", type=int, default=1500)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    costs = [cost_of(n, width, max(options.windows * 75 // n, 10 * BLOCKS)) for n, width in SIZES]
    covered = list(coverage(options.runs))
    machine = ", ".join(f"{name}: {value}" for name, value in describe("cpu", ()).items())
    command = f"`python -m benchmarks.budget --windows {options.windows} --runs {options.runs}`"
    text = f"# Windows within a budget\n\n{command}, {machine}.\n\n{as_tables(costs, covered)}\n"
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "budget.md").write_text(text)
    found = {"cost": [asdict(c) for c in costs], "coverage": [asdict(c) for c in covered]}
    (options.out / "budget.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
