"""Checks that each parameter of a plan is on as many ranks as it is counted on, by values and gradients."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.gradient_norm.plan import NormPlan
from sonde.parallel.placements import is_dtensor, local_tensor, spec_of
from sonde.parallel.process_groups import gather_objects, group_of_mesh
from sonde.parallel.shares import share_of

Fingerprint = tuple[tuple[int, ...], float, float]
_CONSTANT = 0.0


@dataclass(frozen=True)
class _Held:
    """A parameter of a rank: whether it is cut, on how many ranks it is counted, and what it holds.

    `gradient` is of a plain tensor.
    """

    name: str
    is_cut: bool
    counted: int
    value: Fingerprint
    gradient: Fingerprint | None


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
    for key, indices in plan.groups.items():
        for parameter, i in ((plan.parameters[i], i) for i in indices):
            counted = key.n_replicas or n_same // share_of(spec_of(parameter)).n_shards
            # A DTensor's gradient may be placed otherwise, or partial.
            is_cut = is_dtensor(parameter)
            gradient = None if is_cut or parameter.grad is None else _fingerprint(parameter.grad)
            own.append(_Held(plan.name_of(i), is_cut, counted, _fingerprint(local_tensor(parameter)), gradient))
    by_rank = gather_objects(group, lambda: own)
    # If one plain gradient is missing anywhere, compare by values alone: equal parameters would seem to differ.
    has_gradients = all(held.gradient is not None or held.is_cut for every in by_rank for held in every)

    def compared(held: _Held) -> tuple[Fingerprint, Fingerprint | None]:
        return held.value, held.gradient if has_gradients else None

    # Equal values under different names may be counted together: weights that are tied over pipeline stages have two
    # names, and experts may have begun as copies of each other. Only the declaration can tell.
    n_by_name = Counter(key for every in by_rank for key in {(held.name, compared(held)) for held in every})
    n_by_values = Counter(key for every in by_rank for key in {compared(held) for held in every})
    for rank, held in ((rank, held) for rank, every in enumerate(by_rank) for held in every):
        value, gradient = compared(held)
        n_ranks, n_at_most = n_by_name[held.name, (value, gradient)], n_by_values[value, gradient]
        is_telling = value[2] != _CONSTANT or (gradient is not None and gradient[2] != _CONSTANT)
        if is_telling and (held.counted > n_at_most or (held.counted < n_ranks and gradient is not None)):
            raise ValueError(
                f"{held.name} of rank {rank} has the same values on {n_ranks} of {group.size()} ranks, and is counted "
                f"as being on {held.counted}: pass replicas={{{held.name!r}: {n_ranks}}}, or make it a DTensor on all "
                f"of the mesh (the sum of its values on rank {rank} is {value[1]:g})"
            )


@torch.no_grad()
def _fingerprint(tensor: Tensor) -> Fingerprint:
    """Shape, sum, and a weighted sum that depends on the order; the weighted sum is 0 if all values are equal."""
    values = tensor.detach().reshape(-1).to("cpu", torch.float64)
    if not values.numel() or bool((values == values[0]).all()):
        return tuple(tensor.shape), float(values.sum()), _CONSTANT
    ordered = values @ torch.linspace(1.0, 2.0, values.numel(), dtype=torch.float64, device="cpu")
    return tuple(tensor.shape), float(values.sum()), 1.0 + abs(float(ordered))
