"""The step an optimizer is about to take, or has taken: θ⁺ − θ, parameter by parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sonde.parallel.placements import local_tensor, reshard
from sonde.parallel.wrappers import unwrap_optimizer

Direction = dict[Tensor, Tensor]
"""A vector in parameter space: for each parameter, by identity, a tensor like it."""

Part = Literal["all", "momentum", "batch", "decay"]
"""What of a step: earlier batches' gradients, this one's, or weight decay; these three add up to all of it."""


def why_no_forecast(optimizer: Any) -> str:
    """Why an optimizer's step cannot be told before it is taken; empty when it can."""
    kind = type(unwrap_optimizer(optimizer))
    if kind not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        return f"the step of {kind.__name__} is not known before it is taken: measure it, by StepMeter"
    return ""


@torch.no_grad()
def forecast_step(
    optimizer: Any,
    *,
    gradient_scale: float | Tensor = 1.0,
    part: Part = "all",
    along: Mapping[Tensor, Tensor] | None = None,
    of: Collection[Tensor] | None = None,
) -> Direction:
    """The step that `optimizer.step()` would take now, from its state and the gradients in `.grad`; changes nothing.

    Args:
        optimizer: SGD, Adam or AdamW of torch, with any of their options, foreach and fused ones too; perhaps wrapped
            by Accelerate.
        gradient_scale: what gradients will be multiplied by before the step: a clip's coefficient, one over a
            GradScaler's scale.
        part: which part of it.
        along: with part="batch", vectors that take the gradient's place in what is linear in it; the second moment
            stays that of the gradient. This is how the step answers to each prompt's part of the gradient.
        of: the parameters to tell it of; all that have a gradient by default.

    Returns:
        θ⁺ − θ of every parameter that has a gradient, in the parameter's dtype but at least fp32, before the rounding
        that adding it to a parameter of fewer bits brings.

    Raises:
        ValueError: for another optimizer, a sparse or complex gradient.
    """
    optimizer = unwrap_optimizer(optimizer)
    if why := why_no_forecast(optimizer):
        raise ValueError(why)
    step: Direction = {}
    wanted = None if of is None else {id(p) for p in of}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None or (wanted is not None and id(parameter) not in wanted):
                continue
            factor = -gradient_scale if group["maximize"] else gradient_scale
            gradient = _gradient_like(parameter) * factor
            linear = gradient if along is None else _widened(along[parameter]) * factor
            of_kind = _sgd if isinstance(optimizer, torch.optim.SGD) else _adam
            step[parameter] = of_kind(parameter, gradient, linear, group, optimizer.state.get(parameter, {}), part)
    return step


def _gradient_like(parameter: Tensor) -> Tensor:
    """The gradient in fp32 at least, placed as its parameter is."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse or gradient.is_complex():
        kind = "sparse" if gradient.is_sparse else "complex"
        raise ValueError(f"the step of a parameter with a {kind} gradient cannot be forecast, only measured")
    placements = getattr(parameter, "placements", None)
    if placements is not None and gradient.placements != placements:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    return _widened(gradient)


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _sgd(
    parameter: Tensor,
    gradient: Tensor,
    linear: Tensor,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    part: Part,
) -> Tensor:
    """−lr·b, b = μ b_old + (1 − dampening)(g + λθ), or with Nesterov −lr·((g + λθ) + μ b)."""
    momentum, old = group["momentum"], state.get("momentum_buffer")
    of_old, of_new = 0.0, 1.0
    if momentum and old is not None:  # the first step takes the gradient whole
        of_old, of_new = momentum, 1.0 - group["dampening"]
    if group["nesterov"]:
        of_old, of_new = momentum * of_old, 1.0 + momentum * of_new
    before = torch.zeros_like(gradient) if old is None else _widened(old)
    parts = _Parts(of_old * before, of_new * linear, of_new * group["weight_decay"] * _widened(parameter))
    step: Tensor = -_number(group["lr"]) * parts.take(part)
    return step


def _adam(
    parameter: Tensor,
    gradient: Tensor,
    linear: Tensor,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    part: Part,
) -> Tensor:
    """−(lr/(1 − β₁ᵗ))·m/(√(v/(1 − β₂ᵗ)) + ε), m and v with this gradient; weight decay in g, or decoupled in AdamW."""
    (beta1, beta2), lr, decay = group["betas"], _number(group["lr"]), group["weight_decay"]
    is_decoupled = bool(group.get("decoupled_weight_decay"))
    theta = _widened(parameter)
    whole = gradient if is_decoupled or not decay else gradient + decay * theta
    n_steps = _next_step(state)
    m = _widened(state["exp_avg"]) if state else torch.zeros_like(gradient)
    v = _widened(state["exp_avg_sq"]) if state else torch.zeros_like(gradient)
    v = beta2 * v + (1.0 - beta2) * whole.square()
    if group["amsgrad"] and state:
        v = torch.maximum(v, _widened(state["max_exp_avg_sq"]))
    root = v.sqrt_().div_((1.0 - beta2**n_steps) ** 0.5).add_(group["eps"])
    new = 1.0 - beta1
    in_gradient = 0.0 if is_decoupled else decay
    parts = _Parts(beta1 * m, new * linear, new * in_gradient * theta)
    step: Tensor = -(lr / (1.0 - beta1**n_steps)) * parts.take(part) / root
    if is_decoupled and part in ("all", "decay"):
        step = step - lr * decay * theta
    return step


def _next_step(state: Mapping[str, Any]) -> Any:
    """The number of the step to come; on the device if the count is there, so that nothing waits."""
    return _number(state["step"]) + 1.0 if state else 1.0


def _number(value: Any) -> Any:
    """A float, or 0-dim in fp64 on the device where reading it would wait."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.double()
    return float(value)


class _Parts:
    """The terms of an update that are added up before they are scaled."""

    def __init__(self, momentum: Tensor, batch: Tensor, decay: Tensor) -> None:
        self._parts = {"momentum": momentum, "batch": batch, "decay": decay}

    def take(self, part: Part) -> Tensor:
        """One of them, or their sum."""
        if part != "all":
            return self._parts[part]
        return self._parts["momentum"] + self._parts["batch"] + self._parts["decay"]


@torch.no_grad()
def precondition_(optimizer: Any, vector: Direction) -> None:
    """Multiply a vector by P = 1/(√v̂ + ε), v̂ the second moment of Adam's previous step; SGD's P is 1. In place.

    What the optimizer does not hold, it does not move: P is 0 there.

    Raises:
        ValueError: for another optimizer, or Adam before its first step: without v̂, P would be 1/ε.
    """
    optimizer = unwrap_optimizer(optimizer)
    if why := why_no_forecast(optimizer):
        raise ValueError(why)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for parameter, part in vector.items():
        if id(parameter) not in held:
            part.zero_()
    if isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in vector:
                continue
            state = optimizer.state.get(parameter, {})
            if "exp_avg_sq" not in state:
                if not bool(local_tensor(vector[parameter]).any()):  # never used
                    continue
                raise ValueError(
                    f"the optimizer has no second moment of a parameter of shape {list(parameter.shape)}: take a step "
                    "first, or load its state"
                )
            v = _widened(state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"])
            corrected = v / (1.0 - group["betas"][1] ** _number(state["step"]))
            vector[parameter].div_(corrected.sqrt_().add_(group["eps"]))


@torch.no_grad()
def dot(a: Mapping[Tensor, Tensor], b: Direction) -> float:
    """Σ a·b over the parameters of b, of all shards; fp64. Waits for the device."""
    total = 0.0
    for parameter, of_b in b.items():
        product = (_widened(a[parameter]) * _widened(of_b)).sum(dtype=torch.float64)
        total += float(product.full_tensor() if hasattr(product, "full_tensor") else product)
    return total


@contextlib.contextmanager
def taken(step: Direction, model: nn.Module) -> Iterator[None]:
    """Parameters hold θ + Δ inside, and have the bits they had afterwards.

    Args:
        step: Δ, in the parameters' dtypes or wider ones; it holds θ meanwhile, and is of no use afterwards.
        model: whose parameters they are.
    """
    moved: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for parameter, delta in step.items():
                theta, local = local_tensor(parameter.detach()), local_tensor(delta)
                after = theta.to(local.dtype) + local
                local.copy_(theta)
                moved.append((theta, local))
                theta.copy_(after)
        reshard(model)
        yield
    finally:
        with torch.no_grad():
            for theta, before in moved:
                theta.copy_(before)
        reshard(model)


class StepWitness:
    """Whether the step that is taken is the one that was forecast, by a few hundred elements of each large one.

    Args:
        step: the forecast; what is needed of it is copied.
    """

    _EACH = 256

    @torch.no_grad()
    def __init__(self, step: Direction) -> None:
        self._seen = []
        for parameter, delta in step.items():
            theta, of_step = self._some(parameter), self._some(delta)
            after = (theta.to(of_step.dtype) + of_step).to(theta.dtype)
            self._seen.append((parameter, theta.clone(), after))

    @torch.no_grad()
    def departure(self) -> float:
        """|taken − forecast|/|forecast| on these elements of this rank; 0 where both are 0. Waits for the device."""
        off = of_step = 0.0
        for parameter, before, after in self._seen:
            off += float((self._some(parameter).double() - after).square().sum())
            of_step += float((after.double() - before).square().sum())
        return (off / of_step) ** 0.5 if of_step else float("inf") if off else 0.0

    def _some(self, tensor: Tensor) -> Tensor:
        flat = local_tensor(tensor.detach()).reshape(-1)
        return flat[:: max(flat.numel() // self._EACH, 1)]


class StepMeter:
    """Measures the step that is taken between two moments, and can take it back, bit for bit.

    Args:
        parameters: those that may change; a copy of them is kept.
    """

    @torch.no_grad()
    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._before = {p: p.detach().clone() for p in parameters}

    @torch.no_grad()
    def step(self) -> Direction:
        """θ⁺ − θ so far, as the parameters hold it, in fp32 at least."""
        return {p: _widened(p.detach()) - _widened(old) for p, old in self._before.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Give every parameter the bits that it had."""
        for parameter, old in self._before.items():
            parameter.copy_(old)
