"""Study "regression": the exact expectations of SGD on a linear regression, with and without momentum.

Inputs are Gaussian with covariance H = diag(h), outputs have noise of variance σ² in all. Let e be the error of the
weights, [outputs, dims], v the momentum buffer, and p, q, r the diagonals of E[eᵀe], E[eᵀv], E[vᵀv]. A batch's gradient
g = e Ĥ − noise has, for Gaussian inputs,

    diag E[gᵀg] = (1 + 1/B) h² p + (h/B) (Σ h p + σ²)

so that v ← β v + g and e ← e − η v close on p, q, r. The expected loss is Σ h p/2 above its least value. This is the
study's own oracle: sampled trainings, noise scales and branches must agree with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evidence.tasks import ROW_NOISE, spectrum, task, true_weights
from evidence.work import Arguments, Study

BATCHES = tuple(2**k for k in range(11))
PER_OCTAVE = 4
"""Rates that are tried, for each factor of 2."""
MOST_STEPS = 60_000
POINTS = (0.2, 0.5, 0.9)
"""Parts of a training at which its noise scales are given."""


@dataclass
class Moments:
    """Expected squares of the errors and of the momentum buffer, for many rates: p, q and r, [rates, dims]."""

    p: Tensor
    q: Tensor
    r: Tensor

    @classmethod
    def begun(cls, n_rates: int) -> Moments:
        """Of weights at 0."""
        p = true_weights().double().square().sum(0).repeat(n_rates, 1)
        return cls(p, torch.zeros_like(p), torch.zeros_like(p))

    def step(self, batch: float, rates: Tensor, beta: float) -> None:
        """One step of all; rates: [rates, 1], as torch means them."""
        h = eigenvalues()
        of_gradient = (1 + 1 / batch) * h.square() * self.p + h / batch * (loss_twice(self.p) + ROW_NOISE**2)
        self.r = beta**2 * self.r + 2 * beta * h * self.q + of_gradient
        with_buffer = beta * self.q + h * self.p
        self.p = self.p - 2 * rates * with_buffer + rates.square() * self.r
        self.q = with_buffer - rates * self.r


def eigenvalues() -> Tensor:
    """Of the Hessian: [dims]."""
    return spectrum().double()


def loss_twice(p: Tensor) -> Tensor:
    """Twice the expected loss above its least value: [..., 1]."""
    return (eigenvalues() * p).sum(-1, keepdim=True)


def noise_scales(p: Tensor) -> tuple[float, float]:
    """B_simple = tr Σ/|G|² and B_noise = tr(HΣ)/GᵀHG where errors have the squares p: [dims]; expectations of each.

    Reference:
        McCandlish et al. 2018, arXiv:1812.06162, equations 2.8 and 2.9.
    """
    h, around = eigenvalues(), float(loss_twice(p)) + ROW_NOISE**2
    of_gradient, curved = float((h.square() * p).sum()), float((h**3 * p).sum())
    return 1 + float(h.sum()) * around / of_gradient, 1 + float(h.square().sum()) * around / curved


def units_to_targets(batch: int, beta: float, targets: Sequence[float], powers: Sequence[float]) -> Tensor:
    """Units that each effective rate needs for each target, by straight lines between steps; [targets, rates]."""
    rates = torch.tensor([[2.0**power * (1 - beta)] for power in powers], dtype=torch.float64)
    moments = Moments.begun(len(powers))
    needed = torch.full((len(targets), len(powers)), math.inf, dtype=torch.float64)
    before = loss_twice(moments.p)[:, 0] / 2
    for n_steps in range(MOST_STEPS):
        moments.step(batch, rates, beta)
        loss = loss_twice(moments.p)[:, 0] / 2
        for k, target in enumerate(targets):
            is_there = (loss <= target) & torch.isinf(needed[k])
            needed[k, is_there] = batch * (n_steps + (before - target) / (before - loss))[is_there]
        if n_steps > 2 * float(needed[-1].min()) / batch:  # the best rate is known
            break
        before = loss
    return needed


def run(batch: int, beta: float) -> Mapping[str, Any]:
    """The best rate of each target, what it needs, and the noise scales along it."""
    targets = task("regression").targets
    powers = [k / PER_OCTAVE for k in range(-6 * PER_OCTAVE, 6 * PER_OCTAVE)]
    needed = units_to_targets(batch, beta, targets, powers)
    best = [int(k) for k in needed.argmin(1)]
    moments, scales = Moments.begun(1), []
    rate = torch.tensor([[2.0 ** powers[best[-1]] * (1 - beta)]], dtype=torch.float64)
    n_steps = float(needed[-1].min()) / batch
    at = {round(part * n_steps) for part in POINTS}
    for step in range(max(at) + 1):
        if step in at:
            scales.append([step * batch, float(loss_twice(moments.p[0])) / 2, *noise_scales(moments.p[0])])
        moments.step(batch, rate, beta)
    units = [float(needed[k, of]) for k, of in enumerate(best)]
    return {"units": units, "powers": [powers[k] for k in best], "noise_scales": scales}


def pieces(smoke: bool) -> Sequence[Arguments]:
    """Every batch, without and with momentum."""
    return [{"batch": batch, "beta": beta} for beta in (0.0, 0.9) for batch in ((256,) if smoke else BATCHES)]


STUDY = Study("regression", pieces, run)
