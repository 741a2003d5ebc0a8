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


@dataclass(frozen=True)
class StepsOnAQuadratic:
    """Two consecutive batches of SGD on L(θ) = ½ θᵀHθ with noisy gradients Hθ + ξ, cov ξ = Σ/B; in closed form.

    Attributes:
        hessian: H, [n, n], symmetric.
        noise: Σ, the covariance of one unit's gradient, [n, n].
        weights: θ before the first of the two steps, [n].
        rate: η.
        batch: B, units in each of the two.
    """

    hessian: Tensor
    noise: Tensor
    weights: Tensor
    rate: float
    batch: int

    @property
    def truth(self) -> Population:
        """The exact moments at the first step's weights."""
        gradient = self.hessian @ self.weights
        return Population(float(gradient @ gradient), float(self.noise.trace()))

    @property
    def expected(self) -> Population:
        """E of B/2·|G₂ − G₁|² and of ⟨G₁, G₂⟩, where G₂ = H(θ − ηG₁) + ξ₂ and G₁ = Hθ + ξ₁."""
        h, gradient, eye = self.hessian, self.hessian @ self.weights, torch.eye(len(self.weights)).double()
        moved = -self.rate * h @ gradient  # E[G₂ − G₁], and G₂ − G₁ less that is ξ₂ − (1 + ηH) ξ₁
        own = eye + self.rate * h
        difference = float(moved @ moved) + float((self.noise + own @ self.noise @ own.T).trace()) / self.batch
        product = float(gradient @ (gradient + moved)) - self.rate * float((h @ self.noise).trace()) / self.batch
        return Population(product, self.batch / 2 * difference)
