"""The norm of a whole model's gradient, however it is cut: local power sums, weighed, and summed over ranks.

With a mesh of all ranks that is one collective. Without one, gradients that are cut over the same ranks share one.
What is wrong on one rank is told to the others in the same collective, so that none is left waiting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.measure.norm_plan import Collected, NormPlan
from sonde.measure.partial import reduce_partial
from sonde.measure.placements import Layout, local_of, ranks_of, share
from sonde.measure.power_sums import accumulation_dtype, power_sum
from sonde.measure.process_groups import group_over, start_reduce

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_FLAGS = 2
"""Entries behind the parts' sums: how many are NaN, how many ranks found something wrong."""


@dataclass(frozen=True)
class GlobalNorm:
    """What was measured; the same bits on every rank that was summed.

    Attributes:
        norm: of the whole gradient, 0-dim, fp64.
        by_part: of the gradients of each part of the model, [parts], fp64.
        failed: how many ranks found something wrong, 0-dim; their peers know of it by nothing else on a GPU.
        collected: this rank's gradients; partial ones are summed already, and not yet written back.
    """

    norm: Tensor
    by_part: Tensor
    failed: Tensor
    collected: list[Collected]


def global_norm(plan: NormPlan, order: float, *, pp_mesh: DeviceMesh | None = None) -> GlobalNorm:
    """The p-norm of all gradients of all ranks together, each element counted once.

    Args:
        plan: this rank's parameters; the same on every rank of a pipeline stage.
        order: p > 0, or `math.inf`.
        pp_mesh: the pipeline stages, each with parameters of its own.

    Returns:
        A `GlobalNorm`.

    Raises:
        ValueError: for a gradient that cannot be counted, naming it and the way out. On every rank, where the sum can
            be read without waiting (on the CPU); on a GPU on the rank that has it.
    """
    found, problem = plan.collect()
    found = _sum_partial(plan, found)
    device = plan.device
    n_stages = stages_inside(plan, pp_mesh)
    under_way: list[tuple[Tensor, dist.Work | None]] = []
    for group, of_group in _by_collective(plan, found):
        packed = _pack(plan, of_group, order, failed=problem is not None, n_stages=n_stages, device=device)
        under_way.append((packed, start_reduce(packed, group, _operation(order))))
    total = torch.zeros(plan.n_parts + _FLAGS, dtype=accumulation_dtype(device), device=device)
    has_peers = False
    for packed, work in under_way:
        if work is not None:
            has_peers = True
            work.wait()
        total = torch.maximum(total, packed) if math.isinf(order) else total + packed
    if pp_mesh is not None and n_stages == 1:
        work = start_reduce(total, group_of_mesh(pp_mesh), _operation(order))
        if work is not None:
            has_peers = True
            work.wait()
    if problem is not None:
        raise problem
    if has_peers and device.type == "cpu" and total[-1].item():  # at hand: nothing is waited for
        raise ValueError(
            "another rank found a gradient that cannot be counted, and says which: gradients are as they were"
        )
    return _read(total, order, plan.n_parts, found)


def stages_inside(plan: NormPlan, pp_mesh: DeviceMesh | None) -> int:
    """Pipeline stages among the ranks of the plan's mesh: 1 where a collective of their own is to sum them."""
    if pp_mesh is None or plan.mesh is None or not ranks_of(pp_mesh) <= ranks_of(plan.mesh):
        return 1
    return pp_mesh.size()


def warm_up(plan: NormPlan, pp_mesh: DeviceMesh | None = None) -> None:
    """Open the communicators that a plan's norm needs: the first collective on each takes far longer than the others.

    On every rank that holds a part of the model.
    """
    groups = [group for group, _ in _by_collective(plan, [])]
    if pp_mesh is not None and stages_inside(plan, pp_mesh) == 1:
        groups.append(group_of_mesh(pp_mesh))
    for group in groups:
        if work := start_reduce(torch.zeros(1, device=plan.device), group):
            work.wait()


def _read(total: Tensor, order: float, n_parts: int, found: list[Collected]) -> GlobalNorm:
    sums, (is_nan, failed) = total[:n_parts], total[n_parts:].unbind()
    if math.isinf(order):
        norm, by_part = torch.where(is_nan > 0, torch.nan, sums.max()), sums
    else:
        norm, by_part = sums.sum().pow(1.0 / order), sums.pow(1.0 / order)
    return GlobalNorm(norm, by_part, failed, found)


def _sum_partial(plan: NormPlan, found: list[Collected]) -> list[Collected]:
    """Partial gradients summed over their ranks; where one is missing, its rank takes part with zeros."""
    partial = [one for one in found if one.group.key.is_partial]
    if not partial:
        return found
    there = {i: g for one in partial for i, g in zip(one.indices, one.gradients, strict=True)}
    planned = sorted(i for one in partial for i in one.group.indices)
    reduced = reduce_partial([there[i] if i in there else plan.zeros(i) for i in planned])
    by_index = dict(zip(planned, reduced, strict=True))
    mended = []
    for one in found:
        if one.group.key.is_partial:
            indices = list(one.group.indices)
            gradients = [by_index[i] for i in indices]
            one = Collected(one.group, indices, gradients, [local_of(g) for g in gradients])
        mended.append(one)
    return mended


def _by_collective(
    plan: NormPlan, found: list[Collected]
) -> Iterable[tuple[dist.ProcessGroup | None, list[Collected]]]:
    """What is summed over which ranks: the same collectives in the same order on every rank."""
    if plan.mesh is not None:
        yield group_of_mesh(plan.mesh), found
        return
    by_ranks: dict[tuple[int, ...], list[Collected]] = {layout.sharding_ranks: [] for layout in plan.layouts}
    for one in found:
        by_ranks.setdefault(one.group.key.ranks, []).append(one)
    for layout in plan.layouts:
        yield _group_of(layout), by_ranks.pop(layout.sharding_ranks)
    yield None, by_ranks.pop((), [])


def group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The process group of all ranks of a mesh; None where that is one."""
    if mesh.size() == 1:  # torch makes no group for some of these
        return None
    return mesh.get_group() if mesh.ndim == 1 else group_over(sorted(ranks_of(mesh)))


def _group_of(layout: Layout) -> dist.ProcessGroup:
    assert layout.mesh is not None
    return layout.mesh.get_group(layout.sharded[0]) if len(layout.sharded) == 1 else group_over(layout.sharding_ranks)


def _operation(order: float) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM


def _pack(
    plan: NormPlan, found: list[Collected], order: float, *, failed: bool, n_stages: int, device: torch.device
) -> Tensor:
    """[sum or largest of each part, whether one is NaN, whether this rank failed]: one vector, one collective."""
    packed = torch.zeros(plan.n_parts + _FLAGS, dtype=accumulation_dtype(device), device=device)
    for one in found:
        if not one.locals:
            continue
        key = one.group.key
        value = power_sum(one.locals, order).to(device, non_blocking=True)
        if math.isinf(order):
            packed[key.part] = torch.maximum(packed[key.part], value)
            continue
        counts = 1.0
        if plan.mesh is not None:
            counts = share(one.group.layout, n_ranks=plan.mesh.size(), n_stages=n_stages, n_replicas=key.n_replicas)
        packed[key.part] += counts * value
    if math.isinf(order):
        # MAX over ranks loses NaN.
        sums = packed[: plan.n_parts]
        packed[-2] = sums.isnan().any()
        packed[: plan.n_parts] = sums.nan_to_num(nan=0.0, posinf=math.inf)
    if failed:
        packed[-1] = 1.0
    return packed
