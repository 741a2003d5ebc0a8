"""The step an optimizer is about to take, or has taken: θ⁺ − θ, parameter by parameter."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from sonde.parallel.placements import is_dtensor, local_tensor, reshard
from sonde.parallel.process_groups import group_of_mesh, start_reduce
from sonde.parallel.unwrap import unwrap_optimizer

Direction = dict[Tensor, Tensor]
"""A vector in parameter space: for each parameter, by identity, a tensor like it."""

Part = Literal["all", "momentum", "batch", "decay"]
"""Part of a step: from earlier batches' gradients, from this batch's, or from weight decay. They add up to "all"."""


def why_no_forecast(optimizer: Any) -> str:
    """Why an optimizer's step cannot be forecast, and the way out; empty if it can."""
    if optimizer is None:
        return "sonde cannot forecast a step without its optimizer: use around_step(), which measures it"
    kind = type(unwrap_optimizer(optimizer))
    if kind not in _RULES:
        return f"sonde cannot forecast the step of {kind.__name__}: use around_step(), which measures it"
    return ""


def has_second_moment(optimizer: Any) -> bool:
    """Whether the optimizer divides gradients by the root of a second moment, kept as Adam keeps it.

    Raises:
        ValueError: for an optimizer whose step cannot be forecast.
    """
    if why := why_no_forecast(optimizer):
        raise ValueError(why)
    return _RULES[type(unwrap_optimizer(optimizer))] is _adam


def has_sparse_gradient(parameters: Iterable[Tensor]) -> bool:
    """Whether any of these gradients is sparse, so that the step cannot be forecast, only measured."""
    return any(p.grad is not None and p.grad.is_sparse for p in parameters)


@torch.no_grad()
def each_step(
    optimizer: Any,
    *,
    gradient_scale: float | Tensor = 1.0,
    part: Part = "all",
    along: Mapping[Tensor, Tensor] | None = None,
    of: Collection[Tensor] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The step that `optimizer.step()` would take now, from its state and the gradients in `.grad`. Nothing changes.

    Args:
        optimizer: torch's SGD, Adam or AdamW with any of their options, also foreach and fused; may be wrapped by
            Accelerate.
        gradient_scale: factor that gradients are multiplied by before the step: a clip's coefficient, or one over a
            GradScaler's scale.
        part: which part of the step.
        along: with part="batch", vectors that replace the gradient where the step is linear in it. The
            second moment still comes from the gradient. So the result is how the step responds to a part of the
            gradient. It is 0 for elements of Adam's without a second moment, which no gradient has reached.
        of: the parameters whose step is wanted; by default all that have a gradient.

    Yields:
        Every parameter that has a gradient, and its θ⁺ − θ, in the parameter's dtype but at least fp32. The rounding of
        the sum θ + Δ, for parameters of fewer bits, is not included.

    Raises:
        ValueError: for another optimizer, or a sparse or complex gradient.
    """
    optimizer = unwrap_optimizer(optimizer)
    if why := why_no_forecast(optimizer):
        raise ValueError(why)
    rule = _RULES[type(optimizer)]
    wanted = None if of is None else {id(p) for p in of}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None or (wanted is not None and id(parameter) not in wanted):
                continue
            factor = -gradient_scale if group["maximize"] else gradient_scale
            gradient = gradient_of(parameter) * factor
            linear = gradient if along is None else widened(along[parameter]) * factor
            yield parameter, rule(parameter, gradient, linear, group, optimizer.state.get(parameter, {}), part)


def forecast_step(optimizer: Any, **options: Any) -> Direction:
    """The whole step, as `each_step` gives it for one parameter after the other."""
    return dict(each_step(optimizer, **options))


def gradient_of(parameter: Tensor) -> Tensor:
    """A parameter's gradient in fp32 at least, with the placements of the parameter.

    Raises:
        ValueError: for a sparse or complex gradient.
    """
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse or gradient.is_complex():
        kind = "sparse" if gradient.is_sparse else "complex"
        raise ValueError(f"the step of a parameter with a {kind} gradient cannot be forecast, only measured")
    placements = getattr(parameter, "placements", None)
    if placements is not None and gradient.placements != placements:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    return widened(gradient)


def gradient_for(optimizer: Any, ascent: Direction) -> Direction:
    """What `.grad` holds if the optimizer is to go along `ascent`: the opposite, except where it maximizes.

    Parameters that the optimizer does not hold are left out.
    """
    groups = unwrap_optimizer(optimizer).param_groups
    maximizes = {p: bool(group["maximize"]) for group in groups for p in group["params"]}
    return {p: v if maximizes[p] else -v for p, v in ascent.items() if p in maximizes}


def widened(tensor: Tensor) -> Tensor:
    """The tensor in fp32 at least."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _sgd(
    parameter: Tensor, gradient: Tensor, linear: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], part: Part
) -> Tensor:
    """−lr·b, b = μ b_old + (1 − dampening)(g + λθ), or with Nesterov −lr·((g + λθ) + μ b)."""
    momentum, old = group["momentum"], state.get("momentum_buffer")
    # Coefficients of b_old and of g + λθ. Without a buffer, torch's first step takes the gradient undampened.
    on_old, on_new = 0.0, 1.0
    if momentum and old is not None:
        on_old, on_new = momentum, 1.0 - group["dampening"]
    # Nesterov's (g + λθ) + μ b, in the same two terms.
    if group["nesterov"]:
        on_old, on_new = momentum * on_old, 1.0 + momentum * on_new
    before = torch.zeros_like(gradient) if old is None else widened(old)
    decay = on_new * group["weight_decay"] * widened(parameter)
    step: Tensor = -number_of(group["lr"]) * _take(part, on_old * before, on_new * linear, decay)
    return step


def _adam(
    parameter: Tensor, gradient: Tensor, linear: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], part: Part
) -> Tensor:
    """−(lr/(1 − β₁ᵗ))·m/(√(v/(1 − β₂ᵗ)) + ε), m and v with this gradient; weight decay in g, or decoupled in AdamW."""
    (beta1, beta2), lr, decay = group["betas"], number_of(group["lr"]), group["weight_decay"]
    is_decoupled = bool(group.get("decoupled_weight_decay"))
    theta = widened(parameter)
    n_steps = next_step(state)
    # The second moment is updated first, with the whole gradient: it is not linear in it, so `along` has no part in it.
    v = second_after(with_decay(parameter, gradient, group), group, state)
    if group["amsgrad"] and state:
        v = torch.maximum(v, widened(state["max_exp_avg_sq"]))
    m = widened(state["exp_avg"]) if state else torch.zeros_like(gradient)
    if linear is not gradient:  # elements that no gradient has reached do not move, whatever stands for it
        linear = torch.where(v > 0.0, linear, 0.0)
    # √v̂ + ε in torch's own order of operations: bias correction, then ε.
    root = v.sqrt_().div_((1.0 - beta2**n_steps) ** 0.5).add_(group["eps"])
    # Adam's weight decay is part of the gradient, and so of the first moment. AdamW's is added to the finished step.
    new = 1.0 - beta1
    in_gradient = 0.0 if is_decoupled else decay
    first = _take(part, beta1 * m, new * linear, new * in_gradient * theta)
    step: Tensor = -(lr / (1.0 - beta1**n_steps)) * first / root
    if is_decoupled and part in ("all", "decay"):
        step = step - lr * decay * theta
    return step


def with_decay(parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
    """What Adam takes the moments of: the gradient, with weight decay in it unless it is decoupled."""
    if group.get("decoupled_weight_decay") or not group["weight_decay"]:
        return gradient
    whole: Tensor = gradient + group["weight_decay"] * widened(parameter)
    return whole


def second_after(whole: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """v after a gradient, without bias correction; a new tensor."""
    beta2 = group["betas"][1]
    v: Tensor = (1.0 - beta2) * whole.square()
    return v.add_(widened(state["exp_avg_sq"]), alpha=beta2) if state else v


def _take(part: Part, momentum: Tensor, batch: Tensor, decay: Tensor) -> Tensor:
    """One term of a step before the learning rate scales it, or the sum of all."""
    if part == "all":
        return momentum + batch + decay
    return {"momentum": momentum, "batch": batch, "decay": decay}[part]


_RULES = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
}
"""The optimizers whose step can be forecast. To add one, write its function and its line here."""


def next_step(state: Mapping[str, Any]) -> Any:
    """The number of the next step; on the device if the state counts there, so that nothing waits for the device."""
    return number_of(state["step"]) + 1.0 if state else 1.0


def number_of(value: Any) -> Any:
    """A float, as of a learning rate; or 0-dim in fp64 on the device, if reading it would wait for the device."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.double()
    return float(value)


@torch.no_grad()
def dot(a: Mapping[Tensor, Tensor], b: Direction) -> float:
    """Σ a·b over the parameters of b and all their shards; fp64. Waits for the device."""
    total = 0.0
    for parameter, part in b.items():
        product = (widened(a[parameter]) * widened(part)).sum(dtype=torch.float64)
        total += float(product.full_tensor() if hasattr(product, "full_tensor") else product)
    return total


class Fit(NamedTuple):
    """A multiple of a vector, fitted to `.grad` by least squares.

    Attributes:
        factor: the multiple.
        cosine: cosine similarity of `.grad` and the vector.
    """

    factor: float
    cosine: float


@torch.no_grad()
def fit_to_gradients(vector: Direction) -> Fit | None:
    """How far `.grad` is a multiple of a vector, among the elements where the vector is not 0. Waits for the device.

    Returns:
        None if the vector or those gradients are 0.
    """
    product = sq_vector = sq_gradient = 0.0
    for p, part in vector.items():  # one by one: no second copy of the gradients
        if p.grad is None:
            continue
        reached, gradient = {p: part}, {p: torch.where(part != 0.0, gradient_of(p), 0.0)}
        product += dot(gradient, reached)
        sq_vector += dot(reached, reached)
        sq_gradient += dot(gradient, gradient)
    if not sq_vector * sq_gradient:
        return None
    return Fit(product / sq_vector, product / math.sqrt(sq_vector) / math.sqrt(sq_gradient))


def sum_over_shards(sums: Tensor, direction: Direction) -> Tensor:
    """Sums over all ranks that hold a part of a parameter. Waits for the device."""
    for mesh in dict.fromkeys(p.device_mesh for p in direction if is_dtensor(p)):  # type: ignore[attr-defined]
        sums = sums.to(mesh.device_type)
        if work := start_reduce(sums, group_of_mesh(mesh)):
            work.wait()
    return sums


@dataclass
class TakenStep:
    """A step that parameters have taken.

    Attributes:
        rounded_away: |θ⁺ − θ − Δ|/|Δ|, where θ⁺ is what parameters of fewer bits than Δ hold; 0 if all hold the step.
        residuals: θ + Δ − θ⁺ of these parameters, in their dtype; empty unless it was asked for.
    """

    rounded_away: float = 0.0
    residuals: dict[Tensor, Tensor] = field(default_factory=dict)


@contextlib.contextmanager
def taken(step: Direction, model: nn.Module, *, keeps_residuals: bool = False) -> Iterator[TakenStep]:
    """Parameters hold θ + Δ inside. On exit they have their former bits.

    Parameters of 16 bits hold the rounded sum, as after the optimizer's own step.

    Args:
        step: Δ, in the parameters' dtypes or wider. Its tensors hold θ inside, so Δ is lost: no other copy is kept.
        model: the model that has the parameters.
        keeps_residuals: keep what rounding takes away: of a step that no optimizer takes.
    """
    moved: list[tuple[Tensor, Tensor]] = []
    result = TakenStep()
    lost = {parameter: delta for parameter, delta in step.items() if delta.dtype.itemsize > parameter.dtype.itemsize}
    sums = torch.zeros(2, dtype=torch.float64)
    try:
        with torch.no_grad():
            for parameter, delta in step.items():
                theta, local = local_tensor(parameter.detach()), local_tensor(delta)
                after = theta.to(local.dtype) + local
                if parameter in lost:
                    rest = after - after.to(theta.dtype)
                    sums += torch.stack([t.double().square().sum() for t in (rest, local)]).cpu()
                    if keeps_residuals:
                        result.residuals[parameter] = rest.to(theta.dtype)
                    del rest
                # θ is stored and noted before it is overwritten, so that it can be restored wherever this fails.
                local.copy_(theta)
                moved.append((theta, local))
                theta.copy_(after)
                del after  # it would live as long as this context
        if lost:
            sq_lost, sq_step = sum_over_shards(sums, lost).tolist()
            result.rounded_away = min(math.sqrt(sq_lost / sq_step), 1.0) if sq_step else 0.0
        reshard(model)
        yield result
    finally:
        with torch.no_grad():
            for theta, before in reversed(moved):  # if memory is shared, the first to move knows its bits
                theta.copy_(before)
        reshard(model)
