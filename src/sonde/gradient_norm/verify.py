"""Checks that ranks hold what a plan assumes: the same parameters, and each on as many ranks as it is counted on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import cast

import torch
from torch import Tensor

from sonde.gradient_norm.cross_check import NormRequest, compared_numbers, disagreement
from sonde.gradient_norm.global_norm import SummedVector, rank_sums
from sonde.gradient_norm.held_error import OTHER_PLAN
from sonde.gradient_norm.plan import NormPlan
from sonde.parallel.placements import is_dtensor, local_tensor, spec_of
from sonde.parallel.process_groups import gather_objects, group_of_mesh, is_fake
from sonde.parallel.shares import share_of

Fingerprint = tuple[tuple[int, ...], float, float]
_CONSTANT = 0.0


@dataclasses.dataclass(frozen=True)
class _Held:
    """A parameter of a rank: whether it is cut, on how many ranks it is counted, and what it holds.

    `gradient` is of a plain tensor.
    """

    name: str
    is_cut: bool
    counted: int
    value: Fingerprint
    gradient: Fingerprint | None


def compare_plans(plan: NormPlan, *, verify: bool) -> None:
    """Refuse a mesh whose ranks have different parameters, or different ones within a pipeline stage.

    Each norm compares them too; here it is known before training. One all-reduce over the mesh compares names, shapes
    and dtypes, and says whether a rank has an error. It comes before any other collective: ranks with different
    parameters would open different communicators.

    Args:
        plan: on every rank of its mesh; without a mesh nothing is compared.
        verify: whether this rank will call `check_replicas`; the ranks compare it.

    Raises:
        ValueError: on every rank, when a rank has an error or two ranks have different parameters. Parameters without
            names are compared by shape and dtype.
    """
    group = group_of_mesh(plan.mesh) if plan.mesh is not None else None
    if group is None or is_fake(group):
        return
    ((_, peers),) = plan.remembered(rank_sums)
    request, total = NormRequest(2.0, verify=verify), SummedVector(plan, uses_max=False)
    total.slots.copy_(cast(Tensor, compared_numbers(plan, request, peers, None)))  # there are peers, as in any group
    problem = plan.request_problem or plan.gradient_problem
    total.failed.fill_(problem is not None)
    total.wait(total.start(group), group)
    if problem is not None:
        raise problem
    if total.failed.item():
        raise ValueError(OTHER_PLAN)
    if problem := disagreement(plan, request, total.slots):
        raise problem


def check_replicas(plan: NormPlan) -> None:
    """Compare the ranks' parameters over a plan's mesh, by values and gradients.

    It is an error if a parameter is counted on more ranks than have its values. If it is counted on fewer ranks, it is
    an error only for plain tensors whose gradients all ranks have: experts that were built under one seed begin with
    the same values and differ only by their gradients. A parameter whose elements are all equal, such as zeros at
    initialisation, is not checked: equal values prove nothing there.

    Args:
        plan: with a mesh; on every rank of that mesh.

    Raises:
        ValueError: on every rank, when a parameter is on another number of ranks than counted, or the plan has no mesh.
    """
    if plan.mesh is None:
        raise ValueError("verify=True compares the ranks of a mesh, got mesh=None: pass the mesh of all ranks")
    group = group_of_mesh(plan.mesh)
    if group is None:
        return
    n_same = group.size() // plan.n_stages_in_mesh
    own: list[_Held] = []
    for parameter_group in plan.groups:
        for parameter, i in ((plan.parameters[i], i) for i in parameter_group.indices):
            counted = parameter_group.key.n_replicas or n_same // share_of(spec_of(parameter)).n_shards
            # A DTensor's gradient may be placed otherwise, or partial.
            is_cut = is_dtensor(parameter)
            gradient = None if is_cut or parameter.grad is None else _fingerprint(parameter.grad)
            own.append(_Held(plan.name_of(i), is_cut, counted, _fingerprint(local_tensor(parameter)), gradient))
    by_rank = gather_objects(group, lambda: own)
    # If one plain gradient is missing anywhere, compare by values alone: equal parameters would seem to differ.
    if any(held.gradient is None and not held.is_cut for every in by_rank for held in every):
        by_rank = [[dataclasses.replace(held, gradient=None) for held in every] for every in by_rank]
    # Equal values under different names may be counted together: weights that are tied over pipeline stages have two
    # names, and experts may have begun as copies of each other. Only the declaration can tell.
    n_by_name = Counter(key for every in by_rank for key in {(h.name, h.value, h.gradient) for h in every})
    n_by_values = Counter(key for every in by_rank for key in {(h.value, h.gradient) for h in every})
    for rank, every in enumerate(by_rank):
        for held in every:
            name, counted, value, gradient = held.name, held.counted, held.value, held.gradient
            n_ranks, n_at_most = n_by_name[name, value, gradient], n_by_values[value, gradient]
            is_telling = value[2] != _CONSTANT or (gradient is not None and gradient[2] != _CONSTANT)
            if is_telling and (counted > n_at_most or (counted < n_ranks and gradient is not None)):
                raise ValueError(
                    f"{name} of rank {rank} has the same values on {n_ranks} of {group.size()} ranks, and is counted "
                    f"as being on {counted}: pass replicas={{{name!r}: {n_ranks}}}, or make it a DTensor on all of the "
                    f"mesh (the sum of its values on rank {rank} is {value[1]:g})"
                )


@torch.no_grad()
def _fingerprint(tensor: Tensor) -> Fingerprint:
    """Shape, sum, and a weighted sum that depends on the order; the weighted sum is 0 if all values are equal."""
    values = tensor.detach().reshape(-1).to("cpu", torch.float64)
    if not values.numel() or bool((values == values[0]).all()):
        return tuple(tensor.shape), float(values.sum()), _CONSTANT
    ordered = values @ torch.linspace(1.0, 2.0, values.numel(), dtype=torch.float64, device="cpu")
    return tuple(tensor.shape), float(values.sum()), 1.0 + abs(float(ordered))
