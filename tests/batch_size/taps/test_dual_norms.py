"""What the sign and spectral noise scales say of gradients whose moments are known exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sonde.batch_size.stats.noise_scale import noise_scale
from sonde.batch_size.taps.metric import GradientMetric, SignMetric, SpectralMetric, add_parts

N_PIECES, UNITS, WINDOWS = 4, 6, 300


METRICS: dict[str, GradientMetric] = {"sign": SignMetric(), "spectral": SpectralMetric([0])}


def _norm(metric: str, gradient: Tensor) -> Tensor:
    return add_parts(1, METRICS[metric].parts([0], [gradient]), torch.device("cpu"), squares=False)


def _measured(metric: str, signal: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """tr Σ and |G|² of each window, [windows], where every unit's gradient is the signal with Gaussian noise."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(WINDOWS):
        noise = torch.randn(N_PIECES, *signal.shape, generator=generator, dtype=torch.float64) / math.sqrt(UNITS)
        pieces = (signal + deviation * noise).float()
        small = torch.stack([_norm(metric, piece) for piece in pieces]).square().mean()
        big = _norm(metric, pieces.mean(0)).square()
        solved = noise_scale(float(small), float(big), n_small=UNITS, n_big=UNITS * N_PIECES)
        found.append((solved.trace_cov, solved.grad_sq))
    table = torch.tensor(found, dtype=torch.float64)
    return table[:, 0], table[:, 1]


def _absolute(signal: Tensor, deviation: Tensor, batch: float) -> tuple[Tensor, Tensor]:
    """E|g_j| and its variance for g_j ~ N(G_j, σ_j²/batch)."""
    s = deviation / math.sqrt(batch)
    mean = s * math.sqrt(2 / math.pi) * torch.exp(-(signal**2) / (2 * s**2)) + signal * torch.erf(
        signal / (s * math.sqrt(2))
    )
    return mean, signal**2 + s**2 - mean**2


def _solved(square: Callable[[float], float]) -> tuple[float, float]:
    """tr Σ and |G|² from expected squared norms, as a function of the batch, at a piece's and a window's."""
    small, big, u, v = square(UNITS), square(UNITS * N_PIECES), 1 / UNITS, 1 / (UNITS * N_PIECES)
    return (small - big) / (u - v), (u * big - v * small) / (u - v)


def _assert_mean(values: Tensor, expected: float) -> None:
    error = float(values.std()) / math.sqrt(len(values))
    assert abs(float(values.mean()) - expected) < 4 * error
    assert error < 0.05 * max(abs(expected), float(values.abs().mean()))


@pytest.mark.parametrize("size", [0.02, 0.3, 3.0])
def test_sign_windows_have_the_expectation_of_the_closed_form(size: float) -> None:
    """Below, near and above the noise scale; elements differ in signal and in noise."""
    generator = torch.Generator().manual_seed(1)
    signal = size * torch.randn(400, generator=generator, dtype=torch.float64).exp()
    deviation = torch.randn(400, generator=generator, dtype=torch.float64).exp()

    def square(batch: float) -> float:
        mean, variance = _absolute(signal, deviation, batch)
        return float(mean.sum() ** 2 + variance.sum())

    trace_cov, grad_sq = _measured("sign", signal, deviation)
    expected = _solved(square)
    _assert_mean(trace_cov, expected[0])
    error = float(grad_sq.std()) / math.sqrt(len(grad_sq))
    assert abs(float(grad_sq.mean()) - expected[1]) < 4 * error


@pytest.mark.parametrize("rank", [1, 8, 24])
def test_spectral_windows_have_the_expectation_of_singular_values(rank: int) -> None:
    """E‖G + ε/√B‖_*² at two batch sizes, by Monte Carlo with singular values of its own draws."""
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(n, rank, generator=generator, dtype=torch.float64) for n in (24, 40))
    signal = left @ right.t() / rank
    deviation = torch.full_like(signal, 3.0)

    def square(batch: float) -> float:
        noise = torch.randn(2000, 24, 40, generator=generator, dtype=torch.float64) * 3.0 / math.sqrt(batch)
        return float(torch.linalg.svdvals(signal + noise).sum(-1).square().mean())

    trace_cov, grad_sq = _measured("spectral", signal, deviation)
    expected = _solved(square)
    _assert_mean(trace_cov, expected[0])
    error = float(grad_sq.std()) / math.sqrt(len(grad_sq))
    assert abs(float(grad_sq.mean()) - expected[1]) < 5 * error  # of which one is the oracle's own
