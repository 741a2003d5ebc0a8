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

from sonde.parallel.placements import is_dtensor, local_tensor, reshard
from sonde.parallel.process_groups import group_of_mesh, start_reduce
from sonde.policy.scoring.optimizer_step import Direction

Outputs = tuple[Tensor, ...]
Mode = Literal["forward", "central"]

_RELATIVE_STEP = {torch.float32: 2e-3, torch.float64: 1e-5}
"""‖hΔ‖/‖θ‖ that balances rounding, which grows as it shrinks, with what is not linear, which grows with its square."""
_MOVED_BY = {torch.float32: 5e-3, torch.float64: 1e-4}
"""Nats that outputs move by at most, root mean square: a model may be far more sensitive to Δ than its norm tells."""
_ROUGHEST = 0.5
"""Part of a difference that may be the same up and down: more is rounding, or nothing that has a derivative. Unless it
is far less than outputs are meant to move by: where a policy is certain, nothing moves but the last bits."""
_HARMLESS = 0.2
_SHRUNK_AT_MOST = 8  # times
_LOST_AT_MOST = 0.1
"""Part of a direction that may be lost where elements are too large to move by so little."""
_TOO_FAR = 0.3
"""Nats, root mean square, by which outputs have moved too far for a derivative."""

LOST_IN_ROUNDING = (
    "not to be trusted: derivatives are lost in rounding, or the model has none: scores change the same way whether "
    "parameters move up or down, or by far too much, or are not finite, or parameters are too large to move by so "
    "little. Score in fp32, without autocast, or use derivatives='forward'"
)


@dataclass(frozen=True)
class Derivatives:
    """What was found along a direction.

    Attributes:
        of_batches: the derivatives of each micro-batch's outputs, in nats, say, per Δ.
        mode: how they were taken.
        why_central: what has no forward mode; empty with "forward".
        doubt: why they are not to be trusted; empty when they are.
    """

    of_batches: list[Outputs]
    mode: Mode
    why_central: str
    doubt: str = ""


@torch.no_grad()
def derivatives_along(
    function: Callable[[Any], Outputs],
    model: nn.Module,
    direction: Direction,
    batches: Sequence[Any],
    *,
    mode: Literal["auto", "forward", "central"] = "auto",
    pilot: Any = None,
) -> Derivatives:
    """The derivative of every output along a direction, micro-batch by micro-batch.

    Args:
        function: a micro-batch's outputs, by calling `model`; two calls must give the same.
        model: plain or wrapped; with sharded parameters on every rank, with as many micro-batches.
        direction: Δ for some of its parameters, of their shapes; the others stay. With "central" its tensors hold the
            parameters meanwhile, and afterwards what these were moved by: something close to Δ.
        batches: micro-batches.
        mode: "auto" tries forward mode, and falls back.
        pilot: a small micro-batch on which central differences are made small enough, and seen to be differences of
            more than rounding; the first of `batches` by default.

    Returns:
        `Derivatives`, with a doubt about central differences of outputs that are rounded too coarsely, as under bf16
        autocast. Parameters have the bits they had, also when `function` fails.

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
    pilot = batches[0] if pilot is None else pilot
    found, doubt = _central(function, model, direction, batches, pilot)
    return Derivatives(found, "central", why or "asked for", doubt)


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
    function: Callable[[Any], Outputs], model: nn.Module, direction: Direction, batches: Sequence[Any], pilot: Any
) -> tuple[list[Outputs], str]:
    pairs = [(local_tensor(p.detach()), local_tensor(step)) for p, step in direction.items()]
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
    h, size = _step_size(direction, pairs)
    tries = _Pilot(function, pilot, direction)
    lost = _Lost(h * size, direction)
    moved = 0
    try:
        for theta, step in pairs:
            up = torch.add(theta, step, alpha=h)
            lost.add(up - theta, step, h)
            step.copy_(theta)
            moved += 1  # from here on `step` holds what is to be restored
            theta.copy_(up)
        reshard(model)
        h *= _shrink(tries, pairs, model, lost)
        above = [tuple(out.clone() for out in function(batch)) for batch in batches]
        for theta, old in pairs:
            theta.neg_().add_(old, alpha=2.0)  # as far down as it was up, whatever rounding did to that
        reshard(model)
        doubt = tries.look_down() or lost.doubt()
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
    differences = [
        tuple((a - b).div_(2.0) for a, b in zip(up, down, strict=True)) for up, down in zip(above, below, strict=True)
    ]
    if not doubt and _root_mean_square(differences) > _TOO_FAR:
        doubt = LOST_IN_ROUNDING  # the pilot was not like the others
    return [tuple(d.div_(h) for d in of) for of in differences], doubt


class _Pilot:
    """What a few outputs do as parameters move; the same on all ranks that hold a part of a parameter."""

    def __init__(self, function: Callable[[Any], Outputs], batch: Any, direction: Direction) -> None:
        self._function, self._batch, self._direction = function, batch, direction
        self._base = self._outputs()
        self._up = self._base

    def moved_by(self) -> float:
        """Root mean square of the outputs' change, in nats; parameters are up."""
        self._up = self._outputs()
        squares, count = self._sums((self._up - self._base).square().sum(), (self._base != 0).sum())
        return float((squares / max(count, 1.0)) ** 0.5)

    def look_down(self) -> str:
        """Whether differences are no more than rounding, in words; parameters are down, as far as they were up."""
        down = self._outputs()
        same, other, count = self._sums(
            (self._up + down - 2 * self._base).square().sum(),
            (self._up - down).square().sum(),
            (self._base != 0).sum(),
        )
        harmless = (_HARMLESS * max(_MOVED_BY[local_tensor(p).dtype] for p in self._direction)) ** 2 * count
        return LOST_IN_ROUNDING if same > max(_ROUGHEST**2 * other, harmless) else ""

    def _outputs(self) -> Tensor:
        return torch.stack([out.detach().double() for out in self._function(self._batch)])

    def _sums(self, *values: Tensor) -> tuple[float, ...]:
        return tuple(_over_shards(torch.stack([v.double() for v in values]), self._direction).tolist())


class _Lost:
    """What rounding has kept parameters from moving by, of all that they were to."""

    def __init__(self, wanted: float, direction: Direction) -> None:
        self._wanted, self._direction = wanted, direction
        self._sq_error = 0.0

    def add(self, did: Tensor, direction: Tensor, times: float) -> None:
        """A parameter has moved by `did`, which is overwritten, and was to by `times` the direction."""
        self._sq_error += float(torch.linalg.vector_norm(did.sub_(direction, alpha=times))) ** 2

    def scaled(self, factor: float) -> None:
        """All that has moved is scaled down; what is lost by that is added apart."""
        self._wanted *= factor
        self._sq_error *= factor**2

    def doubt(self) -> str:
        """Why what is left is not the direction, in words; empty where it is."""
        sq_error = float(_over_shards(torch.tensor([self._sq_error], dtype=torch.float64), self._direction)[0])
        return LOST_IN_ROUNDING if sq_error > (_LOST_AT_MOST * self._wanted) ** 2 else ""


def _root_mean_square(outputs: Sequence[Outputs]) -> float:
    flat = torch.cat([out.double().flatten() for of in outputs for out in of])
    return float(flat.square().sum().div((flat != 0).sum().clamp(min=1)).sqrt())


def _shrink(tries: _Pilot, pairs: Sequence[tuple[Tensor, Tensor]], model: nn.Module, lost: _Lost) -> float:
    """Move parameters back towards where they were, which `pairs` hold, until outputs move little; by what factor."""
    most = max(_MOVED_BY[p.dtype] for p, _ in pairs)
    factor = 1.0
    for _ in range(_SHRUNK_AT_MOST):
        moved_by = tries.moved_by()
        if moved_by <= 2 * most:
            break
        less = max(most / moved_by, 1 / 32) if moved_by < float("inf") else 1 / 32
        lost.scaled(less)
        for theta, old in pairs:
            up = theta - old
            theta.copy_(torch.add(old, up, alpha=less))
            lost.add(theta - old, up, less)
        factor *= less
        reshard(model)
    return factor


def _over_shards(sums: Tensor, direction: Direction) -> Tensor:
    """Added up over all ranks that hold a part of a parameter. Waits for the device."""
    for mesh in dict.fromkeys(p.device_mesh for p in direction if is_dtensor(p)):  # type: ignore[attr-defined]
        sums = sums.to(mesh.device_type)
        if work := start_reduce(sums, group_of_mesh(mesh)):
            work.wait()
    return sums


def _step_size(direction: Direction, pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """h and ‖Δ‖, the same on every rank that holds a part of a parameter. Waits for the device."""
    norms = [
        torch.stack([torch.linalg.vector_norm(t).double().cpu() for t in side]) for side in zip(*pairs, strict=True)
    ]
    sums = [of.square().sum() for of in norms]
    of_theta, of_step = _over_shards(torch.stack(sums), direction).tolist()  # copies count more often, in both alike
    relative = max(_RELATIVE_STEP[p.dtype] for p, _ in pairs)
    h = float(relative * (of_theta / of_step) ** 0.5) if of_step and of_theta else 1.0
    return h, float(of_step**0.5)
