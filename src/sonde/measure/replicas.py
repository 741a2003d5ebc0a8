"""Do the ranks hold what is assumed of them: the same parameters, and plain ones on as many as is said?"""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.measure.global_norm import group_of_mesh, stages_inside
from sonde.measure.norm_plan import NormPlan
from sonde.measure.power_sums import accumulation_dtype

Fingerprint = tuple[tuple[int, ...], float, float]
_CONSTANT = 0.0
_DIGEST_BITS = 20  # squares of as many add up exactly in fp64, over 8,192 ranks


def check_same_parameters(plan: NormPlan) -> None:
    """Refuse a mesh whose ranks have different parameters, where no pipeline stages were named.

    Each would be counted in part only, as if all ranks had it. Names and shapes are compared, by one all-reduce.

    Args:
        plan: with a mesh, or nothing is compared; on every rank of it.

    Raises:
        ValueError: on every rank, when one has others than this one.
    """
    group = group_of_mesh(plan.mesh) if plan.mesh is not None and plan.pp_mesh is None else None
    if group is None:
        return
    digest = sum(zlib.crc32(said.encode()) for said in plan.said_of_each) % 2**_DIGEST_BITS
    mine = torch.tensor([digest, digest**2], dtype=accumulation_dtype(plan.device), device=plan.device)
    total = mine.clone()
    dist.all_reduce(total, group=group)
    if not torch.equal(total, mine * group.size()):
        raise ValueError(
            f"ranks of mesh= have different parameters, this one {len(plan.said_of_each)}: pass pp_mesh= if they are "
            "pipeline stages, replicas= for parameters that some ranks have only, and those without a gradient too"
        )


def check_replicas(plan: NormPlan) -> None:
    """Compare plain parameters, by their values and gradients, over the ranks of a plan's mesh.

    What is counted as the same on more ranks than have it is an error. What is counted as the same on fewer is one only
    where gradients are there to tell: experts that were built under one seed begin with the same values. Parameters
    that hold one value only, as zeros at initialisation, say nothing and are passed over.

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
    mine = [
        (plan.name_of(i), _of_parameter(plan.parameters[i]), one.key.n_replicas or n_same)
        for one in plan.groups
        if one.layout.mesh is None
        for i in one.indices
    ]
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, mine, group=group)
    if any(gradient is None for of_rank in everyones for _, (_, gradient), _ in of_rank):  # some would compare less
        everyones = [[(name, (value, None), counted) for name, (value, _), counted in rank] for rank in everyones]
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
                    f"being on {counted}: pass replicas={{{name!r}: {found}}}, or make it a DTensor "
                    f"(sum of its values {value[1]:g})"
                )


def _of_parameter(parameter: Tensor) -> tuple[Fingerprint, Fingerprint | None]:
    return _fingerprint(parameter), None if parameter.grad is None else _fingerprint(parameter.grad)


@torch.no_grad()
def _fingerprint(tensor: Tensor) -> Fingerprint:
    """Shape, sum, and a sum that depends on the order; the last is 0 where all values are the same."""
    values = tensor.detach().reshape(-1).to("cpu", torch.float64)
    if not values.numel() or bool((values == values[0]).all()):
        return tuple(tensor.shape), float(values.sum()), _CONSTANT
    ordered = values @ torch.linspace(1.0, 2.0, values.numel(), dtype=torch.float64)
    return tuple(tensor.shape), float(values.sum()), 1.0 + abs(float(ordered))
