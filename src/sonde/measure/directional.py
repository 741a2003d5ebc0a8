"""How fast a model's outputs change along a direction in parameter space, without a backward.

By forward mode where every kernel has one: exact, in one pass. Elsewhere by central differences of two passes without
gradients, at θ + hΔ and θ − hΔ, which also serves sharded parameters.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from sonde.measure.global_norm import group_of_mesh
from sonde.measure.placements import is_dtensor, local_of, reshard
from sonde.measure.process_groups import start_reduce
from sonde.measure.update import Direction

Outputs = tuple[Tensor, ...]
Mode = Literal["forward", "central"]

_RELATIVE_STEP = {torch.float32: 2e-3, torch.float64: 1e-5}
"""‖hΔ‖/‖θ‖ that balances rounding, which grows as it shrinks, with what is not linear, which grows with its square."""


@dataclass(frozen=True)
class Derivatives:
    """What was found along a direction.

    Attributes:
        of_batches: the derivatives of each micro-batch's outputs, in nats, say, per Δ.
        mode: how they were taken.
        why_central: what has no forward mode; empty with "forward".
    """

    of_batches: list[Outputs]
    mode: Mode
    why_central: str


@torch.no_grad()
def derivatives_along(
    function: Callable[[Any], Outputs],
    model: nn.Module,
    direction: Direction,
    batches: Sequence[Any],
    *,
    mode: Literal["auto", "forward", "central"] = "auto",
) -> Derivatives:
    """The derivative of every output along a direction, micro-batch by micro-batch.

    Args:
        function: a micro-batch's outputs, by calling `model`; two calls must give the same.
        model: plain or wrapped; with sharded parameters on every rank, with as many micro-batches.
        direction: Δ for some of its parameters, of their shapes; the others stay. With "central" its tensors hold the
            parameters meanwhile, and afterwards what these were moved by: Δ to some 4 digits.
        batches: micro-batches.
        mode: "auto" tries forward mode, and falls back.

    Returns:
        `Derivatives`. Parameters have the bits they had, also when `function` fails.

    Raises:
        ValueError: for central differences of parameters of fewer than 32 bits, which would be lost in their rounding,
            or along a direction of another dtype than theirs.
    """
    why = "parameters are sharded" if any(is_dtensor(p) for p in direction) else ""
    if mode == "forward" or (mode == "auto" and not why):
        try:
            return Derivatives(_forward(function, model, direction, batches), "forward", "")
        except RuntimeError as error:  # NotImplementedError is one
            if mode == "forward" or not _has_no_forward_mode(error):
                raise
            why = str(error).splitlines()[0]
    return Derivatives(_central(function, model, direction, batches), "central", why or "asked for")


def _has_no_forward_mode(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or "forward AD" in str(error) or "forward mode" in str(error)


def _forward(
    function: Callable[[Any], Outputs], model: nn.Module, direction: Direction, batches: Sequence[Any]
) -> list[Outputs]:
    found = []
    with warnings.catch_warnings(), forward_ad.dual_level():
        # Of torch's own making, when its forward mode is first used.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
        duals = {p: forward_ad.make_dual(p.detach(), step.to(p.dtype)) for p, step in direction.items()}
        with _in_place_of(model, duals):
            for batch in batches:
                unpacked = [forward_ad.unpack_dual(out) for out in function(batch)]
                # A copy: what the level made is gone when it ends.
                tangents = [torch.zeros_like(u.primal) if u.tangent is None else u.tangent.clone() for u in unpacked]
                found.append(tuple(tangents))
    return found


@contextlib.contextmanager
def _in_place_of(model: nn.Module, tensors: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Modules find other tensors where their parameters were; tied ones the same everywhere."""
    held = [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter in tensors
    ]
    try:
        for parameters, name, parameter in held:
            parameters[name] = tensors[parameter]  # type: ignore[assignment]
        yield
    finally:
        for parameters, name, parameter in held:
            parameters[name] = parameter


def _central(
    function: Callable[[Any], Outputs], model: nn.Module, direction: Direction, batches: Sequence[Any]
) -> list[Outputs]:
    pairs = [(local_of(p.detach()), local_of(step)) for p, step in direction.items()]
    if narrow := next((p for p, _ in pairs if p.dtype not in _RELATIVE_STEP), None):
        raise ValueError(
            f"central differences need parameters of 32 bits or more, got {narrow.dtype}: what they are moved by would "
            "be lost in rounding"
        )
    if other := next(((p, step) for p, step in pairs if step.dtype != p.dtype), None):
        raise ValueError(
            f"with central differences a direction holds its parameters meanwhile, so it must have their dtype, got "
            f"{other[1].dtype} for {other[0].dtype}: convert it"
        )
    h = _step_size(direction, pairs)
    moved = 0
    try:
        for theta, step in pairs:
            up = torch.add(theta, step, alpha=h)
            step.copy_(theta)
            moved += 1  # from here on `step` holds what is to be restored
            theta.copy_(up)
        reshard(model)
        above = [tuple(out.clone() for out in function(batch)) for batch in batches]
        for theta, old in pairs:
            theta.neg_().add_(old, alpha=2.0)  # as far down as it was up, whatever rounding did to that
        reshard(model)
        below = [function(batch) for batch in batches]
    except BaseException:
        for theta, old in pairs[:moved]:
            theta.copy_(old)
        reshard(model)
        raise
    for theta, old in pairs:
        up = (old - theta).div_(h)
        theta.copy_(old)
        old.copy_(up)
    reshard(model)
    return [
        tuple((a - b).div_(2.0 * h) for a, b in zip(up, down, strict=True))
        for up, down in zip(above, below, strict=True)
    ]


def _step_size(direction: Direction, pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """h, the same on every rank that holds a part of a parameter. Waits for the device."""
    sums = [torch.stack([t.double().square().sum().cpu() for t in side]).sum() for side in zip(*pairs, strict=True)]
    squares = torch.stack(sums)
    meshes = dict.fromkeys(p.device_mesh for p in direction if is_dtensor(p))  # type: ignore[attr-defined]
    for mesh in meshes:  # copies count more than once, in both sums alike
        squares = squares.to(mesh.device_type)
        if work := start_reduce(squares, group_of_mesh(mesh)):
            work.wait()
    of_theta, of_step = squares.tolist()
    relative = max(_RELATIVE_STEP[p.dtype] for p, _ in pairs)
    return float(relative * (of_theta / of_step) ** 0.5) if of_step and of_theta else 1.0
