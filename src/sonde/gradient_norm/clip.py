"""Clipping by the norm of the whole model's gradient, however it is cut: the one file that changes gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from sonde.call_site import stack_level
from sonde.gradient_norm.fused_clip import fold, unfold
from sonde.gradient_norm.global_norm import GlobalNorm, global_norm, warm_up
from sonde.gradient_norm.gradient_groups import Collected
from sonde.gradient_norm.plan import NormPlan
from sonde.gradient_norm.plan_cache import PlanCache, PlanRequest
from sonde.gradient_norm.verify import check_replicas, check_same_parameters
from sonde.parallel.devices import to_device

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Nonfinite = Literal["ignore", "skip", "raise", "assert_async"]
Parameters = Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
"""What may be clipped; pairs of a name and a tensor give names to messages."""

_memory = PlanCache()
"""A drop-in has no object of its own to keep plans in; they are few, and do what new ones would."""

_EPS = 1e-6  # torch's: so that clips come out as its do
_NAMED_AT_MOST = 5


def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float | None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: DeviceMesh | None = None,
    pp_mesh: DeviceMesh | None = None,
    replicas: Mapping[Any, int] | None = None,
    nonfinite: Nonfinite = "ignore",
    fold_into: torch.optim.Optimizer | None = None,
) -> Tensor:
    """Scale gradients in place so that the norm of the whole model's gradient is at most `max_norm`.

    A drop-in for `torch.nn.utils.clip_grad_norm_`, right however the model is cut over ranks: DDP, FSDP2, HSDP, tensor,
    sequence, context, expert and pipeline parallelism, and mixes of them. Call it on every rank that holds a part of
    the model. The norm is accumulated in fp64 and rounded once: it is the same to the last bit on all ranks of `mesh`,
    and that of fp32 gradients does not depend on how the model is cut (but once in some 1e8 times).

    Args:
        parameters: a tensor, tensors, or (name, tensor) pairs as of `model.named_parameters()`, whose names then appear
            in messages. Those without a gradient are skipped, a tensor that comes twice counts once.
        max_norm: the largest norm allowed, ≥ 0; 0 zeroes the gradients; None or `math.inf` only measures.
        norm_type: p > 0 of the p-norm, `math.inf` for the largest element; above 6 it takes twice as many collectives.
        error_if_nonfinite: as nonfinite="raise".
        foreach: taken so that torch's calls run unchanged; kernels are chosen here.
        mesh: all ranks that hold any of the model, pipeline stages included: one collective for everything then, and
            the same bits on all of them. None sums each gradient over the ranks of its own mesh, by one collective for
            each such set of ranks, and counts plain tensors as whole.
        pp_mesh: the pipeline stages, each with parameters of its own.
        replicas: how many ranks of `mesh` hold the same values, by tensor or name: for plain tensors that are not the
            same on all ranks of their stage, as experts under expert parallelism are, and DTensors on a part of `mesh`
            that are others elsewhere. With it each call plans anew: group the parameters once instead.
        nonfinite: what to do when the norm is infinite or NaN. "ignore" scales all the same, as torch does. "skip" sets
            gradients to 0; a fused optimizer in `fold_into` skips its step instead. "raise" raises on every rank,
            naming the parameters, and waits for the device to do so. "assert_async" has a GPU stop when it gets there.
        fold_into: a fused optimizer of all these parameters, which is to scale gradients as it reads them rather than
            in a pass of their own: `.grad` is scaled only by its next `step()`, which must follow. Another clip of the
            same parameters before it takes this one's place.

    Returns:
        The norm before clipping: 0-dim, fp32, or fp64 if a gradient of this rank is; on the mesh's device, or the
        gradients'.

    Raises:
        ValueError: for `max_norm` < 0 or NaN, `norm_type` ≤ 0, a gradient that cannot be counted (sparse, of an unknown
            placement, outside `mesh`), naming it and the way out; gradients are as they were. On the CPU every rank
            that shares a sum with that one raises, so all of `mesh`.
        RuntimeError: when asked for, if the norm is not finite; gradients are as they were.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_(weight, 1.0), weight.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    asked = _asked(parameters, mesh, pp_mesh)
    may_remember = replicas is None and asked.problem is None
    plan = (_memory.take(asked) if may_remember else None) or asked.plan(replicas)
    norm = clip_grad_norm_distributed_(
        plan,
        max_norm,
        norm_type,
        nonfinite=nonfinite,
        error_if_nonfinite=error_if_nonfinite,
        fold_into=fold_into,
    )
    if may_remember:
        _memory.keep(asked, plan)
    return norm


def group_parameters_for_norm(
    parameters: Parameters,
    *,
    mesh: DeviceMesh | None = None,
    pp_mesh: DeviceMesh | None = None,
    replicas: Mapping[Any, int] | None = None,
    verify: bool = False,
) -> NormPlan:
    """Work out once how the gradients of these parameters lie over ranks, for `clip_grad_norm_distributed_`.

    Call it on every rank, after the model has been cut: the communicators that the norm will need are opened here.

    Args:
        parameters: as for `clip_grad_norm_`.
        mesh: as there. Without `pp_mesh` its ranks are compared, by the names and shapes of their parameters.
        pp_mesh: as there; its communicator is opened too.
        replicas: as there.
        verify: compare what the mesh's ranks hold of parameters, and plain gradients where all have one, to
            see that they are on as many ranks as said; slow, for debugging. Parameters of one value only say nothing.

    Returns:
        A plan, good for as long as these are the parameters. Its `groups` have those whose gradients lie alike.

    Raises:
        ValueError: when `mesh` or `replicas` do not fit the parameters, or, with `verify`, their values, or ranks of
            `mesh` have different parameters without `pp_mesh` or `replicas` saying so; on all ranks.
    """
    plan = _asked(parameters, mesh, pp_mesh).plan(replicas)
    warm_up(plan)
    check_same_parameters(plan)
    if verify:
        check_replicas(plan)
    return plan


def clip_grad_norm_distributed_(
    parameter_groups: NormPlan,
    max_norm: float | None,
    norm_type: float = 2.0,
    pp_mesh: DeviceMesh | None = None,
    *,
    nonfinite: Nonfinite = "ignore",
    error_if_nonfinite: bool = False,
    fold_into: torch.optim.Optimizer | None = None,
) -> Tensor:
    """`clip_grad_norm_` of parameters that were grouped before, for engines that clip at every step.

    Args:
        parameter_groups: what `group_parameters_for_norm` returned.
        max_norm: as for `clip_grad_norm_`, as are the others.
        norm_type: p > 0, or `math.inf`.
        pp_mesh: the pipeline stages, unless the plan knows them.
        nonfinite: what to do when the norm is not finite.
        error_if_nonfinite: as nonfinite="raise".
        fold_into: a fused optimizer that is to scale the gradients.

    Returns:
        The norm before clipping, as `clip_grad_norm_`.

    Raises:
        ValueError: as `clip_grad_norm_`.
        RuntimeError: as `clip_grad_norm_`.
    """
    if not isinstance(parameter_groups, NormPlan):
        raise ValueError(
            f"parameter_groups must be what group_parameters_for_norm returned, got {parameter_groups!r:.60}: "
            "use clip_grad_norm_ for parameters themselves"
        )
    problem = None
    try:
        parameter_groups.use_stages(pp_mesh)
        max_norm, norm_type = check_options(max_norm, norm_type, nonfinite, fold_into)
    except ValueError as error:  # to be told to the others, who wait for this rank otherwise
        problem, norm_type = error, 2.0
    with torch.no_grad():
        measured = global_norm(parameter_groups, norm_type, problem=problem)
    return clip_measured_(
        parameter_groups,
        measured,
        max_norm,
        nonfinite="raise" if error_if_nonfinite else nonfinite,
        fold_into=fold_into,
    )


@torch.no_grad()
def clip_measured_(
    plan: NormPlan,
    measured: GlobalNorm,
    max_norm: float | None,
    *,
    nonfinite: Nonfinite = "ignore",
    fold_into: torch.optim.Optimizer | None = None,
) -> Tensor:
    """The second half of `clip_grad_norm_`: scale gradients whose norm is known.

    Args:
        plan: what was measured.
        measured: its norm.
        max_norm: checked already, as is `nonfinite`; see `check_options`.
        nonfinite: what to do when the norm is not finite.
        fold_into: a fused optimizer that is to scale the gradients.

    Returns:
        The norm, in fp32, or fp64 if a gradient is.

    Raises:
        RuntimeError: when asked for, if the norm is not finite.
    """
    is_double = any(one.locals and one.group.key.dtype == torch.float64 for one in measured.collected)
    norm = measured.norm.to(torch.float64 if is_double else torch.float32)
    is_finite = torch.isfinite(measured.norm)
    if norm.device.type != "cpu":  # on the CPU a failure was raised
        norm = torch.where(measured.failed > 0, torch.nan, norm)
        is_finite &= measured.failed == 0
    if max_norm is not None:
        unfold(plan.parameters)
    if nonfinite == "raise" and not bool(is_finite):
        if bool(measured.failed > 0):
            raise ValueError("another rank found a gradient that cannot be counted, and says which")
        raise RuntimeError(_where_not_finite(plan, measured.collected, norm, max_norm))
    if nonfinite == "assert_async":
        torch._assert_async(is_finite, f"the gradient norm is not finite, so gradients cannot be clipped to {max_norm}")
    if max_norm is None:
        return norm
    _write_back(plan, measured.collected)
    coefficient = torch.clamp(max_norm / (_rounded(measured) + _EPS), max=1.0).to(norm.dtype)
    if math.isinf(max_norm):
        coefficient = torch.ones_like(norm)
    if norm.device.type != "cpu":
        coefficient = torch.where(measured.failed > 0, 1.0, coefficient)
    skip = ~is_finite if nonfinite == "skip" else None
    if fold_into is not None and fold(fold_into, plan.parameters, coefficient, skip):
        return norm
    for one in measured.collected:
        if one.locals:
            grads = [_elements(g) for g in one.locals] if plan.allow_sparse else one.locals
            _scale(grads, None if max_norm == math.inf else coefficient, skip)
    return norm


def _rounded(measured: GlobalNorm) -> Tensor:
    """What gradients are clipped by: the same bits on every rank, however gradients are cut, as it is rounded once."""
    exact = measured.norm
    rounded = torch.where(measured.is_double > 0, exact, exact.to(torch.float32).to(exact.dtype))
    return torch.where(rounded.isinf(), exact, rounded)  # finite gradients may have a norm that fp32 cannot hold


def _scale(grads: list[Tensor], coefficient: Tensor | None, skip: Tensor | None) -> None:
    device = grads[0].device
    if coefficient is not None:
        torch._foreach_mul_(grads, to_device(coefficient, device))
    if skip is not None:
        skip = to_device(skip, device)
        for grad in grads:
            grad.masked_fill_(skip, 0.0)  # 0 times NaN is NaN


def _elements(grad: Tensor) -> Tensor:
    """Those of a sparse gradient, to be changed in place: as they are, or all of a dense one."""
    return grad._values() if grad.is_sparse else grad


def _write_back(plan: NormPlan, collected: Sequence[Collected]) -> None:
    """Partial gradients have been summed: the optimizer need not do it again."""
    for one in collected:
        if one.group.key.is_partial:
            for index, gradient in zip(one.indices, one.gradients, strict=True):
                if plan.parameters[index].grad is not None:
                    plan.parameters[index].grad = gradient


def _where_not_finite(plan: NormPlan, collected: Sequence[Collected], norm: Tensor, max_norm: float | None) -> str:
    bad = [
        plan.name_of(index)
        for one in collected
        for index, local in zip(one.indices, one.locals, strict=True)
        if not bool(torch.isfinite(_elements(local)).all())
    ]
    if bad:
        more = f" and {len(bad) - _NAMED_AT_MOST} more" if len(bad) > _NAMED_AT_MOST else ""
        where = f"not finite in {', '.join(bad[:_NAMED_AT_MOST])}{more}"
    elif norm.isnan() or not collected:
        where = "not finite on another rank, whose message names the parameters"
    else:
        where = "every gradient of this rank is finite: another rank's are not, or their norm overflows"
    to = "" if max_norm is None else f", so gradients cannot be clipped to {max_norm:g}"
    return f"the gradient norm is {norm:g}{to}: {where}. Find the loss that is not finite, or pass nonfinite='skip'"


def _asked(parameters: Parameters, mesh: DeviceMesh | None, pp_mesh: DeviceMesh | None) -> PlanRequest:
    listed: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not listed and isinstance(parameters, Iterator):
        warnings.warn("parameters is an iterator at its end: nothing is clipped", stacklevel=stack_level())
    names = None
    if listed and all(isinstance(item, tuple) and len(item) == 2 for item in listed):
        names, listed = [str(name) for name, _ in listed], [tensor for _, tensor in listed]
    problem = None
    if strays := [item for item in listed if not isinstance(item, Tensor)]:
        problem = ValueError(f"parameters must be tensors, or pairs of a name and a tensor, got {strays[0]!r:.60}")
        names, listed = None, [item for item in listed if isinstance(item, Tensor)]
    return PlanRequest(listed, names, mesh, pp_mesh, problem)


def check_options(
    max_norm: float | None, norm_type: float, nonfinite: str, fold_into: object
) -> tuple[float | None, float]:
    """Refuse options that are none, before anything is read.

    Args:
        max_norm: None, or as `check_max_norm` takes it.
        norm_type: p of the norm.
        nonfinite: one of `Nonfinite`.
        fold_into: an optimizer or None.

    Returns:
        The threshold and p, as floats.

    Raises:
        ValueError: naming what is wrong and what would be right.
    """
    if max_norm is not None:
        max_norm = check_max_norm(max_norm)
    try:
        order = float(norm_type)
    except (TypeError, ValueError, OverflowError):
        order = math.nan
    if not order > 0:
        raise ValueError(f"norm_type must be > 0, got {norm_type!r}: use 2.0, or math.inf for the largest element")
    if nonfinite not in get_args(Nonfinite):
        raise ValueError(f"nonfinite must be one of {', '.join(get_args(Nonfinite))}, got {nonfinite!r}")
    if fold_into is not None and not isinstance(fold_into, torch.optim.Optimizer):
        raise ValueError(
            f"fold_into must be one optimizer, got {fold_into!r:.60}: with several, clip without fold_into"
        )
    return max_norm, order


def check_max_norm(max_norm: object) -> float:
    """Refuse a threshold that is not one.

    Args:
        max_norm: a number, or a tensor of one element on the CPU: others would have to be waited for.

    Returns:
        It as a float.

    Raises:
        ValueError: when it is negative, NaN or no number.
    """
    if isinstance(max_norm, Tensor) and max_norm.device.type == "cpu" and max_norm.numel() == 1:
        max_norm = max_norm.item()
    if isinstance(max_norm, bool) or not isinstance(max_norm, Real):
        raise ValueError(f"max_norm must be a number, got {max_norm!r}: convert it, by float() say")
    try:
        max_norm = float(max_norm)
    except OverflowError:
        max_norm = math.inf
    if math.isnan(max_norm) or max_norm < 0:
        raise ValueError(f"max_norm must be ≥ 0, got {max_norm}: use math.inf to measure without clipping")
    return max_norm
