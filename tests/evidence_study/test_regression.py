"""The exact expectations of the regression against trainings with data, and against equations of the noise scale."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from evidence.laws import fit_law
from evidence.regression import Moments, eigenvalues, loss_twice, noise_scales, units_to_targets
from evidence.replicas import Replicas
from evidence.sweep import run
from evidence.tasks import draw_rows, held_out_rows, task, true_weights

RATE, BATCH, STEPS = 0.3, 4, 12


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_expected_losses_are_the_mean_of_trainings(beta: float) -> None:
    n = 400
    replicas = Replicas(task("regression"), f"sgd-{beta}" if beta else "sgd", range(n), [RATE])
    moments = Moments.begun(1)
    rates = torch.tensor([[RATE * (1 - beta)]], dtype=torch.float64)
    for _ in range(STEPS):
        replicas.step(BATCH)
        moments.step(BATCH, rates, beta)
    losses = replicas.held_out_losses().double()
    error = float(losses.std()) / math.sqrt(n)
    assert error < 0.1 * float(losses.mean())
    assert abs(float(losses.mean()) - float(loss_twice(moments.p)) / 2) < 4 * error


def test_held_out_rows_have_the_expected_loss_of_all() -> None:
    inputs, targets = held_out_rows()
    weights = true_weights() + 0.3
    p = (weights - true_weights()).double().square().sum(0)
    loss = float((inputs @ weights.T - targets).square().sum(1).mean()) / 2
    assert loss == pytest.approx(float(loss_twice(p)) / 2, rel=1e-5)


def test_noise_scales_are_those_of_single_gradients() -> None:
    """Weights at 0 and many rows: tr Σ, |G|², tr HΣ and GᵀHG from the gradients of each row."""
    inputs, outputs = (each.double() for each in draw_rows(20_000, torch.Generator().manual_seed(2)))
    gradients = -outputs[:, :, None] * inputs[:, None, :]  # [rows, outputs, dims]
    mean, h = gradients.mean(0), eigenvalues()
    around = (gradients - mean).square().sum(1).mean(0)
    signal = mean.square().sum(0)
    b_simple, b_noise = noise_scales(true_weights().double().square().sum(0))
    # Each ratio is known to about 1.5 %: heavy tails of products of Gaussians.
    assert float(around.sum() / signal.sum()) == pytest.approx(b_simple, rel=0.06)
    assert float((h * around).sum() / (h * signal).sum()) == pytest.approx(b_noise, rel=0.06)


def test_whole_trainings_without_momentum_obey_the_law_of_noise() -> None:
    batches = [1, 8, 64, 512]
    powers = [k / 4 for k in range(-16, 6)]
    units = [float(units_to_targets(batch, 0.0, [0.1], powers).min()) for batch in batches]
    fit = fit_law("noise", batches, [math.log(u) for u in units], [0.03] * 4, n_seeds=100)
    assert fit.misfit < 4
    assert 10 < fit.critical < 40


def test_the_sweep_finds_what_is_exact() -> None:
    """Of five trainings of each rate, which are √2 apart, the best needs nearly what the exact expectation does."""
    found = run("regression", "sgd", 64, n_seeds=5, n_rates=5, cap=None)
    powers = [k / 4 for k in range(-16, 6)]
    exact = units_to_targets(64, 0.0, task("regression").targets, powers).min(1).values
    for target, expected in enumerate(exact.tolist()):
        best = min(statistics.fmean(map(math.log, units[target])) for units in found["units"] if all(units[target]))
        assert math.exp(best) == pytest.approx(expected, rel=0.12)
