"""Oracles that estimators are compared with: slow, obvious and right, in float64 throughout."""

from __future__ import annotations

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
