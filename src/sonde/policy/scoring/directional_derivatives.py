"""How fast a model's outputs change along a direction in parameter space, without a backward.

Forward mode is exact and takes one pass; every kernel must support it. Torch's fused attention does not, so attention
is computed in plain operations there. Central differences take two passes without gradients, at θ + hΔ and θ − hΔ, and
work with sharded parameters too. A backward needs neither forward mode nor 32 bits, but it gives one sum, and not each
output.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from sonde.parallel.placements import is_dtensor, local_tensor, reshard
from sonde.policy.scoring.optimizer_step import Direction, dot, sum_over_shards

Outputs = tuple[Tensor, ...]
Mode = Literal["forward", "central", "backward"]
Derive = Literal["auto", "forward", "central", "backward"]

_RELATIVE_STEP = {torch.float32: 2e-3, torch.float64: 1e-5}
"""First choice of ‖hΔ‖/‖θ‖. The relative rounding error grows as 1/h, and the error of central differences as h²."""
_MOVED_BY = {torch.float32: 5e-3, torch.float64: 1e-4}
"""Nats, root mean square. h is reduced until outputs move by about as little: some models are very sensitive to Δ."""
_ROUGHEST = 0.5
"""Largest allowed ratio of even to odd part of the difference. Above it, rounding dominates or the function is not
differentiable. `_HARMLESS` makes an exception."""
_HARMLESS = 0.2
"""Fraction of `_MOVED_BY`. A smaller even part is allowed: of a policy that is certain, only the last bits move."""
_SHRUNK_AT_MOST = 8
"""How many times h is reduced at most."""
_LOST_AT_MOST = 0.1
"""Largest part of a direction that rounding may swallow, where elements of θ are too large to move by so little."""
_TOO_FAR = 0.3
"""Nats, root mean square. Outputs that move by more are too far apart for a derivative."""

_DETACHED = "the token statistics return scores that no gradient can be taken of"
LOST_IN_ROUNDING = (
    "not to be trusted: derivatives are lost in rounding, or the model has none. Scores change the same way whether "
    "parameters move up or down, or by far too much, or are not finite, or parameters are too large to move by so "
    "little. Score in fp32, without autocast, or use derivatives='backward'"
)


@dataclass(frozen=True)
class Derivatives:
    """Derivatives of outputs along a direction.

    Attributes:
        batches: the derivatives of each micro-batch's outputs, in the outputs' unit per Δ.
        mode: how derivatives were taken.
        why: why forward mode was not used; empty with "forward".
        doubt: why the derivatives are not to be trusted; empty if they are.
    """

    batches: list[Outputs]
    mode: Mode
    why: str
    doubt: str = ""


class TooFewBits(ValueError):
    """Central differences need more bits than parameters have.

    Attributes:
        forward: why forward mode is not there either.
    """

    forward = ""


@torch.no_grad()
def derivatives_along(
    function: Callable[[Any], Outputs],
    model: nn.Module,
    direction: Direction,
    batches: Sequence[Any],
    *,
    mode: Derive = "auto",
    pilot: Any = None,
) -> Derivatives:
    """The derivative of every output along a direction, micro-batch by micro-batch.

    Args:
        function: calls `model` and returns a micro-batch's outputs; two calls must agree.
        model: plain or wrapped. If its parameters are sharded, all ranks call this with as many micro-batches.
        direction: Δ for some parameters, in their shapes; the others stay. With "central", its tensors hold the
            parameters during the call. Afterwards they hold the movement of the parameters over h, which is close to Δ.
        batches: micro-batches.
        mode: "auto" tries forward mode first, and falls back to central differences.
        pilot: a small micro-batch that tells how small h must be, and whether differences are more than rounding; by
            default the first of `batches`.

    Returns:
        `Derivatives`, with a doubt if outputs are rounded too coarsely for differences, as under bf16 autocast.
        Parameters have their former bits, also if `function` fails.

    Raises:
        TooFewBits: for central differences of parameters of fewer than 32 bits, which rounding would swallow.
        ValueError: for central differences along a direction of another dtype than the parameters'.
    """
    why = "parameters are sharded" if any(is_dtensor(p) for p in direction) else ""
    if mode == "forward" or (mode == "auto" and not why):
        try:
            return Derivatives(_forward(function, model, direction, batches), "forward", "")
        except RuntimeError as error:  # a missing forward mode raises this, or its subclass NotImplementedError
            if mode == "forward" or not _has_no_forward_mode(error):
                raise
            why = str(error).splitlines()[0]
    pilot = batches[0] if pilot is None else pilot
    try:
        derivatives, doubt = _central(function, model, direction, batches, pilot)
    except TooFewBits as error:
        error.forward = why or "central differences are asked for"
        raise
    return Derivatives(derivatives, "central", why or "asked for", doubt)


@torch.enable_grad()
def dots_with_gradients(
    function: Callable[[], Outputs], model: nn.Module, weights: Sequence[Sequence[Tensor]], direction: Direction
) -> list[float]:
    """⟨∇ Σ weight·output, Δ⟩ for each of several weights, by one forward and a backward for each.

    No hook of a parameter runs: modules find copies in their place, which share the memory.

    Args:
        function: calls `model` and returns outputs.
        model: plain or inside a wrapper; its parameters are whole.
        weights: constants in the outputs' shapes, for each of the outputs.
        direction: Δ for some parameters.

    Returns:
        A number for each of the weights.
    """
    copies = {p: p.detach().requires_grad_() for p in direction}
    with _replaced(model, copies):
        outputs = function()
    check_has_graph(outputs)
    found = []
    for k, each in enumerate(weights):
        total = torch.stack([(w.to(out) * out).sum() for w, out in zip(each, outputs, strict=True)]).sum()
        gradients = torch.autograd.grad(
            total, list(copies.values()), retain_graph=k + 1 < len(weights), materialize_grads=True
        )
        found.append(dot(dict(zip(direction, gradients, strict=True)), direction))
    return found


def _has_no_forward_mode(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or "forward AD" in str(error) or "forward mode" in str(error)


def _forward(
    function: Callable[[Any], Outputs], model: nn.Module, direction: Direction, batches: Sequence[Any]
) -> list[Outputs]:
    derivatives = []
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        # torch itself causes this warning when its forward mode is first used: a FutureWarning since 2.14,
        # with other words on Python 3.14.
        for category in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", "`torch.jit.script` is (deprecated|not supported)", category)
        duals = {p: forward_ad.make_dual(p.detach(), step.to(p.dtype)) for p, step in direction.items()}
        with _replaced(model, duals):
            for batch in batches:
                tangents = [forward_ad.unpack_dual(out).tangent for out in function(batch)]
                if any(tangent is None for tangent in tangents):  # all outputs depend on parameters
                    raise NotImplementedError(f"no forward mode: {_DETACHED}")
                # Clone: tangents are freed when the dual level ends.
                derivatives.append(tuple(tangent.clone() for tangent in tangents if tangent is not None))
    return derivatives


def check_has_graph(outputs: Iterable[Tensor]) -> None:
    """Refuse outputs that no gradient can be taken of: it would be 0 without notice."""
    if not all(out.requires_grad for out in outputs):
        raise ValueError(
            f"{_DETACHED}: compute both in torch, without detach() and no_grad(), or leave out what needs gradients "
            "(causes, coefficient_to_hold, update='gradient', derivatives='backward')"
        )


@contextlib.contextmanager
def _replaced(model: nn.Module, tensors: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Modules find other tensors in place of their parameters; tied parameters are replaced everywhere."""
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
    _check_dtypes(pairs)
    h, size = _step_size(direction, pairs)
    tries = _Pilot(function, pilot, direction)
    lost = _Lost(h * size, direction)
    moved = restored = 0
    try:
        # θ moves to θ + hΔ, and the direction's memory stores θ: a direction has the size of the parameters, so no
        # third vector of this size is made.
        for theta, step in pairs:
            up = torch.add(theta, step, alpha=h)
            lost.add(up - theta, step, h)
            step.copy_(theta)
            moved += 1  # from here on `step` holds θ, which is restored if anything fails
            theta.copy_(up)
        reshard(model)
        h *= _shrink(tries, pairs, model, lost)
        above = [tuple(out.clone() for out in function(batch)) for batch in batches]
        # 2θ − (θ + hΔ): the movement down is as large as the rounded movement up.
        for theta, old in pairs:
            theta.neg_().add_(old, alpha=2.0)
        reshard(model)
        doubt = tries.doubt_below() or lost.doubt()
        below = [function(batch) for batch in batches]
        # Parameters get their former bits back, and the direction the real movement over h.
        for theta, old in pairs:
            up = (old - theta).div_(h)  # makes a tensor, for which memory may be missing
            theta.copy_(old)
            restored += 1  # from here on `old` no longer stores θ
            old.copy_(up)
    except BaseException:
        for theta, old in pairs[restored:moved]:
            theta.copy_(old)
        reshard(model)
        raise
    reshard(model)
    differences = [
        tuple((a - b).div_(2.0) for a, b in zip(up, down, strict=True)) for up, down in zip(above, below, strict=True)
    ]
    if not doubt and _root_mean_square(differences) > _TOO_FAR:
        doubt = LOST_IN_ROUNDING  # other outputs move far more than the pilot's
    return [tuple(d.div_(h) for d in batch) for batch in differences], doubt


def _check_dtypes(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    narrow = next((p.dtype for p, _ in pairs if p.dtype not in _RELATIVE_STEP), None)
    if narrow is not None:
        raise TooFewBits(
            f"central differences need parameters of 32 bits or more, got {narrow}, whose rounding swallows "
            "small movements: use derivatives='backward', or train parameters in fp32"
        )
    other = next(((p, step) for p, step in pairs if step.dtype != p.dtype), None)
    if other is not None:
        raise ValueError(
            f"with central differences a direction stores the parameters, so it must have their dtype, got "
            f"{other[1].dtype} for {other[0].dtype}: convert the direction"
        )


class _Pilot:
    """A few outputs, watched while parameters move. Ranks that hold parts of a parameter get the same numbers."""

    def __init__(self, function: Callable[[Any], Outputs], batch: Any, direction: Direction) -> None:
        self._function, self._batch, self._direction = function, batch, direction
        self._base = self._outputs()
        self._up = self._base

    def moved_by(self) -> float:
        """Root mean square of the outputs' change, in nats; parameters hold θ + hΔ."""
        self._up = self._outputs()
        squares, count = self._sums((self._up - self._base).square().sum(), (self._base != 0).sum())
        return float((squares / max(count, 1.0)) ** 0.5)

    def doubt_below(self) -> str:
        """Why differences may be only rounding; empty if they are more. Parameters hold θ − hΔ."""
        down = self._outputs()
        # A smooth function's difference is odd in h. Rounding, and kinks, show in the even part f(+h) + f(−h) − 2f(0).
        even, odd, count = self._sums(
            (self._up + down - 2 * self._base).square().sum(),
            (self._up - down).square().sum(),
            (self._base != 0).sum(),
        )
        harmless = (_HARMLESS * max(_MOVED_BY[local_tensor(p).dtype] for p in self._direction)) ** 2 * count
        return LOST_IN_ROUNDING if even > max(_ROUGHEST**2 * odd, harmless) else ""

    def _outputs(self) -> Tensor:
        return torch.stack([out.detach().double() for out in self._function(self._batch)])

    def _sums(self, *values: Tensor) -> tuple[float, ...]:
        return tuple(sum_over_shards(torch.stack([v.double() for v in values]), self._direction).tolist())


class _Lost:
    """The part of the parameters' movement that rounding has swallowed."""

    def __init__(self, wanted: float, direction: Direction) -> None:
        self._wanted, self._direction = wanted, direction
        self._sq_error = 0.0

    def add(self, did: Tensor, direction: Tensor, times: float) -> None:
        """Count a parameter that has moved by `did` rather than by `times` the direction; `did` is overwritten."""
        self._sq_error += float(torch.linalg.vector_norm(did.sub_(direction, alpha=times))) ** 2

    def scaled(self, factor: float) -> None:
        """All movements are scaled by a factor; `add` counts the rounding of the scaling."""
        self._wanted *= factor
        self._sq_error *= factor**2

    def doubt(self) -> str:
        """Why the movement is not along the direction; empty if it is."""
        sq_error = float(sum_over_shards(torch.tensor([self._sq_error], dtype=torch.float64), self._direction)[0])
        return LOST_IN_ROUNDING if sq_error > (_LOST_AT_MOST * self._wanted) ** 2 else ""


def _root_mean_square(outputs: Sequence[Outputs]) -> float:
    flat = torch.cat([out.double().flatten() for batch in outputs for out in batch])
    return float(flat.square().sum().div((flat != 0).sum().clamp(min=1)).sqrt())


def _shrink(tries: _Pilot, pairs: Sequence[tuple[Tensor, Tensor]], model: nn.Module, lost: _Lost) -> float:
    """Move parameters back towards θ, which `pairs` hold, until outputs move little; and return the factor."""
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


def _step_size(direction: Direction, pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """h and ‖Δ‖, the same on every rank that holds a part of a parameter. Waits for the device."""
    norms = [
        torch.stack([torch.linalg.vector_norm(t).double().cpu() for t in side]) for side in zip(*pairs, strict=True)
    ]
    sums = [side.square().sum() for side in norms]
    # Replicated parameters are counted once for each copy, in θ and in Δ alike: their ratio is right.
    sq_theta, sq_step = sum_over_shards(torch.stack(sums), direction).tolist()
    relative = max(_RELATIVE_STEP[p.dtype] for p, _ in pairs)
    h = float(relative * (sq_theta / sq_step) ** 0.5) if sq_step and sq_theta else 1.0
    return h, float(sq_step**0.5)
