"""Clipping by the norm of the whole model's gradient, however it is cut: the only file that changes gradients."""

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
from sonde.gradient_norm.held_error import HeldError
from sonde.gradient_norm.plan import NormPlan
from sonde.gradient_norm.plan_cache import PlanCache, PlanRequest
from sonde.gradient_norm.verify import check_replicas, check_same_parameters
from sonde.parallel.devices import to_device

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Nonfinite = Literal["ignore", "skip", "raise", "assert_async"]
Parameters = Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
"""What may be clipped. Pairs of a name and a tensor give messages their names."""

_plan_cache = PlanCache()
"""Module-level because a function has nowhere else to cache. A cached plan behaves exactly like a new one."""

_EPS = 1e-6  # torch's, so that clipped gradients equal torch's
_MAX_NAMED = 5


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

    A drop-in for `torch.nn.utils.clip_grad_norm_` that is right however the model is cut over ranks: DDP, FSDP2, HSDP,
    tensor, sequence, context, expert and pipeline parallelism, and mixes of them. Call it on every rank that holds a
    part of the model. The norm is accumulated in fp64 and rounded once. So it is the same to the last bit on all ranks
    of `mesh`, and the norm of fp32 gradients does not depend on how the model is cut (except about once in 1e8 times).

    Args:
        parameters: a tensor, tensors, or (name, tensor) pairs such as `model.named_parameters()`; messages then use the
            names. Parameters without a gradient are skipped, a tensor that comes twice counts once.
        max_norm: the largest norm allowed, ≥ 0; 0 zeroes the gradients; None or `math.inf` only measures.
        norm_type: p > 0 of the p-norm, `math.inf` for the largest element; above 6 it takes twice as many collectives.
        error_if_nonfinite: the same as nonfinite="raise".
        foreach: accepted so that calls written for torch run unchanged; it has no effect.
        mesh: all ranks that hold any of the model, pipeline stages included. One collective then does everything, and
            all ranks get the same bits. None sums each gradient over the ranks of its own mesh, by one collective for
            each such set of ranks, and counts plain tensors as whole.
        pp_mesh: the pipeline stages, each with parameters of its own.
        replicas: how many ranks of `mesh` hold the same values, by tensor or name. Declare plain tensors that are not
            the same on all ranks of their stage (experts under expert parallelism), and DTensors that are on a part of
            `mesh` and have other values elsewhere. With `replicas` each call plans anew: use
            `group_parameters_for_norm` instead to plan once.
        nonfinite: what to do when the norm is infinite or NaN. "ignore" scales all the same, as torch does. "skip" sets
            gradients to 0, or has the fused optimizer in `fold_into` skip its step. "raise" raises on every rank and
            names the parameters; it waits for the device. "assert_async" stops a GPU when it gets there.
        fold_into: a fused optimizer of all these parameters. Its next `step()`, which must follow, scales the gradients
            as it reads them, which saves a pass; `.grad` is not scaled before. If the same parameters are clipped again
            before that step, only the last clip counts.

    Returns:
        The norm before clipping: 0-dim, fp32, or fp64 if a gradient of this rank is; on the mesh's device, or the
        gradients'.

    Raises:
        ValueError: for `max_norm` < 0 or NaN, `norm_type` ≤ 0, or a gradient that cannot be counted (sparse, with an
            unknown placement, outside `mesh`), naming the gradient and the way out; gradients are unchanged. On the CPU
            every rank that shares a sum with this rank raises: with `mesh`, all ranks.
        RuntimeError: for a norm that is not finite, with nonfinite="raise" or "assert_async"; gradients are unchanged.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_(weight, 1.0), weight.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    request = _plan_request(parameters, mesh, pp_mesh)
    may_cache = replicas is None and request.problem is None
    plan = (_plan_cache.take(request) if may_cache else None) or request.plan(replicas)
    norm = clip_grad_norm_distributed_(
        plan,
        max_norm,
        norm_type,
        nonfinite=nonfinite,
        error_if_nonfinite=error_if_nonfinite,
        fold_into=fold_into,
    )
    if may_cache:
        _plan_cache.keep(request, plan)
    return norm


def group_parameters_for_norm(
    parameters: Parameters,
    *,
    mesh: DeviceMesh | None = None,
    pp_mesh: DeviceMesh | None = None,
    replicas: Mapping[Any, int] | None = None,
    verify: bool = False,
) -> NormPlan:
    """Work out once how the gradients of these parameters are spread over ranks, for `clip_grad_norm_distributed_`.

    Call it on every rank, after the model has been cut. It also opens the communicators that the norm will need.

    Args:
        parameters: as for `clip_grad_norm_`.
        mesh: as for `clip_grad_norm_`. Without `pp_mesh`, the names and shapes of the parameters on its ranks are
            compared.
        pp_mesh: as for `clip_grad_norm_`; its communicator is opened too.
        replicas: as for `clip_grad_norm_`.
        verify: compare the values of parameters over the mesh's ranks, and plain gradients where all ranks have one, to
            check that each is on as many ranks as counted; slow, for debugging. Parameters whose elements are all equal
            are not checked.

    Returns:
        A plan, valid as long as the parameters are the same. Each of its `groups` has gradients that are spread alike.

    Raises:
        ValueError: on all ranks, when `mesh` or `replicas` do not fit the parameters or, with `verify`, their values;
            or when ranks of `mesh` have different parameters, and neither `pp_mesh` nor `replicas` explains it.
    """
    plan = _plan_request(parameters, mesh, pp_mesh).plan(replicas)
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
        parameter_groups: the plan that `group_parameters_for_norm` returned.
        max_norm: as for `clip_grad_norm_`, like the other arguments.
        norm_type: p > 0, or `math.inf`.
        pp_mesh: the pipeline stages, unless the plan knows them.
        nonfinite: what to do when the norm is not finite.
        error_if_nonfinite: the same as nonfinite="raise".
        fold_into: a fused optimizer that scales the gradients.

    Returns:
        The norm before clipping, as `clip_grad_norm_`.

    Raises:
        ValueError: as `clip_grad_norm_`.
        RuntimeError: as `clip_grad_norm_`.
    """
    if not isinstance(parameter_groups, NormPlan):
        raise ValueError(
            f"parameter_groups must be the plan that group_parameters_for_norm returned, got {parameter_groups!r:.60}: "
            "pass parameters to clip_grad_norm_ instead"
        )
    problem, order = HeldError(), 2.0
    with problem.hold():
        parameter_groups.use_stages(pp_mesh)
        max_norm, order = check_options(max_norm, norm_type, nonfinite, fold_into)
    with torch.no_grad():
        measured = global_norm(parameter_groups, order, problem=problem.first)
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
        plan: the plan that was measured.
        measured: its norm.
        max_norm: checked already, as is `nonfinite`; see `check_options`.
        nonfinite: what to do when the norm is not finite.
        fold_into: a fused optimizer that scales the gradients.

    Returns:
        The norm, in fp32, or fp64 if a gradient is.

    Raises:
        RuntimeError: when asked for, if the norm is not finite.
    """
    is_double = any(g.locals and g.group.key.dtype == torch.float64 for g in measured.collected)
    norm = measured.norm.to(torch.float64 if is_double else torch.float32)
    is_finite = torch.isfinite(measured.norm)
    # On the CPU, an error of another rank has been raised by now. A GPU is not waited for: it only learns of the error
    # here, by tensors. The norm becomes NaN and, further below, the coefficient 1, so that gradients stay as they are.
    if norm.device.type != "cpu":
        norm = torch.where(measured.failed > 0, torch.nan, norm)
        is_finite &= measured.failed == 0
    if max_norm is not None:
        unfold(plan.parameters)
    # Both checks come before anything is written, so that gradients are unchanged if they fail.
    if nonfinite == "raise" and not bool(is_finite):
        if bool(measured.failed > 0):
            raise ValueError("another rank found a gradient that cannot be counted, and its message names the gradient")
        raise RuntimeError(_where_not_finite(plan, measured.collected, norm, max_norm))
    if nonfinite == "assert_async":
        torch._assert_async(is_finite, f"the gradient norm is not finite, so gradients cannot be clipped to {max_norm}")
    if max_norm is None:
        return norm
    _write_back(plan, measured.collected)
    coefficient = torch.clamp(max_norm / (_rounded_norm(measured) + _EPS), max=1.0).to(norm.dtype)
    if math.isinf(max_norm):  # inf / inf would be NaN
        coefficient = torch.ones_like(norm)
    if norm.device.type != "cpu":
        coefficient = torch.where(measured.failed > 0, 1.0, coefficient)
    # Whether to skip is decided on the device too: the mask is passed on, never read here.
    skip = ~is_finite if nonfinite == "skip" else None
    if fold_into is not None and fold(fold_into, plan.parameters, coefficient, skip):
        return norm
    for gradients in measured.collected:
        if gradients.locals:
            values = [_stored_values(g) for g in gradients.locals] if plan.allow_sparse else gradients.locals
            _scale(values, None if max_norm == math.inf else coefficient, skip)
    return norm


def _rounded_norm(measured: GlobalNorm) -> Tensor:
    """The norm that gradients are clipped by, rounded once from fp64: the same bits on every rank, for any cut."""
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
            grad.masked_fill_(skip, 0.0)  # a product would not do: 0 times NaN is NaN


def _stored_values(grad: Tensor) -> Tensor:
    """The elements that a gradient stores, to be changed in place: the values of a sparse one, else all."""
    return grad._values() if grad.is_sparse else grad


def _write_back(plan: NormPlan, collected: Sequence[Collected]) -> None:
    """Put summed gradients in place of partial ones: otherwise the optimizer would sum each of them again."""
    for gradients in collected:
        if gradients.group.key.is_partial:
            for index, gradient in zip(gradients.indices, gradients.gradients, strict=True):
                if plan.parameters[index].grad is not None:
                    plan.parameters[index].grad = gradient


def _where_not_finite(plan: NormPlan, collected: Sequence[Collected], norm: Tensor, max_norm: float | None) -> str:
    bad_names = [
        plan.name_of(index)
        for gradients in collected
        for index, local in zip(gradients.indices, gradients.locals, strict=True)
        if not bool(torch.isfinite(_stored_values(local)).all())
    ]
    if bad_names:
        more = f" and {len(bad_names) - _MAX_NAMED} more" if len(bad_names) > _MAX_NAMED else ""
        where = f"not finite in {', '.join(bad_names[:_MAX_NAMED])}{more}"
    elif norm.isnan() or not collected:
        where = "not finite on another rank, whose message names the parameters"
    else:
        where = "every gradient of this rank is finite: another rank's are not, or their norm overflows"
    to = "" if max_norm is None else f", so gradients cannot be clipped to {max_norm:g}"
    return f"the gradient norm is {norm:g}{to}: {where}. Find the loss that is not finite, or pass nonfinite='skip'"


def _plan_request(parameters: Parameters, mesh: DeviceMesh | None, pp_mesh: DeviceMesh | None) -> PlanRequest:
    listed: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not listed and isinstance(parameters, Iterator):
        warnings.warn(
            "parameters is an iterator at its end, so nothing is clipped: pass a new iterator or a list",
            stacklevel=stack_level(),
        )
    names = None
    if listed and all(isinstance(item, tuple) and len(item) == 2 for item in listed):
        names, listed = [str(name) for name, _ in listed], [tensor for _, tensor in listed]
    problem = None
    if not_tensors := [item for item in listed if not isinstance(item, Tensor)]:
        problem = ValueError(
            f"parameters must be tensors, or pairs of a name and a tensor, got {not_tensors[0]!r:.60}: "
            "pass model.parameters() or model.named_parameters()"
        )
        names, listed = None, [item for item in listed if isinstance(item, Tensor)]
    return PlanRequest(listed, names, mesh, pp_mesh, problem)


def check_options(
    max_norm: float | None, norm_type: float, nonfinite: str, fold_into: object
) -> tuple[float | None, float]:
    """Refuse options that cannot be used, before anything is read.

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
        raise ValueError(
            f"nonfinite must be one of {', '.join(get_args(Nonfinite))}, got {nonfinite!r}: use one of them"
        )
    if fold_into is not None and not isinstance(fold_into, torch.optim.Optimizer):
        raise ValueError(
            f"fold_into must be one optimizer, got {fold_into!r:.60}: with several, clip without fold_into"
        )
    return max_norm, order


def check_max_norm(max_norm: object) -> float:
    """Refuse a threshold that cannot be used.

    Args:
        max_norm: a number, or a tensor of one element on the CPU. (To read one on a GPU would wait for it.)

    Returns:
        The threshold as a float.

    Raises:
        ValueError: when it is negative, NaN or not a number.
    """
    if isinstance(max_norm, Tensor) and max_norm.device.type == "cpu" and max_norm.numel() == 1:
        max_norm = max_norm.item()
    if isinstance(max_norm, bool) or not isinstance(max_norm, Real):
        raise ValueError(f"max_norm must be a number, got {max_norm!r}: convert it, for example by float()")
    try:
        max_norm = float(max_norm)
    except OverflowError:
        max_norm = math.inf
    if math.isnan(max_norm) or max_norm < 0:
        raise ValueError(f"max_norm must be ≥ 0, got {max_norm}: use math.inf to measure without clipping")
    return max_norm
