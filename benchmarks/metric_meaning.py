"""What batch size the sign and spectral noise scales speak of: exact values, and what two batch sizes show of them.

    python -m benchmarks.metric_meaning             # writes benchmarks/results/metric_meaning.md; 1 to 2 minutes
    python -m benchmarks.metric_meaning --quick

A step of fixed length d(g), the signs of g or its orthogonal factor, promises the gain ‖g‖ = ⟨g, d(g)⟩ in the dual
norm, and really gains ⟨G, d(g)⟩. With the noise of a batch B, g = G + ε/√B, let f(B) be the expected promise and P(B)
the expected real gain. The noise scale at B is B (f/P − 1): the batch itself where half of the promise is real.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor

RESULTS = Path(__file__).parent / "results" / "metric_meaning.md"
N_PIECES = 8
BATCHES = (0.01, 0.1, 1.0, 10.0)
"""Batch sizes, in units of B_simple."""
N_ELEMENTS, ROWS, COLUMNS = 100_000, 64, 128


@dataclass(frozen=True)
class Options:
    """How exact the numbers are.

    Attributes:
        draws: matrices drawn for each expectation of a spectral norm.
        quick: few draws, and nothing is written.
    """

    draws: int = 400
    quick: bool = False


@dataclass(frozen=True)
class Gains:
    """What a step of fixed length promises and gains at one batch size.

    Attributes:
        promised: f, the expected dual norm of the batch's gradient.
        promised_sq: its expected square.
        real: P, the expected gain along the true gradient.
    """

    promised: float
    promised_sq: float
    real: float


GainsAt = Callable[[float], Gains]


def sign_gains(signal: Tensor, batch: float) -> Gains:
    """In closed form, for independent Gaussian noise of variance 1 a unit in each element; signal: [elements]."""
    deviation = 1.0 / math.sqrt(batch)
    real = signal.abs() * torch.erf(signal.abs() / (deviation * math.sqrt(2.0)))
    promised = real + deviation * math.sqrt(2.0 / math.pi) * torch.exp(-0.5 * (signal / deviation).square())
    variance = signal.square() + deviation**2 - promised.square()  # of |g_j|
    mean = float(promised.sum())
    return Gains(mean, mean**2 + float(variance.sum()), float(real.sum()))


def spectral_gains(signal: Tensor, batch: float, draws: int) -> Gains:
    """By Monte Carlo, with the same noise for every batch size; signal: [rows, columns]."""
    generator = torch.Generator().manual_seed(0)
    norms, gains = [], []
    for _ in range(draws // 2):
        noise = torch.randn(signal.shape, generator=generator, dtype=torch.float64) / math.sqrt(batch)
        for antithetic in (noise, -noise):
            u, values, v = torch.linalg.svd(signal + antithetic, full_matrices=False)
            norms.append(float(values.sum()))
            gains.append(float((signal * (u @ v)).sum()))
    n = len(norms)
    return Gains(sum(norms) / n, sum(x * x for x in norms) / n, sum(gains) / n)


def local_noise_scale(gains: GainsAt, batch: float) -> float:
    """B (f/P − 1), exactly."""
    at = gains(batch)
    return batch * (at.promised / at.real - 1.0)


def measured_noise_scale(gains: GainsAt, batch: float, n_pieces: int = N_PIECES) -> float:
    """What windows of equal pieces show on average: tr Σ over |G|², from squared norms at two batch sizes."""
    u, v = n_pieces / batch, 1.0 / batch
    small, big = gains(batch / n_pieces).promised_sq, gains(batch).promised_sq
    return (small - big) / (u * big - v * small)


def half_way(gains: GainsAt, most: float) -> float:
    """The batch size at which a step of the best length gains half of what the true gradient's would: P² = most²/2."""
    low, high = 1e-9, 1e15
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gains(middle).real ** 2 < 0.5 * most**2 else (low, middle)
    return math.sqrt(low * high)


def signals() -> dict[str, Tensor]:
    """Elements of true gradients, by what they are like."""
    torch.manual_seed(0)
    normal = torch.randn(N_ELEMENTS, dtype=torch.float64)
    few = torch.rand(N_ELEMENTS) < 0.01
    return {
        "all alike": torch.ones(N_ELEMENTS, dtype=torch.float64),
        "Gaussian": normal,
        "log-normal, σ = 1": normal.exp(),
        "log-normal, σ = 2": (2.0 * normal).exp(),
        "1 % of the elements, 0 elsewhere": few.double(),
    }


def matrices() -> dict[str, Tensor]:
    """True gradients of a matrix, by their singular values."""
    torch.manual_seed(0)
    full = torch.randn(ROWS, COLUMNS, dtype=torch.float64)
    u, _, v = torch.linalg.svd(full, full_matrices=False)
    falling = 1.0 / torch.arange(1, ROWS + 1, dtype=torch.float64)
    return {
        "Gaussian": full,
        "singular values 1, 1/2, 1/3, …": u @ torch.diag(falling) @ v,
        f"rank {ROWS // 8}": u[:, : ROWS // 8] @ v[: ROWS // 8],
        "rank 1": u[:, :1] @ v[:1],
    }


def rows(options: Options, metrics: Sequence[str] = ("sign", "spectral")) -> list[Sequence[object]]:
    """Metric, signal, half-way batch, and for each batch size the exact and the measured noise scale; over B_simple."""
    draws = 20 if options.quick else options.draws
    cases: list[tuple[str, str, Tensor, GainsAt, float]] = []
    for name, signal in signals().items():
        cases.append(("sign", name, signal, lambda b, s=signal: sign_gains(s, b), float(signal.abs().sum())))  # type: ignore[misc]
    for name, signal in matrices().items():
        most = float(torch.linalg.svdvals(signal).sum())
        cases.append(("spectral", name, signal, lambda b, s=signal: spectral_gains(s, b, draws), most))  # type: ignore[misc]
    table = []
    for metric, name, signal, gains, most in (case for case in cases if case[0] in metrics):
        plain = signal.numel() / float(signal.square().sum())
        row: list[object] = [metric, name, _number(half_way_of(metric, gains, signal, most) / plain)]
        for at in BATCHES:
            batch = at * plain
            exact, measured = local_noise_scale(gains, batch), measured_noise_scale(gains, batch)
            row.append(f"{_number(exact / plain)}, {_number(measured / plain)}")
        table.append(row)
    return table


def half_way_of(metric: str, gains: GainsAt, signal: Tensor, most: float) -> float:
    """`half_way`, with fewer draws for matrices, whose gain hardly varies from draw to draw."""
    return half_way(gains if metric == "sign" else lambda b: spectral_gains(signal, b, 10), most)


def _number(value: float) -> str:
    return f"{value:.3g}"


def markdown(options: Options) -> str:
    """The page."""
    head = ["metric", "true gradient", "half way", *(f"batch {at:g}" for at in BATCHES)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows(options)]
    text = (
        "Command: `python -m benchmarks.metric_meaning`. Gaussian noise of the same variance in every element; "
        f"{N_ELEMENTS:,} elements, or a matrix of {ROWS} × {COLUMNS}. All numbers are in units of B_simple. Each cell "
        f"of a batch size has two: the exact B (f/P − 1), and what windows of {N_PIECES} pieces show on average. Half "
        "way is the batch at which a step of the best length gains half of what the true gradient's would. For the "
        "plain norm all of these are 1. Spectral numbers are by Monte Carlo."
    )
    return "\n\n".join(["# What the sign and spectral noise scales speak of", text, "\n".join(lines)]) + "\n"


def main() -> None:
    """Print the table, and write it unless the run was quick."""
    options = tyro.cli(Options)
    page = markdown(options)
    print(page)
    if not options.quick:
        RESULTS.write_text(page)


if __name__ == "__main__":
    main()
