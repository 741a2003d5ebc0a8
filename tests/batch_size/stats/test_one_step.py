"""B_noise and best steps from the loss after single steps: exact on what was made by the law, and honest on noise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sonde.batch_size.stats.one_step import LOOKS, CurvatureReading, Looks, read_looks

BATCHES = torch.tensor([4.0, 12.0, 36.0, 108.0, 324.0], dtype=torch.float64)


def by_law(slope: Tensor, curvature: Tensor, cubic: float = 0.0, *, scatter: float = 0.05) -> Tensor:
    """Changes of the loss at looks about the best step; [8 draws, 8 held-out batches, sizes, looks].

    Draws scatter about the law by a factor that is the same for all batch sizes, and so do held-out batches.
    """
    generator = torch.Generator().manual_seed(0)
    steps = slope / curvature
    at = torch.tensor(LOOKS, dtype=torch.float64) * steps.unsqueeze(1)
    looks = -slope.unsqueeze(1) * at + curvature.unsqueeze(1) * at**2 / 2
    looks = looks + cubic * (slope * steps).unsqueeze(1) * (at / steps.unsqueeze(1)) ** 3
    draws, held_out = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    draws, held_out = draws - draws.mean(), held_out - held_out.mean()  # so that the means are the law's
    return looks * (1 + scatter * (draws[:, None] + held_out))[:, :, None, None]


def read(changes: Tensor, steps: Tensor, *, is_linear: bool = True) -> CurvatureReading:
    return read_looks(Looks(changes, steps, BATCHES, is_linear), unit="rows", direction="SGD")


def linear(b_noise: float) -> tuple[Tensor, Tensor]:
    """Slope and curvature of each batch size, of a direction that is linear in the gradient."""
    return torch.full_like(BATCHES, 0.5), 2.0 * (1 + b_noise / BATCHES)


@pytest.mark.parametrize("b_noise", [3.0, 60.0, 5000.0])
def test_the_law_is_found_exactly(b_noise: float) -> None:
    slope, curvature = linear(b_noise)
    reading = read(by_law(slope, curvature), slope / curvature)
    assert reading.b_noise.status == "resolved"
    assert reading.b_noise.ratio == pytest.approx(b_noise, rel=1e-9)
    assert reading.largest_step == pytest.approx(0.25, rel=1e-9)
    assert reading.doubt == ""
    for step, a, b in zip(reading.steps, slope.tolist(), curvature.tolist(), strict=True):
        assert step.size.ratio == pytest.approx(a / b, rel=1e-9)
        assert step.fall == pytest.approx(a * a / (2 * b), rel=1e-9)


def test_a_direction_of_one_length_follows_the_law_of_the_fall() -> None:
    """As Muon's: its curvature does not depend on the batch, its slope falls as 1/√(1 + B_noise/B)."""
    slope, curvature = 0.5 / (1 + 60 / BATCHES).sqrt(), torch.full_like(BATCHES, 2.0)
    reading = read(by_law(slope, curvature), slope / curvature, is_linear=False)
    assert reading.b_noise.ratio == pytest.approx(60, rel=1e-9)
    assert reading.largest_step is None
    assert reading.steps[0].size.ratio == pytest.approx(0.25 / 4, rel=1e-9)


def test_a_loss_that_is_no_parabola_is_doubted() -> None:
    slope, curvature = linear(60.0)
    reading = read(by_law(slope, curvature, cubic=0.5), slope / curvature)
    assert reading.doubt == "at the best step for 4 rows the loss is no parabola any more"
    assert reading.b_noise.ratio == pytest.approx(60, rel=1e-9)  # of the curvature at the weights
    assert read(by_law(slope, curvature, cubic=0.05), slope / curvature).doubt == ""


def test_best_steps_that_follow_another_law_are_doubted() -> None:
    slope, _ = linear(60.0)
    curvature = 2.0 * (1 + (60 / BATCHES).sqrt())
    assert "do not follow 1 + B_noise/B" in read(by_law(slope, curvature), slope / curvature).doubt


@pytest.mark.parametrize(
    ("signal", "noise", "status", "says"),
    [
        (0.0, 60.0, "lower_bound", "the curvature along the mean gradient cannot be distinguished from 0"),
        (1.0, 0.0, "upper_bound", "the part of the noise cannot be distinguished from 0"),
        (-1.0, 0.0, "unresolved", "cannot be distinguished from 0"),
    ],
)
def test_what_is_not_resolved_has_a_reason(signal: float, noise: float, status: str, says: str) -> None:
    slope = torch.full_like(BATCHES, 0.5)
    curvature = signal + noise / BATCHES
    generator = torch.Generator().manual_seed(3)
    steps = torch.ones_like(BATCHES)
    looks = -slope.unsqueeze(1) * torch.tensor(LOOKS) + curvature.unsqueeze(1) * torch.tensor(LOOKS) ** 2 / 2
    scatter = torch.randn(8, 8, 5, 1, generator=generator, dtype=torch.float64) * (0.3 + noise / BATCHES[:, None])
    scatter -= scatter.mean((0, 1))
    reading = read(looks + scatter * torch.tensor(LOOKS) ** 2, steps)
    assert reading.b_noise.status == status
    assert says in reading.b_noise.reason
    assert reading.b_noise.ratio is None


def test_too_few_draws_or_losses_that_are_not_finite_have_a_reason() -> None:
    slope, curvature = linear(60.0)
    changes, steps = by_law(slope, curvature), slope / curvature
    few = read(changes[:3], steps)
    assert few.b_noise.reason == "3 draws and 8 held-out batches are too few: give data for 4 of each"
    assert str(few) == f"B_noise not known ({few.b_noise.reason})"
    changes[0, 0, 0, 0] = math.nan
    assert "not finite after a step" in read(changes, steps).b_noise.reason


def test_the_words() -> None:
    slope, curvature = linear(60.0)
    text = str(read(by_law(slope, curvature, cubic=0.5), slope / curvature))
    assert text.startswith("B_noise 60 rows [")
    assert ". Best single step: 0.0156 at a batch of 4, 0.211 at a batch of 324. In doubt: at the best step" in text
    looks = Looks(by_law(slope, curvature), slope / curvature, BATCHES, True)
    assert "0.211 × AdamW's learning rate at" in str(read_looks(looks, unit="rows", direction="AdamW"))


def simulated(generator: torch.Generator, signal: Tensor, spread: Tensor, hessian: Tensor) -> Looks:
    """A measurement of a quadratic loss: nested batches of Gaussian gradients, held-out batches with their own H."""
    counts = torch.tensor([1, 2, 6, 18, 54], dtype=torch.float64) * 4  # units that each batch adds
    noise = torch.randn(12, 5, len(signal), generator=generator, dtype=torch.float64)
    total = (noise * (spread * counts[:, None]).sqrt() + counts[:, None] * signal).cumsum(1)
    direction = total / BATCHES[:, None]  # [draws, sizes, parameters]
    held = torch.randn(2, 16, len(signal), generator=generator, dtype=torch.float64)
    gradients, hessians = signal + held[0] * (spread / 4).sqrt(), hessian * (0.5 * held[1] - 0.125).exp()
    a = torch.einsum("dkp,hp->dhk", direction, gradients)
    b = torch.einsum("dkp,hp->dhk", direction.square(), hessians)
    steps = (signal @ signal) / (signal @ (hessian * signal) + (hessian @ spread) / BATCHES)
    at = torch.tensor(LOOKS, dtype=torch.float64) * steps.unsqueeze(1)
    return Looks(-a.unsqueeze(-1) * at + b.unsqueeze(-1) * at**2 / 2, steps, BATCHES, True)


@pytest.mark.parametrize(("power", "b_noise"), [(1.0, 30.0), (0.0, 300.0)])
def test_the_interval_holds_the_true_value_as_often_as_it_says(power: float, b_noise: float) -> None:
    """B_noise is 30 and 1/30 of B_simple. The standard error of a coverage of 95 % in 200 is 1.5 %; four below."""
    generator = torch.Generator().manual_seed(0)
    hessian = torch.logspace(0, -3, 100, dtype=torch.float64)
    signal = torch.randn(100, generator=generator, dtype=torch.float64) * hessian.sqrt()
    spread = hessian**power
    spread *= b_noise * (signal @ (hessian * signal)) / (hessian @ spread)
    found = [
        read_looks(simulated(generator, signal, spread, hessian), unit="rows", direction="SGD").b_noise
        for _ in range(200)
    ]
    holds = [i.low <= b_noise <= i.high for i in found if i.low is not None and i.high is not None]
    assert sum(holds) / 200 >= 0.89
    ratios = sorted(i.ratio for i in found if i.ratio is not None)
    assert ratios[len(ratios) // 2] == pytest.approx(b_noise, rel=0.1)
