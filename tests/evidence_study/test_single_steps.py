"""B_noise by single steps: exact on what was made by the law, honest on noise, and that of a known Hessian."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from evidence.branched import LOOK, batches_of
from evidence.regression import eigenvalues, noise_scales
from evidence.single_steps import LOOKS, SingleSteps, b_noise, read_looks
from evidence.tasks import OUTPUTS, ROW_NOISE, spectrum, true_weights
from evidence.training import Training
from torch import Tensor

from evidence import single_steps
from sonde.stats.intervals import RatioInterval

N_UNITS = torch.tensor([4.0, 12.0, 36.0, 108.0, 324.0], dtype=torch.float64)
AT = torch.tensor(LOOKS, dtype=torch.float64)


def by_law(slope: Tensor, curvature: Tensor, *, scatter: float = 0.05) -> Tensor:
    """Changes of the loss at looks about the best step; [8 draws, 8 held-out batches, sizes, looks].

    Draws scatter about the law by a factor that is the same for all batch sizes, and so do held-out batches. A cubic
    term, of which nothing depends on the batch, must make no difference.
    """
    generator = torch.Generator().manual_seed(0)
    at = AT * (slope / curvature).unsqueeze(1)
    looks = -slope.unsqueeze(1) * at + curvature.unsqueeze(1) * at**2 / 2 + 0.05 * (slope[0] * AT**3)
    draws, held_out = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    draws, held_out = draws - draws.mean(), held_out - held_out.mean()  # so that the means are the law's
    return looks * (1 + scatter * (draws[:, None] + held_out))[:, :, None, None]


def read(changes: Tensor, steps: Tensor, *, is_linear: bool = True) -> RatioInterval:
    return read_looks(changes, steps, N_UNITS, is_linear)


def linear(scale: float) -> tuple[Tensor, Tensor]:
    """Slope and curvature of each batch size, of a direction that is linear in the gradient."""
    return torch.full_like(N_UNITS, 0.5), 2.0 * (1 + scale / N_UNITS)


@pytest.mark.parametrize("scale", [3.0, 60.0, 5000.0])
def test_the_law_is_found_exactly(scale: float) -> None:
    slope, curvature = linear(scale)
    found = read(by_law(slope, curvature), slope / curvature)
    assert found.status == "resolved"
    assert found.ratio == pytest.approx(scale, rel=1e-9)


@pytest.mark.parametrize("axis", ["draws", "held-out batches"])
def test_the_interval_by_hand(axis: str) -> None:
    """Only the part of the noise scatters, over one axis: the interval is Student's, of 8 values."""
    noise = torch.tensor([40.0, 50.0, 55.0, 60.0, 60.0, 65.0, 70.0, 80.0], dtype=torch.float64)
    noise = noise[:, None] if axis == "draws" else noise[None, :]
    slope, curvature = linear(60.0)
    steps = slope / curvature
    at = AT * steps[:, None]
    of_each = 2.0 * (1 + noise.expand(8, 8)[:, :, None, None] / N_UNITS[:, None])
    found = read(-slope[:, None] * at + of_each * at**2 / 2, steps)
    reach = 2.3646 * (float(noise.var()) / 8) ** 0.5  # the 97.5 % quantile with 7 degrees of freedom
    assert (found.low, found.high) == pytest.approx((60 - reach, 60 + reach), rel=1e-4)


def test_a_direction_of_one_length_follows_the_law_of_the_fall() -> None:
    """As Muon's: its curvature does not depend on the batch, its slope falls as 1/√(1 + B_noise/B)."""
    slope, curvature = 0.5 / (1 + 60 / N_UNITS).sqrt(), torch.full_like(N_UNITS, 2.0)
    changes, steps = by_law(slope, curvature), slope / curvature
    assert read(changes, steps, is_linear=False).ratio == pytest.approx(60, rel=1e-9)
    few = read_looks(changes[:, :, :2], steps[:2], N_UNITS[:2], is_linear=False)
    assert few.reason == "along fewer than 3 batch sizes the fall of the loss is known well"


@pytest.mark.parametrize(
    ("signal", "noise", "status"),
    [(0.0, 60.0, "lower_bound"), (1.0, 0.0, "upper_bound"), (-1.0, 0.0, "unresolved")],
)
def test_what_is_not_resolved_has_no_ratio(signal: float, noise: float, status: str) -> None:
    curvature = signal + noise / N_UNITS
    generator = torch.Generator().manual_seed(3)
    looks = -0.5 * AT + curvature.unsqueeze(1) * AT**2 / 2
    scatter = torch.randn(8, 8, 5, 1, generator=generator, dtype=torch.float64) * (0.3 + noise / N_UNITS[:, None])
    scatter -= scatter.mean((0, 1))
    found = read(looks + scatter * AT**2, torch.ones_like(N_UNITS))
    assert (found.status, found.ratio) == (status, None)


def test_losses_that_are_not_finite_have_a_reason() -> None:
    slope, curvature = linear(60.0)
    changes = by_law(slope, curvature)
    changes[0, 0, 0, 0] = math.nan
    assert "not finite after a step" in read(changes, slope / curvature).reason


def simulated(generator: torch.Generator, signal: Tensor, spread: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """A measurement of a quadratic loss: nested batches of Gaussian gradients, held-out batches with their own H."""
    counts = torch.tensor([1, 2, 6, 18, 54], dtype=torch.float64) * 4  # units that each batch adds
    noise = torch.randn(12, 5, len(signal), generator=generator, dtype=torch.float64)
    total = (noise * (spread * counts[:, None]).sqrt() + counts[:, None] * signal).cumsum(1)
    direction = total / N_UNITS[:, None]  # [draws, sizes, parameters]
    held = torch.randn(2, 16, len(signal), generator=generator, dtype=torch.float64)
    gradients, hessians = signal + held[0] * (spread / 4).sqrt(), hessian * (0.5 * held[1] - 0.125).exp()
    a = torch.einsum("dkp,hp->dhk", direction, gradients)
    b = torch.einsum("dkp,hp->dhk", direction.square(), hessians)
    steps = (signal @ signal) / (signal @ (hessian * signal) + (hessian @ spread) / N_UNITS)
    at = AT * steps.unsqueeze(1)
    return -a.unsqueeze(-1) * at + b.unsqueeze(-1) * at**2 / 2, steps


@pytest.mark.parametrize(("along", "power", "scale", "b_simple"), [(0.5, -0.5, 30.0, 588.0), (-0.5, 0.5, 300.0, 4.54)])
def test_the_interval_holds_the_true_value_as_often_as_it_says(
    along: float, power: float, scale: float, b_simple: float
) -> None:
    """97 % of 200 in both cases. The standard error of a coverage of 95 % is 1.5 %: four of them are allowed."""
    generator = torch.Generator().manual_seed(0)
    hessian = torch.logspace(0, -3, 100, dtype=torch.float64)
    signal = torch.randn(100, generator=generator, dtype=torch.float64) * hessian**along
    spread = hessian**power
    spread *= scale * (signal @ (hessian * signal)) / (hessian @ spread)
    assert float(spread.sum() / (signal @ signal)) == pytest.approx(b_simple, rel=1e-3)
    found = [read(*simulated(generator, signal, spread, hessian)) for _ in range(200)]
    holds = [i.low <= scale <= i.high for i in found if i.low is not None and i.high is not None]
    assert sum(holds) / 200 >= 0.89
    ratios = sorted(i.ratio for i in found if i.ratio is not None)
    assert ratios[len(ratios) // 2] == pytest.approx(scale, rel=0.1)


# Trainings of the regression, whose Hessian and covariance are known at any weights.


def trained(kind: str) -> Training:
    training = Training("regression", kind, 8, seed=0)
    for _ in range(100):
        training.step()
    return training


def measured(training: Training, *, own_direction: bool, draws: int = 24) -> RatioInterval:
    batches = batches_of(training.kept(), LOOK)
    return b_noise(training, batches, own_direction=own_direction, sizes=(1, 3, 9, 27), draws=draws)


def holds(interval: RatioInterval, value: float) -> bool:
    assert interval.low is not None
    assert interval.high is not None
    return interval.low <= value <= interval.high < 3 * interval.low


def errors(training: Training) -> Tensor:
    (weights,) = training.model.parameters()
    return (weights.detach() - true_weights()).double()  # [outputs, dims]


def test_along_the_gradient_of_a_known_hessian(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is along directions of much curvature, so that B_simple is 1.8 times B_noise."""
    monkeypatch.setattr(single_steps, "N_HELD_OUT", 64)
    training = trained("sgd")
    (weights,) = training.model.parameters()
    with torch.no_grad():
        weights.copy_(true_weights() + 0.036 * spectrum().sqrt())
    b_simple, exact = noise_scales(errors(training).square().sum(0))
    found = measured(training, own_direction=False, draws=64)
    assert holds(found, exact)
    assert not holds(found, b_simple)


def test_along_adams_direction_of_a_known_hessian() -> None:
    """Its second moment is so old that a single gradient does not change it."""
    training = trained("adamw")
    (optimizer,), (weights,) = training.optimizers, training.model.parameters()
    e, h = errors(training), eigenvalues()
    p = torch.logspace(-1, 1, len(h), dtype=torch.float64).expand_as(e)
    beta = 1 - 1e-10
    optimizer.param_groups[0]["betas"] = (0.9, beta)
    optimizer.state[weights] |= {
        "step": torch.tensor(1e6),
        "exp_avg_sq": (p**-2 * (1 - beta**1_000_001)).float(),
    }
    # Of outputs times dims: the covariance of one row's gradient, (e x − noise) xᵀ with Gaussian x.
    around = h * ((e.square() @ h).unsqueeze(1) + ROW_NOISE**2 / OUTPUTS) + (h * e).square()
    exact = float((p * h * p * around).sum() / (h * (p * h * e).square()).sum())
    found = measured(training, own_direction=True)
    assert holds(found, exact)
    assert not holds(found, noise_scales(e.square().sum(0))[1])  # that of the plain gradient


@pytest.mark.parametrize(("kind", "is_linear"), [("sgd", True), ("muon", False)])
def test_a_direction_of_one_length_is_not_linear(kind: str, is_linear: bool) -> None:
    training = trained(kind)
    found = SingleSteps(training, batches_of(training.kept(), LOOK), True, (1, 9, 81)).find()
    assert found is not None
    assert found[1] == is_linear


@pytest.mark.parametrize("own_direction", [False, True])
def test_the_training_stays_as_it_is(own_direction: bool) -> None:
    training = trained("adamw")

    def state() -> tuple[Any, ...]:
        of_optimizers = [optimizer.state_dict() for optimizer in training.optimizers]
        return training.model.state_dict(), of_optimizers, [p.grad for p in training.model.parameters()]

    before = copy.deepcopy(state())
    measured(training, own_direction=own_direction)
    torch.testing.assert_close(state(), before, rtol=0, atol=0)


def test_a_loss_that_does_not_curve_has_a_reason() -> None:
    training = trained("sgd")
    training.task = dataclasses.replace(training.task, loss=lambda outputs, _: outputs.mean())
    assert "curves by no more than its rounding" in measured(training, own_direction=False).reason
