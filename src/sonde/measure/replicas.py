"""Are plain tensors on as many ranks as is assumed? Compares values over ranks; for debugging."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.measure.global_norm import group_of_mesh
from sonde.measure.norm_plan import NormPlan

Fingerprint = tuple[tuple[int, ...], float, float]


def check_replicas(plan: NormPlan, n_stages: int) -> None:
    """Compare the values of plain parameters over the ranks of a plan's mesh.

    Parameters that hold one value only, as zeros at initialisation, say nothing and are passed over.

    Args:
        plan: with a mesh; on every rank of it.
        n_stages: pipeline stages in the mesh.

    Raises:
        ValueError: on every rank, when one is on another number of ranks than is counted, or the plan has no mesh.
    """
    if plan.mesh is None:
        raise ValueError("verify=True compares the ranks of a mesh, got mesh=None: pass the mesh of all ranks")
    group = group_of_mesh(plan.mesh)
    if group is None:
        return
    mine = [
        (
            plan.name_of(index),
            _fingerprint(plan.parameters[index]),
            one.key.n_replicas or group.size() // n_stages,
        )
        for one in plan.groups
        if one.layout.mesh is None
        for index in one.indices
    ]
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, mine, group=group)
    # Experts that began as copies of one another have the same values under other names, and so has a weight that is
    # tied over pipeline stages: it is for the declaration to say which.
    of_name = Counter(key for of_rank in everyones for key in {(name, values) for name, values, _ in of_rank})
    of_any = Counter(values for of_rank in everyones for values in {values for _, values, _ in of_rank})
    for rank, of_rank in enumerate(everyones):
        for name, values, counted in of_rank:
            found = of_name[name, values]
            _, total, spread = values
            if spread > 0 and counted not in (found, of_any[values]):
                raise ValueError(
                    f"{name} of rank {rank} has the same values on {found} of {group.size()} ranks, and is counted as "
                    f"being on {counted}: pass replicas={{{name!r}: {found}}}, or make it a DTensor "
                    f"(sum of its values {total:g})"
                )


@torch.no_grad()
def _fingerprint(parameter: Tensor) -> Fingerprint:
    """Shape, sum, and a sum that depends on the order; the last is 0 where all values are the same."""
    values = parameter.detach().reshape(-1).to("cpu", torch.float64)
    if not values.numel() or bool((values == values[0]).all()):
        return tuple(parameter.shape), float(values.sum()), 0.0
    ordered = values @ torch.linspace(1.0, 2.0, values.numel(), dtype=torch.float64)
    return tuple(parameter.shape), float(values.sum()), 1.0 + abs(float(ordered))
