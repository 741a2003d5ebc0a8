"""The norm now and the clip later, as two calls: for training loops that use the norm before they clip."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from torch import Tensor, nn

from sonde.gradient_norm.clip import Parameters, measure_and_clip, tensors_of
from sonde.gradient_norm.global_norm import MAX_PARTS
from sonde.gradient_norm.plan import NormPlan
from sonde.gradient_norm.refused_gradients import HeldError
from sonde.gradient_norm.scaling import Nonfinite, alike, check_max_norm, clip_coefficient, scale_
from sonde.parallel.devices import is_at_hand
from sonde.parallel.placements import is_dtensor
from sonde.parallel.unwrap import outside_graphs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_WEIGHTS = (
    "tensors must be gradients, got {}: pass [p.grad for p in model.parameters() if p.grad is not None], or the plan "
    "of group_parameters_for_norm; for the norm of the weights, [p.detach() for p in model.parameters()]"
)


@overload
def get_total_norm(
    tensors: Parameters | NormPlan,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: DeviceMesh | None = None,
    pp_mesh: DeviceMesh | None = None,
    replicas: Mapping[Any, int] | None = None,
    by_group: None = None,
) -> Tensor: ...
@overload
def get_total_norm(
    tensors: Parameters,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: DeviceMesh | None = None,
    pp_mesh: DeviceMesh | None = None,
    replicas: Mapping[Any, int] | None = None,
    by_group: Sequence[str],
) -> tuple[Tensor, dict[str, Tensor]]: ...
@outside_graphs
def get_total_norm(
    tensors: Parameters | NormPlan,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: DeviceMesh | None = None,
    pp_mesh: DeviceMesh | None = None,
    replicas: Mapping[Any, int] | None = None,
    by_group: Sequence[str] | None = None,
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """The norm of tensors, gradients as a rule, of all ranks together, as `clip_grad_norm_` takes it.

    A drop-in for `torch.nn.utils.get_total_norm` that is right however the tensors are cut over ranks. Nothing is
    changed; `clip_grads_with_norm_` clips by the result.

    Args:
        tensors: a tensor, tensors, or (name, tensor) pairs. The norm is of these tensors themselves: pass gradients,
            `[p.grad for p in model.parameters() if p.grad is not None]`. Or a plan that `group_parameters_for_norm`
            returned: then it is the norm of its parameters' gradients, and nothing is planned anew. A tensor that is
            listed twice counts twice, as with torch: the norm is of the list that was passed. A module and its
            parameters are refused: their norm would be that of the weights.
        norm_type: as for `clip_grad_norm_`.
        error_if_nonfinite: raise when the norm is not finite; waits for the device.
        foreach: accepted so that calls written for torch run unchanged; it has no effect.
        mesh: as for `clip_grad_norm_`; a plan knows its own.
        pp_mesh: as for `clip_grad_norm_`.
        replicas: as for `clip_grad_norm_`, by the tensors passed or their names; a plan knows its own.
        by_group: the name of each tensor's group, [tensors]; the same names on every rank. For a group that this rank
            has no tensor of, pass an empty tensor. At most 1,024 groups.

    Returns:
        The norm: 0-dim, fp32, or fp64 if a tensor of this rank is. With `by_group`, the norm, and the norms of the
        groups by name; the p-th powers of the groups' norms add up to the norm's.

    Raises:
        ValueError: as `clip_grad_norm_`; for a module and for parameters; and when `by_group` has another length than
            `tensors`.
        RuntimeError: for a norm that is not finite, with `error_if_nonfinite`.

    Example:
        >>> gradients = [torch.tensor([3.0, 4.0]), torch.tensor([12.0])]
        >>> get_total_norm(gradients)
        tensor(13.)
        >>> get_total_norm(gradients, by_group=["embed", "blocks"])[1]
        {'blocks': tensor(12.), 'embed': tensor(5.)}
    """
    problem = HeldError()
    if isinstance(tensors, NormPlan):
        plan = tensors
        if mesh is not None or replicas is not None or by_group is not None:
            problem.keep(ValueError("a plan knows its mesh and replicas, and has no groups: pass tensors in its place"))
    else:
        listed, names, error = tensors_of([] if isinstance(tensors, nn.Module) else tensors)
        if isinstance(tensors, nn.Module):
            error = ValueError(_WEIGHTS.format(f"the module {type(tensors).__name__}, whose tensors are its weights"))
        elif any(isinstance(tensor, nn.Parameter) for tensor in listed):
            error = ValueError(_WEIGHTS.format("parameters, which are weights"))
        groups = problem.attempt(_checked_groups, by_group, len(listed), otherwise=None) if error is None else None
        plan = NormPlan(
            listed,
            names,
            mesh=mesh,
            pp_mesh=pp_mesh,
            replicas=replicas,
            by_part=groups,
            problem=error,
            are_gradients=True,
        )
    how: Nonfinite = "raise" if error_if_nonfinite else "ignore"
    measured, norm = measure_and_clip(plan, None, norm_type, pp_mesh, how, problem=problem)
    if by_group is None:
        return norm
    by_part = measured.rounded(measured.by_part)
    return norm, dict(zip(plan.part_names, by_part.unbind(), strict=False))  # of no group, one part without a name


def _checked_groups(by_group: object, n_tensors: int) -> Sequence[str] | None:
    """The name of each tensor's group, as passed; None without groups."""
    if by_group is None:
        return None
    if isinstance(by_group, str) or not isinstance(by_group, Sequence) or not all(isinstance(g, str) for g in by_group):
        raise ValueError(
            f"by_group must be a list with the name of each tensor's group, got {by_group!r:.60}: pass a list of names"
        )
    if (n_groups := len(set(by_group))) > MAX_PARTS:
        raise ValueError(f"by_group must name at most {MAX_PARTS:,} groups, got {n_groups:,}: take fewer at a time")
    if len(by_group) != n_tensors:
        raise ValueError(
            f"by_group must name the group of each tensor, got {len(by_group)} names for {n_tensors} tensors: pass one "
            "name each"
        )
    return by_group


@outside_graphs
@torch.no_grad()
def clip_grads_with_norm_(
    parameters: Parameters | NormPlan, max_norm: float, total_norm: Tensor | float, foreach: bool | None = None
) -> None:
    """Scale gradients in place as a clip to `max_norm` does, by a norm that is known already.

    A drop-in for `torch.nn.utils.clip_grads_with_norm_`. It takes no collective, and does not wait for a GPU. (If
    `total_norm` is a DTensor, as torch's function returns it, its parts are joined by one collective.)

    Args:
        parameters: as for `clip_grad_norm_`, or a plan; a tensor that comes twice is scaled once.
        max_norm: the largest norm allowed, ≥ 0; 0 zeroes the gradients, `math.inf` leaves them.
        total_norm: of the gradients of all ranks, as `get_total_norm` returns it.
        foreach: accepted so that calls written for torch run unchanged; it has no effect.

    Raises:
        ValueError: for `max_norm` < 0 or NaN, or parameters that are no tensors.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> norm = get_total_norm(weight.grad)
        >>> clip_grads_with_norm_(weight, 1.0, norm)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    max_norm = check_max_norm(max_norm)
    if isinstance(parameters, NormPlan):
        tensors: Sequence[Tensor] = parameters.parameters
    else:
        tensors, _, problem = tensors_of(parameters)
        if problem is not None:
            raise problem
    if max_norm == math.inf:
        return
    if isinstance(total_norm, Tensor) and is_dtensor(total_norm):
        total_norm = cast(Any, total_norm).full_tensor()
    grads = [p.grad for p in {id(p): p for p in tensors}.values() if p.grad is not None]
    for gradients in alike(grads):
        norm = torch.as_tensor(total_norm, device=gradients[0].device)
        coefficient = clip_coefficient(max_norm, norm)
        is_one = is_at_hand(coefficient.device) and coefficient.item() == 1.0  # a GPU would be waited for
        scale_(gradients, None if is_one else coefficient)
