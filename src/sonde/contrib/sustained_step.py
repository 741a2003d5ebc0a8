"""What an optimizer adds to each step for a gradient that every step has besides, such as that of an entropy bonus."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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
        self._answers: dict[Tensor, _Answer] = {}
        self.is_endless = not is_adam and any(group["momentum"] >= 1.0 for group in optimizer.param_groups)
        """Whether SGD's momentum only grows, so that there is no lasting answer."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None or id(p) not in wanted:
                    continue
                if is_adam:
                    state = optimizer.state.get(p, {})
                    self._answers[p] = _adam(p, group, state, gradient_scale, applied_scale, n_steps)
                else:
                    has_momentum = optimizer.state.get(p, {}).get("momentum_buffer") is not None
                    factor = _sgd_factor(group) * gradient_scale * applied_scale
                    self._answers[p] = _Sgd(factor, has_momentum or not group["momentum"])

    @torch.no_grad()
    def __call__(self, gradient: Direction, size: float) -> Direction:
        """Δ for `size` times the gradient."""
        return {p: answer.step(size * gradient[p]) for p, answer in self._answers.items()}

    @torch.no_grad()
    def derivative(self, gradient: Direction, size: float, along: Direction) -> Direction:
        """How Δ for `size` times the gradient changes along a change of that product."""
        return {p: answer.slope(size * gradient[p]) * along[p] for p, answer in self._answers.items()}

    @torch.no_grad()
    def farthest(self, gradient: Direction, sign: float = 1.0) -> Direction | None:
        """Δ for any number of times the gradient, however large, of this sign; None if Δ has no bound."""
        found: Direction = {}
        for p, answer in self._answers.items():
            if (moved := answer.farthest(sign * gradient[p])) is None:
                return None
            found[p] = moved
        return found

    @property
    def lacks_momentum(self) -> bool:
        """Whether nothing that moves has its momentum yet, so that this step is smaller than later ones."""
        moving = [answer for answer in self._answers.values() if isinstance(answer, _Sgd) and answer.factor]
        return bool(moving) and not any(answer.has_momentum for answer in moving)

    @torch.no_grad()
    def is_zero(self) -> bool:
        """Whether no gradient moves anything, on any rank. Waits for the device."""
        slopes = ({p: answer.slope(torch.zeros_like(p)) * torch.ones_like(p)} for p, answer in self._answers.items())
        return not any(dot(slope, slope) for slope in slopes)


class _Answer(Protocol):
    """One parameter's Δ for a bonus's gradient b, in the loss's units; tensors like the parameter."""

    def step(self, b: Tensor) -> Tensor:
        """Δ."""
        ...

    def slope(self, b: Tensor) -> Any:
        """dΔ/db of each element."""
        ...

    def farthest(self, b: Tensor) -> Tensor | None:
        """Δ for any multiple of b, however large; None without a bound."""
        ...


@dataclass(frozen=True)
class _Sgd:
    """P, and whether the momentum that it counts on is there, or none is needed."""

    factor: Any
    has_momentum: bool

    def step(self, b: Tensor) -> Tensor:
        step: Tensor = b * self.factor
        return step

    def slope(self, _: Tensor) -> Any:
        return self.factor

    def farthest(self, b: Tensor) -> Tensor | None:
        return None if self.factor else torch.zeros_like(b)


@dataclass(frozen=True)
class _Adam:
    """The numbers of the equation above.

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
        moved = (self.mean + self.scale * b) / (self._root_after(b)[0] + self.eps) - self._without()
        return torch.where(self.root > 0.0, self.lr * moved, 0.0)

    def slope(self, b: Tensor) -> Tensor:
        (after, moves), total = self._root_after(b), self.mean + self.scale * b
        slope = (1.0 - moves * self.renewed * total.square() / after / (after + self.eps)) / (after + self.eps)
        return torch.where(self.root > 0.0, self.lr * self.scale * slope, 0.0)

    def farthest(self, b: Tensor) -> Tensor | None:
        most = b.sign() / self.renewed**0.5 - self._without()
        return torch.where((self.root > 0.0) & (b != 0.0), self.lr * most, 0.0)

    def _without(self) -> Tensor:
        """The step without b, over η."""
        return self.mean / ((self.root if self.standing is None else self.standing) + self.eps)

    def _root_after(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """√(v̂ + w (2 m b + b²)), which is 0 only where v̂ is; and whether it moves with b."""
        b = self.scale * b
        square = self.root.square() + self.renewed * b * (2.0 * self.mean + b)
        # |m| is at most √v̂: so the sum is positive but for rounding, unless w is 1.
        root = torch.maximum(square.clamp(min=0.0).sqrt(), _ROUNDING * self.root)
        if self.standing is None:
            return root, torch.ones_like(root)
        return torch.maximum(root, self.standing), (root >= self.standing).to(root.dtype)


def _sgd_factor(group: Mapping[str, Any]) -> Any:
    """P; not a number if momentum only grows."""
    momentum = group["momentum"]
    if momentum >= 1.0:
        return math.nan
    # b of a gradient that is the same in every step is (1 − dampening)/(1 − μ) times it.
    buffer = (1.0 - group["dampening"]) / (1.0 - momentum) if momentum else 1.0
    return number_of(group["lr"]) * (1.0 + momentum * buffer if group["nesterov"] else buffer)


def _adam(
    parameter: Tensor,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    gradient_scale: float,
    applied_scale: float,
    n_steps: float | None,
) -> _Adam:
    beta1, beta2 = map(number_of, group["betas"])
    gradient = gradient_of(parameter) * (-gradient_scale if group["maximize"] else gradient_scale)
    now = moments_after(parameter, gradient, group, state)
    root = now.second.sqrt()
    more = round(float(_MEMORIES / (1.0 - beta1))) if n_steps is None else n_steps
    return _Adam(
        number_of(group["lr"]),
        gradient_scale * applied_scale,
        group["eps"],
        torch.minimum(torch.maximum(-now.first, -root), root),
        root,
        None if now.largest is None else now.largest.sqrt(),
        (1.0 - beta2**more) / (1.0 - beta2 ** (now.n_steps + more)),
    )


class Moments(NamedTuple):
    """Adam's moments after the next step, corrected for their bias.

    Attributes:
        first: m̂ of each element.
        second: v̂ of each element.
        largest: with amsgrad, the largest v̂ so far, which the step divides by; None without it.
        n_steps: number of steps with the next one.
    """

    first: Tensor
    second: Tensor
    largest: Tensor | None
    n_steps: Any


def moments_after(parameter: Tensor, gradient: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Moments:
    """Moments of torch's Adam or AdamW after a step with this gradient, as the optimizer gets it."""
    beta1, beta2 = group["betas"]
    whole, n_steps = with_decay(parameter, gradient, group), next_step(state)
    first = (1.0 - beta1) * whole
    if state:
        first = first.add_(widened(state["exp_avg"]), alpha=beta1)
    second, largest = second_after(whole, group, state), None
    correction = 1.0 - beta2**n_steps
    if group["amsgrad"]:
        largest = second if not state else torch.maximum(second, widened(state["max_exp_avg_sq"]))
        largest = largest / correction
    return Moments(first / (1.0 - beta1**n_steps), second / correction, largest, n_steps)
