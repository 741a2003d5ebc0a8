"""Checks that ranks hold what a plan assumes: the same parameters, and each on as many ranks as it is counted on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.gradient_norm.cross_check import NormRequest, disagreement
from sonde.gradient_norm.global_norm import rank_sums
from sonde.gradient_norm.held_error import OTHER_PLAN
from sonde.gradient_norm.plan import NormPlan
from sonde.gradient_norm.summed_vector import SummedVector
from sonde.parallel.placements import is_dtensor, local_tensor, spec_of
from sonde.parallel.process_groups import group_of_mesh, is_fake
from sonde.parallel.shares import share_of

Fingerprint = tuple[tuple[int, ...], float, float]
Held = tuple[str, tuple[Fingerprint, Fingerprint | None], int]
"""A parameter's name, the fingerprints of its values and gradient, and how many ranks it is counted on."""
_CONSTANT = 0.0


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
    total.fill(plan, [], request, peers)
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
    plain: list[Held] = []
    sharded: list[Held] = []
    for parameter_group in plan.groups:
        for i in parameter_group.indices:
            parameter = plan.parameters[i]
            counted = parameter_group.key.n_replicas or n_same // share_of(spec_of(parameter)).n_shards
            held = sharded if is_dtensor(parameter) else plain
            held.append((plan.name_of(i), _fingerprints(parameter), counted))
    by_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(by_rank, (plain, sharded), group=group)
    # If one plain gradient is missing anywhere, compare by values alone: equal parameters would seem to differ.
    if any(gradient is None for plain, _ in by_rank for _, (_, gradient), _ in plain):
        by_rank = [([(n, (value, None), counted) for n, (value, _), counted in p], s) for p, s in by_rank]
    by_rank = [[*plain, *sharded] for plain, sharded in by_rank]
    # Equal values under different names may be counted together: weights that are tied over pipeline stages have two
    # names, and experts may have begun as copies of each other. Only the declaration can tell.
    n_by_name = Counter(key for held in by_rank for key in {(name, values) for name, values, _ in held})
    n_by_values = Counter(values for held in by_rank for values in {values for _, values, _ in held})
    for rank, held in enumerate(by_rank):
        for name, values, counted in held:
            n_ranks, n_at_most = n_by_name[name, values], n_by_values[values]
            value, gradient = values
            is_telling = value[2] != _CONSTANT or (gradient is not None and gradient[2] != _CONSTANT)
            if is_telling and (counted > n_at_most or (counted < n_ranks and gradient is not None)):
                raise ValueError(
                    f"{name} of rank {rank} has the same values on {n_ranks} of {group.size()} ranks, and is counted "
                    f"as being on {counted}: pass replicas={{{name!r}: {n_ranks}}}, or make it a DTensor on all of the "
                    f"mesh (the sum of its values on rank {rank} is {value[1]:g})"
                )


def _fingerprints(parameter: Tensor) -> tuple[Fingerprint, Fingerprint | None]:
    """Of the local values, and of the gradient of a plain tensor: a DTensor's may be placed otherwise, or partial."""
    gradient = None if parameter.grad is None or is_dtensor(parameter) else _fingerprint(parameter.grad)
    return _fingerprint(local_tensor(parameter)), gradient


@torch.no_grad()
def _fingerprint(tensor: Tensor) -> Fingerprint:
    """Shape, sum, and a weighted sum that depends on the order; the weighted sum is 0 if all values are equal."""
    values = tensor.detach().reshape(-1).to("cpu", torch.float64)
    if not values.numel() or bool((values == values[0]).all()):
        return tuple(tensor.shape), float(values.sum()), _CONSTANT
    ordered = values @ torch.linspace(1.0, 2.0, values.numel(), dtype=torch.float64, device="cpu")
    return tuple(tensor.shape), float(values.sum()), 1.0 + abs(float(ordered))
