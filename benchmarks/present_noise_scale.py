"""How often the interval of the noise scale holds the *present* value while the weights move.

    python -m benchmarks.present_noise_scale [--runs 400] [--out benchmarks/results]

A small network trains on a fixed population of 128 examples, so that tr Σ and |G|² of every example's gradient are
known exactly at each step. Many runs train side by side, each on its own samples, with SGD, momentum and AdamW at three
speeds. Each window has four pieces of 16 examples. Its unbiased estimates go through the same history and trend as a
probe's. The table has one row for each setting and part of the model, and one column for each length of the run. Beside
the trend stands the ratio of averages over 100 windows, which sonde reported before. More tables compare horizons, show
the windows after a learning rate has suddenly fallen to a tenth, and have noise with heavy tails.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.machine import describe
from sonde.batch_size.stats.history import WindowHistory
from sonde.batch_size.stats.noise_scale import RunningNoiseScale, WindowEstimate
from sonde.batch_size.stats.solved_window import SolvedWindow
from sonde.batch_size.stats.trend import TrendFit, fit_trends
from sonde.batch_size.stats.window_entry import Series
from sonde.stats.intervals import RatioInterval

SETTINGS = (
    *(("sgd", lr) for lr in (0.05, 0.2, 0.5)),
    *(("momentum", lr) for lr in (0.005, 0.02, 0.06)),
    *(("adamw", lr) for lr in (0.001, 0.003, 0.01)),
)
CHECKPOINTS = (20, 50, 100, 200, 400)
FALLS = (("sgd", 0.2), ("momentum", 0.02), ("adamw", 0.003))
FALL_AFTER = 100
FALL_CHECKPOINTS = (102, 105, 110, 120, 150, 200, 300)
PARTS = ("total", "first layer", "second layer")
TAILS = (3, 5, 10)
HORIZON = 50.0
HORIZONS = (20.0, 35.0, 50.0, 70.0, 100.0)
N_EXAMPLES, N_INPUTS, N_HIDDEN, N_CLASSES = 128, 8, 8, 5
N_PIECES, UNITS_PER_PIECE = 4, 16
BATCH = N_PIECES * UNITS_PER_PIECE


@dataclass(frozen=True)
class Windows:
    """Windows of many runs; [runs, windows, layers] each.

    Attributes:
        trace_cov: unbiased estimates of tr Σ.
        grad_sq: unbiased estimates of |G|².
        exact_trace_cov: tr Σ of the population, at the weights of the window.
        exact_grad_sq: |G|² likewise.
    """

    trace_cov: Tensor
    grad_sq: Tensor
    exact_trace_cov: Tensor
    exact_grad_sq: Tensor


@dataclass(frozen=True)
class Cell:
    """One part of the model after one number of windows, over all runs.

    Attributes:
        optimizer: "sgd", "momentum" or "adamw".
        lr: learning rate.
        part: of the model.
        window: the last window.
        present: exact B_simple now, median over runs.
        covered: share of the runs whose interval, of any kind, holds the present value. An interval that is not known
            holds every value.
        resolved: share with a two-sided interval.
        bias: estimate over present value, median over the resolved runs; None without any.
        width: upper over lower end, median likewise.
        average_covered: share of the runs in which Fieller's interval of the averages holds the present value.
        unknown: share of the runs whose interval is not known, neither an upper nor a lower end.
    """

    optimizer: str
    lr: float
    part: str
    window: int
    present: float
    covered: float
    resolved: float
    bias: float | None
    width: float | None
    average_covered: float
    unknown: float


def simulate(
    optimizer: str, lr: float, *, n_runs: int, n_windows: int, fall_after: int | None = None, seed: int = 1
) -> Windows:
    """Train many runs side by side, and measure each window both from its pieces and exactly.

    After the step `fall_after`, the learning rate is a tenth of `lr`.
    """
    population = torch.Generator().manual_seed(0)
    inputs = torch.randn(N_EXAMPLES, N_INPUTS, generator=population, dtype=torch.float64)
    rule = torch.randn(N_INPUTS, N_CLASSES, generator=population, dtype=torch.float64)
    noise = torch.randn(N_EXAMPLES, N_CLASSES, generator=population, dtype=torch.float64)
    targets = torch.nn.functional.one_hot((inputs @ rule + noise).argmax(1), N_CLASSES).double()
    generator = torch.Generator().manual_seed(seed)
    weights = [
        torch.randn(n_runs, N_INPUTS, N_HIDDEN, generator=generator, dtype=torch.float64) / N_INPUTS**0.5,
        torch.zeros(n_runs, N_HIDDEN, dtype=torch.float64),
        torch.randn(n_runs, N_HIDDEN, N_CLASSES, generator=generator, dtype=torch.float64) / N_HIDDEN**0.5,
        torch.zeros(n_runs, N_CLASSES, dtype=torch.float64),
    ]
    first, second = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    found: list[Tensor] = []
    for step in range(1, n_windows + 1):
        chosen = torch.randint(N_EXAMPLES, (n_runs, N_PIECES, UNITS_PER_PIECE), generator=generator)
        row, grads = [], []
        for x, error in layers(weights, inputs, targets):
            pieces = piece_gradients(x, error, chosen)
            row.append(estimated_and_exact(pieces, x, error))
            n_biases = error.shape[2]
            grads += pieces.mean(1).split([pieces.shape[2] - n_biases, n_biases], 1)
        found.append(torch.stack(row, 1))
        for weight, grad, m, v2 in zip(weights, grads, first, second, strict=True):
            rate = lr / 10 if fall_after and step > fall_after else lr
            move(optimizer, rate, step, weight, grad.reshape(weight.shape), m, v2)
    table = torch.stack(found, 1)  # [runs, windows, layers, 4]
    return Windows(*table.unbind(-1))


def heavy_tailed(dof: int, *, n_runs: int, n_windows: int, seed: int = 1, n_elements: int = 30) -> Windows:
    """A constant gradient with B_simple equal to the batch, where Student's t of few degrees of freedom scales a piece.

    With the square of such a scale, tr Σ of single windows has an infinite variance up to 4 degrees of freedom.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (n_runs, n_windows, N_PIECES)
    chi_square = torch.randn(*shape, dof, generator=generator, dtype=torch.float64).square().sum(-1)
    lengths = ((dof - 2) / chi_square).sqrt()  # mean square 1
    noise = torch.randn(*shape, n_elements, generator=generator, dtype=torch.float64)
    grad = torch.full((n_elements,), (1 / (n_elements * BATCH)) ** 0.5, dtype=torch.float64)  # tr Σ = 1
    pieces = grad + noise * lengths[..., None] / (n_elements * UNITS_PER_PIECE) ** 0.5
    small_sq, big_sq = pieces.square().sum(-1).mean(-1), pieces.mean(2).square().sum(-1)
    u, v = 1 / UNITS_PER_PIECE, 1 / BATCH
    trace_cov, grad_sq = (small_sq - big_sq) / (u - v), (u * big_sq - v * small_sq) / (u - v)
    exact = torch.ones(n_runs, n_windows, 1, dtype=torch.float64)
    return Windows(trace_cov[..., None], grad_sq[..., None], exact, exact / BATCH)


def layers(weights: list[Tensor], inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of the cross entropy of a network with one tanh layer: each layer's inputs, and the gradient of its outputs.

    The gradient of an example is their outer product. The last input is 1, and has the bias.

    Returns:
        For each layer, [examples, inputs + 1] or [runs, examples, inputs + 1], and [runs, examples, outputs].
    """
    w1, b1, w2, b2 = weights
    hidden = torch.tanh(inputs @ w1 + b1[:, None])
    error = (hidden @ w2 + b2[:, None]).softmax(-1) - targets
    back = (error @ w2.mT) * (1 - hidden.square())
    return [(with_one(inputs), back), (with_one(hidden), error)]


def with_one(x: Tensor) -> Tensor:
    """Inputs and a 1 beside them."""
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


def piece_gradients(x: Tensor, error: Tensor, chosen: Tensor) -> Tensor:
    """The mean gradient of each piece: [runs, pieces, parameters], weights before biases.

    Args:
        x: a layer's inputs, [examples, inputs] or [runs, examples, inputs].
        error: the gradient of its outputs, [runs, examples, outputs].
        chosen: the examples of each piece, [runs, pieces, units].
    """
    run = torch.arange(len(error))[:, None, None]
    x_chosen = x[chosen] if x.dim() == 2 else x[run, chosen]  # [runs, pieces, units, inputs]
    return (x_chosen.mT @ error[run, chosen]).flatten(2) / chosen.shape[2]


def estimated_and_exact(pieces: Tensor, x: Tensor, error: Tensor) -> Tensor:
    """tr Σ and |G|² of a layer: both estimated from its pieces, then both exact; [runs, 4].

    Args:
        pieces: mean gradients, [runs, pieces, parameters].
        x: the layer's inputs, as `layers` gives them.
        error: the gradient of its outputs.
    """
    small_sq, big_sq = pieces.square().sum(2).mean(1), pieces.mean(1).square().sum(1)
    u, v = 1 / UNITS_PER_PIECE, 1 / BATCH
    grad_sq = (x.mT @ error / error.shape[1]).square().sum((1, 2))
    sq_norms = x.square().sum(-1) * error.square().sum(-1)  # of outer products; [runs, examples]
    estimates = [(small_sq - big_sq) / (u - v), (u * big_sq - v * small_sq) / (u - v)]
    return torch.stack([*estimates, sq_norms.mean(1) - grad_sq, grad_sq], -1)


def move(optimizer: str, lr: float, step: int, weight: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> None:
    """One step of SGD, SGD with momentum 0.9, or AdamW with its usual constants, in place."""
    if optimizer == "adamw":
        weight.mul_(1 - lr * 0.01)
        m.mul_(0.9).add_(grad, alpha=0.1)
        v.mul_(0.999).addcmul_(grad, grad, value=0.001)
        weight.sub_(lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))
    else:
        m.mul_(0.9 if optimizer == "momentum" else 0.0).add_(grad)
        weight.sub_(lr * m)


def cells(
    optimizer: str,
    lr: float,
    windows: Windows,
    *,
    horizon: float = HORIZON,
    checkpoints: tuple[int, ...] = CHECKPOINTS,
) -> Iterator[Cell]:
    """Judge the intervals at every checkpoint, for the total and both layers."""
    n_runs, n_windows, n_layers = windows.trace_cov.shape
    layers = [f"layer {i}" for i in range(n_layers)]
    histories = [WindowHistory(layers, horizon) for _ in range(n_runs)]
    averages = [[RunningNoiseScale(100.0) for _ in range(n_layers + 1)] for _ in range(n_runs)]
    x, y = windows.trace_cov.tolist(), windows.grad_sq.tolist()
    for t in range(n_windows):
        for run in range(n_runs):
            layers_now = list(zip(x[run][t], y[run][t], strict=True))
            parts = [(sum(x[run][t]), sum(y[run][t])), *layers_now]
            for average, part in zip(averages[run], parts, strict=True):
                average.update(WindowEstimate(*part))
            histories[run].add(as_window(layers_now), t + 1)
        if t + 1 not in checkpoints:
            continue
        series = [history.series()[0][1] for history in histories]
        for part, name in enumerate(PARTS[: n_layers + 1]):
            fits = fit_alike(series, part, horizon)
            of = slice(None) if part == 0 else slice(part - 1, part)
            exact_x, exact_y = (e[:, t, of].sum(1) for e in (windows.exact_trace_cov, windows.exact_grad_sq))
            present = (exact_x / exact_y).tolist()
            resolved = [(fit, now) for fit, now in zip(fits, present, strict=True) if fit.interval.status == "resolved"]
            yield Cell(
                optimizer,
                lr,
                name,
                t + 1,
                statistics.median(present),
                sum(holds(fit.interval, now) for fit, now in zip(fits, present, strict=True)) / n_runs,
                len(resolved) / n_runs,
                statistics.median((fit.ratio or 0.0) / now for fit, now in resolved) if resolved else None,
                statistics.median((f.interval.high or 0.0) / (f.interval.low or 1.0) for f, _ in resolved)
                if resolved
                else None,
                sum(holds(own[part].interval(), now) for own, now in zip(averages, present, strict=True)) / n_runs,
                sum(fit.interval.status == "unresolved" for fit in fits) / n_runs,
            )


def fit_alike(series: list[Series], part: int, horizon: float) -> list[TrendFit]:
    """The trend of one part in every run; runs that kept windows of the same ages are fitted in one call."""
    fits: dict[int, TrendFit] = {}
    for ages in {tuple(each.ages.tolist()) for each in series}:
        runs = [i for i, each in enumerate(series) if tuple(each.ages.tolist()) == ages]
        rows = [torch.stack([getattr(series[i], name)[part] for i in runs]) for name in ("trace_cov", "grad_sq")]
        fits |= dict(zip(runs, fit_trends(*rows, series[runs[0]].ages, horizon), strict=True))
    return [fits[i] for i in range(len(series))]


def as_window(layers: list[tuple[float, float]]) -> SolvedWindow:
    """A window as the probe solves it."""
    per_group = tuple(WindowEstimate(*layer) for layer in layers)
    total = WindowEstimate(sum(x for x, _ in layers), sum(y for _, y in layers))
    norm = math.sqrt(total.grad_sq + total.trace_cov / BATCH)
    return SolvedWindow(total, per_group, None, norm, BATCH, 1 / UNITS_PER_PIECE, 1.0, 1.0)


def holds(interval: RatioInterval, value: float) -> bool:
    """Whether an interval of any kind holds a value; one that is not known holds every value."""
    low, high = interval.low, interval.high
    return low is None or high is None or low <= value <= high


def as_table(found: list[Cell]) -> str:
    """One row for each setting and part; a cell has coverage, of the average in brackets, share resolved and width."""
    checkpoints = list(dict.fromkeys(c.window for c in found))
    head = "| optimizer | lr | part | " + " | ".join(f"window {t}" for t in checkpoints) + " |"
    lines = [head, "|" + "---|" * (3 + len(checkpoints))]
    for optimizer, lr in dict.fromkeys((c.optimizer, c.lr) for c in found):
        for part in dict.fromkeys(c.part for c in found):
            row = [c for c in found if (c.optimizer, c.lr, c.part) == (optimizer, lr, part)]
            texts = [
                f"B {c.present:.0f}: {100 * c.covered:.1f} % ({100 * c.average_covered:.0f} %), "
                f"{100 * c.resolved:.0f} %, {f'{c.width:.1f}' if c.width else '–'}"
                for c in row
            ]
            lines.append(f"| {optimizer} | {lr} | {part} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def summary(found: list[Cell]) -> str:
    """The whole table in a few lines."""
    covered, by_average = [c.covered for c in found], [c.average_covered for c in found]
    near = [c for c in found if c.present < 4 * BATCH]
    biases = [c.bias for c in near if c.bias is not None]
    widths = [c.width for c in near if c.width is not None]
    return (
        f"- {len(found)} cells: present value held in {100 * statistics.mean(covered):.1f} % on average, "
        f"{100 * min(covered):.1f} % to {100 * max(covered):.1f} %; below 90 %: {sum(c < 0.9 for c in covered)} cells, "
        f"above 98 %: {sum(c > 0.98 for c in covered)}.\n"
        f"- Not known, which counts as held: {100 * statistics.mean(c.unknown for c in found):.1f} % on average, "
        f"{100 * max(c.unknown for c in found):.1f} % at most.\n"
        f"- By the average over 100 windows: {100 * statistics.mean(by_average):.1f} % on average, "
        f"{100 * min(by_average):.1f} % at worst.\n"
        f"- {len(near)} cells with B_simple below 4 × batch: two-sided in at least "
        f"{100 * min(c.resolved for c in near):.1f} %; estimate over present value {min(biases):.2f} to "
        f"{max(biases):.2f} (medians); upper over lower end {statistics.median(widths):.1f} in the median cell, "
        f"{max(widths):.1f} at most."
    )


def compare_horizons(found: Mapping[float, list[Cell]]) -> str:
    """One row for each horizon: coverage, and the width where B_simple is below 4 × batch."""
    lines = [
        "| horizon | coverage, mean | lowest | highest | cells below 90 % | two-sided at least | width, median cell |",
        "|---|---|---|---|---|---|---|",
    ]
    for horizon, of_horizon in found.items():
        covered = [c.covered for c in of_horizon]
        near = [c for c in of_horizon if c.present < 4 * BATCH]
        widths = [c.width for c in near if c.width is not None]
        lines.append(
            f"| {horizon:g} | {100 * statistics.mean(covered):.1f} % | {100 * min(covered):.1f} % | "
            f"{100 * max(covered):.1f} % | {sum(c < 0.9 for c in covered)} of {len(covered)} | "
            f"{100 * min(c.resolved for c in near):.1f} % | {statistics.median(widths):.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run all settings and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[float, list[Cell]] = {horizon: [] for horizon in HORIZONS}
    for optimizer, lr in SETTINGS:
        windows = simulate(optimizer, lr, n_runs=options.runs, n_windows=max(CHECKPOINTS))
        for horizon, of_horizon in found.items():
            of_horizon += cells(optimizer, lr, windows, horizon=horizon)
        print(f"{optimizer} {lr}: done", flush=True)
    fallen: list[Cell] = []
    for optimizer, lr in FALLS:
        windows = simulate(optimizer, lr, n_runs=options.runs, n_windows=max(FALL_CHECKPOINTS), fall_after=FALL_AFTER)
        fallen += cells(optimizer, lr, windows, checkpoints=FALL_CHECKPOINTS)
    tails = [
        cell
        for dof in TAILS
        for cell in cells(f"t, {dof} degrees of freedom", 0.0, heavy_tailed(dof, n_runs=options.runs, n_windows=400))
        if cell.part == "total"
    ]
    machine = ", ".join(f"{name}: {value}" for name, value in describe("cpu", ()).items())
    text = (
        "# Does the interval hold the present noise scale?\n\n"
        f"`python -m benchmarks.present_noise_scale --runs {options.runs}`, {machine}.\n\n"
        f"Batch {BATCH}, horizon {HORIZON:g}. A cell: the exact B_simple (median), coverage of the present value by "
        "the trend (in brackets: by the ratio of averages over 100 windows), the share of two-sided intervals, and "
        f"their width, upper over lower end (median).\n\n{summary(found[HORIZON])}\n\n{as_table(found[HORIZON])}\n\n"
        "## Which horizon?\n\n"
        "The same windows. The last two columns are of cells with B_simple below 4 × batch.\n\n"
        f"{compare_horizons(found)}\n\n"
        f"## The learning rate falls to a tenth after window {FALL_AFTER}\n\n{as_table(fallen)}\n\n"
        "## Heavy tails\n\nA constant gradient, B_simple equal to the batch. The length of each piece's noise follows "
        f"Student's t.\n\n{as_table(tails)}\n"
    )
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "present_noise_scale.md").write_text(text)
    (options.out / "present_noise_scale.json").write_text(
        json.dumps(
            {
                "moving weights": [asdict(cell) for cell in found[HORIZON]],
                "after a fall": [asdict(cell) for cell in fallen],
                "heavy tails": [asdict(cell) for cell in tails],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
