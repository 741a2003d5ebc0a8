"""What an optimizer adds to each step for a gradient that every step has besides, such as that of an entropy bonus."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from sonde.parallel.unwrap import unwrap_optimizer
from sonde.policy.scoring.optimizer_step import Direction, forecast_step, has_second_moment, widened


class SustainedStep:
    """The optimizer's answer Δ to a gradient b that every step has besides, once its momentum has built up; uphill.

        SGD     Δ = P b                           P = η/(1 − μ), without Nesterov and dampening
        Adam    Δ = P b/√(1 + (P b/η)²)           P = η/(√v̂ + ε)

    Adam's second moment grows by b² too: without ε, its Δ is η b/√(v̂ + b²). So no element moves by more than η, however
    small its v̂ is. An element that no gradient has reached has v̂ = 0, and P = 0: the gradients of a training leave it
    alone, and so would their bonus.

    Args:
        optimizer: torch's SGD, Adam or AdamW; may be wrapped by Accelerate. `.grad` holds this step's gradient.
        parameters: whose step is wanted.
        gradient_scale: factor that gradients are still multiplied by before the step.
        applied_scale: factor of the loss's gradient that `.grad` holds already.
    """

    @torch.no_grad()
    def __init__(
        self, optimizer: Any, parameters: Collection[Tensor], *, gradient_scale: float, applied_scale: float
    ) -> None:
        groups = unwrap_optimizer(optimizer).param_groups
        uphill = {
            p: torch.full_like(widened(p), applied_scale if group["maximize"] else -applied_scale)
            for group in groups
            for p in group["params"]
        }
        self.per_gradient = forecast_step(
            optimizer, of=parameters, gradient_scale=gradient_scale, part="sustained", along=uphill
        )
        """P."""
        # η, by which an element moves at most; without a rate, P is 0, and any bound does.
        is_bounded = has_second_moment(optimizer)
        self._bound = {
            p: (float(group["lr"]) or math.inf) if is_bounded else math.inf for group in groups for p in group["params"]
        }

    @torch.no_grad()
    def __call__(self, gradient: Direction, size: float) -> Direction:
        """Δ for `size` times the gradient."""
        return {p: u / self._excess(p, u).sqrt() for p, u in self._linear(gradient, size).items()}

    @torch.no_grad()
    def farthest(self, gradient: Direction) -> Direction | None:
        """Δ for any number of times the gradient, however large; None if Δ has no bound."""
        if any(math.isinf(self._bound[p]) and bool(per.any()) for p, per in self.per_gradient.items()):
            return None
        return {p: (per * gradient[p]).sign() * min(self._bound[p], 1.0) for p, per in self.per_gradient.items()}

    @torch.no_grad()
    def derivative(self, gradient: Direction, size: float, along: Direction) -> Direction:
        """How Δ for `size` times the gradient changes along a change of that product."""
        return {
            p: self.per_gradient[p] * along[p] / self._excess(p, u) ** 1.5
            for p, u in self._linear(gradient, size).items()
        }

    def _linear(self, gradient: Direction, size: float) -> Direction:
        return {p: size * per * gradient[p] for p, per in self.per_gradient.items()}

    def _excess(self, parameter: Tensor, linear: Tensor) -> Tensor:
        """1 + (P b/η)²."""
        return 1.0 + (linear / self._bound[parameter]).square()
