"""What an optimizer adds to each step for a gradient that every step has besides, such as that of an entropy bonus."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sonde.parallel.unwrap import unwrap_optimizer
from sonde.policy.scoring.optimizer_step import (
    Direction,
    dot,
    gradient_of,
    has_second_moment,
    next_step,
    number_of,
    second_after,
    widened,
    with_decay,
)

_MEMORIES = 2.0
"""After so many times the first moment's memory 1/(1 − β₁), the momentum of a new gradient has built up to 86 %."""
_ROUNDING = 1e-6


class SustainedStep:
    """The optimizer's answer Δ to a gradient b that every step has besides, once its momentum has built up; uphill.

        SGD     Δ = P b                                                P = η/(1 − μ), without Nesterov and dampening
        Adam    Δ = η (m + b)/(√(v̂ + w (2 m b + b²)) + ε) − η m/(√v̂ + ε)

    m is the mean of the training's gradients, uphill, for which Adam's first moment stands. With b, E[g²] is larger by
    2 m b + b². After K more steps, Adam's second moment has a part w of new gradients, and w approaches 1 as K grows.
    So no element moves by more than about η/√w, however small its v̂ is. An element that no gradient has reached has
    v̂ = 0, and Δ = 0: the gradients of a training leave it alone, and so would their bonus.

    Args:
        optimizer: torch's SGD, Adam or AdamW; may be wrapped by Accelerate. `.grad` holds this step's gradient.
        parameters: whose step is wanted.
        gradient_scale: factor that gradients are still multiplied by before the step.
        applied_scale: factor of the loss's gradient that `.grad` holds already.
        n_steps: K; by default twice the memory of Adam's first moment, 20 steps at β₁ = 0.9.
    """

    @torch.no_grad()
    def __init__(
        self,
        optimizer: Any,
        parameters: Collection[Tensor],
        *,
        gradient_scale: float,
        applied_scale: float,
        n_steps: float | None = None,
    ) -> None:
        optimizer = unwrap_optimizer(optimizer)
        is_adam, wanted = has_second_moment(optimizer), {id(p) for p in parameters}
        groups = [(p, group) for group in optimizer.param_groups for p in group["params"]]
        moving = [(p, group) for p, group in groups if p.grad is not None and id(p) in wanted]
        self.is_endless = not is_adam and any(group["momentum"] >= 1.0 for group in optimizer.param_groups)
        """Whether SGD's momentum only grows, so that there is no lasting answer."""
        waits = [not is_adam and _lacks_buffer(group, optimizer.state.get(p, {})) for p, group in moving if group["lr"]]
        self.lacks_momentum = bool(waits) and all(waits)
        """Whether nothing that moves has its momentum yet, so that this step is smaller than later ones."""
        self._answers: dict[Tensor, _Answer] = {}
        for p, group in moving:
            if is_adam:
                of_gradient = gradient_scale if not group["maximize"] else -gradient_scale
                state = optimizer.state.get(p, {})
                self._answers[p] = _adam(p, group, state, of_gradient, gradient_scale * applied_scale, n_steps)
            else:
                self._answers[p] = _sgd(p, group, gradient_scale * applied_scale)

    @torch.no_grad()
    def __call__(self, gradient: Direction, size: float) -> Direction:
        """Δ for `size` times the gradient."""
        return {p: answer.step(size * gradient[p]) for p, answer in self._answers.items()}

    @torch.no_grad()
    def derivative(self, gradient: Direction, size: float, along: Direction) -> Direction:
        """How Δ for `size` times the gradient changes along a change of that product."""
        return {p: answer.slope(size * gradient[p]) * along[p] for p, answer in self._answers.items()}

    @torch.no_grad()
    def is_zero(self) -> bool:
        """Whether no gradient moves anything, on any rank. Waits for the device."""
        slopes = ({p: answer.slope(torch.zeros_like(p))} for p, answer in self._answers.items())
        return not any(dot(slope, slope) for slope in slopes)


@dataclass(frozen=True)
class _Answer:
    """One parameter's Δ for a bonus's gradient b, by Adam's equation. SGD's has m = w = ε = 0 and √v̂ = 1.

    Attributes:
        lr: η.
        scale: of b, in the gradients that the optimizer gets.
        eps: ε.
        mean: m of each element, in the optimizer's gradients.
        root: √v̂ of each element.
        standing: the root that amsgrad divides by at least; None without it.
        renewed: w.
    """

    lr: Any
    scale: float
    eps: float
    mean: Tensor
    root: Tensor
    standing: Tensor | None
    renewed: Any

    def step(self, b: Tensor) -> Tensor:
        """Δ, like b."""
        without = self.mean / ((self.root if self.standing is None else self.standing) + self.eps)
        moved = (self.mean + self.scale * b) / (self._root_after(b)[0] + self.eps) - without
        return torch.where(self.root > 0.0, self.lr * moved, 0.0)

    def slope(self, b: Tensor) -> Tensor:
        """dΔ/db of each element, like b."""
        (after, moves), total = self._root_after(b), self.mean + self.scale * b
        slope = (1.0 - moves * self.renewed * total.square() / after / (after + self.eps)) / (after + self.eps)
        return torch.where(self.root > 0.0, self.lr * self.scale * slope, 0.0)

    def _root_after(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """√(v̂ + w (2 m b + b²)), which is 0 only where v̂ is; and whether it moves with b."""
        b = self.scale * b
        square = self.root.square() + self.renewed * b * (2.0 * self.mean + b)
        # |m| is at most √v̂: so the sum is positive but for rounding, unless w is 1.
        root = torch.maximum(square.clamp(min=0.0).sqrt(), _ROUNDING * self.root)
        if self.standing is None:
            return root, torch.ones_like(root)
        return torch.maximum(root, self.standing), (root >= self.standing).to(root.dtype)


def _lacks_buffer(group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    return bool(group["momentum"]) and state.get("momentum_buffer") is None


def _sgd(parameter: Tensor, group: Mapping[str, Any], scale: float) -> _Answer:
    """P b. P is not a number if momentum only grows."""
    momentum, still = group["momentum"], torch.zeros_like(widened(parameter))
    lr = number_of(group["lr"]) if momentum < 1.0 else math.nan
    # b of a gradient that is the same in every step is (1 − dampening)/(1 − μ) times it.
    buffer = (1.0 - group["dampening"]) / (1.0 - momentum) if 0.0 < momentum < 1.0 else 1.0
    factor = 1.0 + momentum * buffer if group["nesterov"] else buffer
    return _Answer(lr * factor, scale, 0.0, still, still + 1.0, None, 0.0)


def _adam(
    parameter: Tensor,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    of_gradient: float,
    scale: float,
    n_steps: float | None,
) -> _Answer:
    """By the moments after the next step, corrected for their bias."""
    beta1, beta2 = map(number_of, group["betas"])
    whole, n = with_decay(parameter, gradient_of(parameter) * of_gradient, group), next_step(state)
    first = (1.0 - beta1) * whole + (beta1 * widened(state["exp_avg"]) if state else 0.0)
    second = second_after(whole, group, state)
    largest = torch.maximum(second, widened(state["max_exp_avg_sq"])) if state and group["amsgrad"] else second
    mean, correction = -first / (1.0 - beta1**n), 1.0 - beta2**n
    root = (second / correction).sqrt()
    more = round(float(_MEMORIES / (1.0 - beta1))) if n_steps is None else n_steps
    return _Answer(
        number_of(group["lr"]),
        scale,
        group["eps"],
        torch.minimum(torch.maximum(mean, -root), root),
        root,
        (largest / correction).sqrt() if group["amsgrad"] else None,
        (1.0 - beta2**more) / (1.0 - beta2 ** (n + more)),
    )
