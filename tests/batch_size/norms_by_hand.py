"""The noise scale of one window in every metric, from whole gradients in float64: the definitions, term by term."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Gradient = Mapping[str, Tensor]
"""A gradient by name of the parameter, each in its own shape."""
Square = Callable[[Gradient], float]
"""The squared norm of a gradient."""


def euclidean(gradient: Gradient) -> float:
    return sum(float(g.double().square().sum()) for g in gradient.values())


def sign(gradient: Gradient) -> float:
    return sum(float(g.double().abs().sum()) for g in gradient.values()) ** 2


def spectral(gradient: Gradient) -> float:
    """Of matrices alone, by singular values; embeddings are named "embed…"."""
    matrices = [g for name, g in gradient.items() if g.dim() == 2 and "embed" not in name]
    return sum(float(torch.linalg.svdvals(g.double()).sum()) for g in matrices) ** 2


def adam(weights: Gradient) -> Square:
    """Of elements weighted by P."""
    return lambda gradient: sum(float((weights[n] * g.double().square()).sum()) for n, g in gradient.items())


def adam_weights(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """P = 1/(√v̂ + ε) of every whole parameter, from the optimizer's own state; 0 where v̂ is 0. All ranks take part."""
    weights = {}
    for group in optimizer.param_groups:
        for name, p in named.items():
            if all(p is not q for q in group["params"]):
                continue
            state = optimizer.state[p]
            moment: Any = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
            v = (moment.full_tensor() if hasattr(moment, "full_tensor") else moment).detach().double()
            root = (v / (1 - group["betas"][1] ** float(state["step"]))).sqrt()
            weights[name] = torch.where(v > 0, 1 / (root + group["eps"]), 0.0)
    return weights


def window(
    pieces: Sequence[Gradient], weights: Sequence[float], units: Sequence[float], square: Square, scale: float = 1.0
) -> tuple[float, float]:
    """tr Σ and |G|², where the final gradient is `scale` times the sum of the pieces h_k."""
    total = sum(weights)
    small = u = v = 0.0
    for h, w, n in zip(pieces, weights, units, strict=True):
        a = w / total
        small += a * square({name: scale * g / a for name, g in h.items()})
        u += a / n
        v += a * a / n
    big = square({name: scale * sum(h[name] for h in pieces) for name in pieces[0]})
    return (small - big) / (u - v), (u * big - v * small) / (u - v)
