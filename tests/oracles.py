"""Oracles that estimators are compared with: slow, obvious and right, in float64 throughout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Loss = Callable[[Tensor, Tensor], Tensor]


def per_example_gradients(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> Tensor:
    """Every example's own gradient, flattened: [examples, parameters]."""
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def example_loss(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(functional_call(model, p, (x[None],)), y[None])

    grads = vmap(grad(example_loss), in_dims=(None, 0, 0))(parameters, inputs, targets)
    return torch.cat([g.flatten(1) for g in grads.values()], dim=1).double()


@dataclass(frozen=True)
class Population:
    """Exact moments of the gradients of a finite population, sampled with replacement."""

    grad_sq: float
    trace_cov: float

    @property
    def b_simple(self) -> float:
        return self.trace_cov / self.grad_sq


def population(per_example: Tensor) -> Population:
    """|G|² and tr Σ, exactly; per_example: [examples, parameters]."""
    mean = per_example.mean(0)
    return Population(float(mean @ mean), float((per_example - mean).square().sum(1).mean()))


@torch.no_grad()  # gradients may have a graph, and torch 2.9 warns of numbers taken from it
def window_by_hand(
    gradients: Sequence[Tensor], weights: Sequence[float], units: Sequence[float], final: Tensor
) -> tuple[float, float]:
    """tr Σ and |G|² of one window, from whole gradients h_k and F: the definitions, term by term."""
    total = sum(weights)
    kappa = float(final @ sum(gradients)) / float(sum(gradients) @ sum(gradients))
    small = u = v = 0.0
    for h, w, n in zip(gradients, weights, units, strict=True):
        a = w / total
        g = kappa * h / a
        small += a * float(g @ g)
        u += a / n
        v += a * a / n
    big = float(final @ final)
    return (small - big) / (u - v), (u * big - v * small) / (u - v)


@dataclass(frozen=True)
class FilteredBlock:
    """Neighbouring windows of one series; both estimates over the size of their gradients."""

    log_time: float
    n_windows: int
    mean_trace_cov: float
    mean_grad_sq: float
    scatter: Sequence[Sequence[float]]
    rate: float | None = None


def filtered_noise_scale(
    blocks: Sequence[FilteredBlock],
    *,
    log_b: Sequence[float],
    drifts: Sequence[float],
    drift_weights: Sequence[float],
    spreads: Sequence[float],
    spread_weights: Sequence[float],
    persistence: float,
    between_jumps: float,
    jump: float,
    anywhere: float,
    memory: float,
    least_variance: float,
    most_by_rate: float,
) -> list[list[list[float]]]:
    """The probability of each log B of a grid with each drift and each spread, after some blocks of windows.

    Between two blocks, log B drifts and spreads, and spreads by the change of the log of the learning rate. One part of
    the probability takes another drift and spread, and one part jumps. At its ends, the density goes on as it is there.
    The constants are those of the filter.

    Returns:
        Probabilities, [drifts, spreads, grid].
    """
    step, n = log_b[1] - log_b[0], len(log_b)

    def at(density: Sequence[float], place: float) -> float:
        """The density between two points of the grid."""
        place = min(max(place, 0.0), n - 1.0)
        below = min(int(place), n - 2)
        return density[below] + (place - below) * (density[below + 1] - density[below])

    def spread_by(density: Sequence[float], deviation: float, widest: float) -> list[float]:
        reach = math.ceil(4 * widest / step)
        kernel = {k: math.exp(-((k * step / deviation) ** 2) / 2) for k in range(-reach, reach + 1)}
        total = sum(kernel.values())
        return [sum(kernel[k] * density[min(max(i + k, 0), n - 1)] for k in kernel) / total for i in range(n)]

    def moved(density: Sequence[Sequence[Sequence[float]]], time: float) -> list[list[list[float]]]:
        """After some log time in which nothing was measured."""
        stays, jumps, root = math.exp(-time / persistence), 1 - math.exp(-time / between_jumps), math.sqrt(time)
        later = [
            [
                spread_by([at(own, i - drift * time / step) for i in range(n)], s * root, max(spreads) * root)
                for s, own in zip(spreads, row, strict=True)
            ]
            for drift, row in zip(drifts, density, strict=True)
        ]
        total = [sum(own[i] for row in later for own in row) for i in range(n)]
        far = spread_by(total, jump, jump)
        for d, s, i in itertools.product(range(len(drifts)), range(len(spreads)), range(n)):
            anew = drift_weights[d] * spread_weights[s]
            jumped = (1 - anywhere) * far[i] + anywhere * sum(total) / n
            not_jumped = stays * later[d][s][i] + (1 - stays) * anew * total[i]
            later[d][s][i] = (1 - jumps) * not_jumped + jumps * anew * jumped
        return later

    density = [[[a * s / n] * n for s in spread_weights] for a in drift_weights]
    scatter, freedom, before = [[0.0, 0.0], [0.0, 0.0]], 0.0, None
    for block in blocks:
        scatter = [[(1 - 1 / memory) * scatter[i][j] + block.scatter[i][j] for j in (0, 1)] for i in (0, 1)]
        freedom = (1 - 1 / memory) * freedom + block.n_windows - 1
        (xx, xy), (_, yy) = [[entry / freedom / block.n_windows for entry in row] for row in scatter]
        likelihood = []
        for b in map(math.exp, log_b):
            variance = xx - 2 * b * xy + b * b * yy + least_variance * (1 + b * b)
            t_sq = (block.mean_trace_cov - b * block.mean_grad_sq) ** 2 / variance
            likelihood.append((1 + t_sq / freedom) ** (-(freedom + 1) / 2))
        density = moved(density, block.log_time / 2)  # to its middle
        if before is not None and block.rate is not None and before > 0 and block.rate > 0:
            by_rate = min(abs(math.log(block.rate) - math.log(before)), most_by_rate)
            if by_rate > step:
                density = [[spread_by(own, by_rate, by_rate) for own in row] for row in density]
        before = block.rate
        density = [[[p * ell for p, ell in zip(own, likelihood, strict=True)] for own in row] for row in density]
        density = moved(density, block.log_time / 2)
        mass = sum(each for row in density for own in row for each in own)
        density = [[[each / mass for each in own] for own in row] for row in density]
    return density
