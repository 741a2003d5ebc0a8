"""Do the ranks hold what is assumed of them: the same parameters, and plain ones on as many as is said?"""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.gradient_norm.global_norm import stages_inside
from sonde.gradient_norm.plan import NormPlan
from sonde.parallel.devices import accumulation_dtype
from sonde.parallel.placements import is_dtensor, layout_of, local_tensor
from sonde.parallel.process_groups import group_of_mesh

Fingerprint = tuple[tuple[int, ...], float, float]
Held = tuple[str, tuple[Fingerprint, Fingerprint | None], int]
"""A parameter's name, its values and gradient, and on how many ranks it is counted as being."""
_CONSTANT = 0.0
_DIGEST_BITS = 18  # squares of as many add up exactly in fp64, over 100,000 ranks


def check_same_parameters(plan: NormPlan) -> None:
    """Refuse a mesh whose ranks have different parameters, where no pipeline stages were named.

    Each would be counted in part only, as if all ranks had it. Names and shapes are compared, by one all-reduce.

    Args:
        plan: with a mesh, or nothing is compared; on every rank of it.

    Raises:
        ValueError: on every rank, when one has others than another. Those without names are the same if their shapes
            are.
    """
    group = group_of_mesh(plan.mesh) if plan.mesh is not None and plan.pp_mesh is None else None
    if group is None:
        return
    digest = sum(zlib.crc32(said.encode()) for said in plan.said_of_each) % 2**_DIGEST_BITS
    has_any = bool(plan.said_of_each)  # a rank without parameters takes part, and has no others
    total = torch.tensor([has_any, digest, digest**2], dtype=accumulation_dtype(plan.device), device=plan.device)
    dist.all_reduce(total, group=group)
    n, of_digests, of_squares = map(int, total.tolist())
    if n * of_squares != of_digests**2:
        raise ValueError(
            f"ranks of mesh= have different parameters, this one {len(plan.said_of_each)}: pass pp_mesh= if they are "
            "pipeline stages, replicas= for parameters that some ranks have only, and those without a gradient too"
        )


def check_replicas(plan: NormPlan) -> None:
    """Compare what ranks hold of parameters, by values and gradients, over a plan's mesh.

    What is counted as the same on more ranks than have it is an error. What is counted as the same on fewer is one only
    for plain tensors whose gradients are there to tell: experts that were built under one seed begin with the same
    values. Parameters that hold one value only, as zeros at initialisation, say nothing and are passed over.

    Args:
        plan: with a mesh; on every rank of it.

    Raises:
        ValueError: on every rank, when one is on another number of ranks than is counted, or the plan has no mesh.
    """
    if plan.mesh is None:
        raise ValueError("verify=True compares the ranks of a mesh, got mesh=None: pass the mesh of all ranks")
    group = group_of_mesh(plan.mesh)
    if group is None:
        return
    n_same = group.size() // stages_inside(plan)
    plain: list[Held] = []
    cut: list[Held] = []
    for one in plan.groups:
        for i in one.indices:
            parameter = plan.parameters[i]
            is_cut = is_dtensor(parameter)  # whose gradient may lie otherwise, or be a part of a sum
            counted = one.key.n_replicas or n_same // layout_of(parameter).n_shards
            (cut if is_cut else plain).append((plan.name_of(i), _of_parameter(parameter, is_cut), counted))
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, (plain, cut), group=group)
    if any(gradient is None for of_rank, _ in everyones for _, (_, gradient), _ in of_rank):  # some would compare less
        everyones = [([(n, (value, None), counted) for n, (value, _), counted in p], c) for p, c in everyones]
    everyones = [[*plain, *cut] for plain, cut in everyones]
    # Weights that are tied over pipeline stages have the same values under other names, and so have experts that began
    # as copies of one another: it is for the declaration to say which.
    of_name = Counter(key for of_rank in everyones for key in {(name, values) for name, values, _ in of_rank})
    of_any = Counter(values for of_rank in everyones for values in {values for _, values, _ in of_rank})
    for rank, of_rank in enumerate(everyones):
        for name, values, counted in of_rank:
            found, at_most = of_name[name, values], of_any[values]
            value, gradient = values
            tells = value[2] != _CONSTANT or (gradient is not None and gradient[2] != _CONSTANT)
            if tells and (counted > at_most or (counted < found and gradient is not None)):
                raise ValueError(
                    f"{name} of rank {rank} has the same values on {found} of {group.size()} ranks, and is counted as "
                    f"being on {counted}: pass replicas={{{name!r}: {found}}}, or make it a DTensor on all of the mesh "
                    f"(sum of its values there {value[1]:g})"
                )


def _of_parameter(parameter: Tensor, is_cut: bool) -> tuple[Fingerprint, Fingerprint | None]:
    gradient = None if is_cut or parameter.grad is None else _fingerprint(parameter.grad)
    return _fingerprint(local_tensor(parameter)), gradient


@torch.no_grad()
def _fingerprint(tensor: Tensor) -> Fingerprint:
    """Shape, sum, and a sum that depends on the order; the last is 0 where all values are the same."""
    values = tensor.detach().reshape(-1).to("cpu", torch.float64)
    if not values.numel() or bool((values == values[0]).all()):
        return tuple(tensor.shape), float(values.sum()), _CONSTANT
    ordered = values @ torch.linspace(1.0, 2.0, values.numel(), dtype=torch.float64)
    return tuple(tensor.shape), float(values.sum()), 1.0 + abs(float(ordered))
