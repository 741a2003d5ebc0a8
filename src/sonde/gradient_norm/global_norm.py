"""The norm of a whole model's gradient, however it is cut: local power sums, weighed, and summed over ranks.

With a mesh of all ranks that is one collective. Without one, gradients that are cut over the same ranks share one.
What is wrong on one rank is told to the others in the same collective, so that none is left waiting.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.gradient_norm.gradient_groups import Collected
from sonde.gradient_norm.partial_gradients import reduce_partial
from sonde.gradient_norm.plan import NormPlan
from sonde.gradient_norm.power_sums import LARGEST_PLAIN_ORDER, power_sum
from sonde.parallel.devices import accumulation_dtype, to_device
from sonde.parallel.placements import Layout, local_tensor, ranks_of, share
from sonde.parallel.process_groups import group_of_mesh, group_over, start_reduce

_IS_NAN, _FAILED, _IS_DOUBLE = -3, -2, -1
"""Entries behind the parts' sums: how many are NaN, how many ranks found something wrong, how many have fp64."""
_FLAGS = 3


@dataclass(frozen=True)
class GlobalNorm:
    """What was measured; the same bits on every rank that was summed.

    Attributes:
        norm: of the whole gradient, 0-dim, fp64.
        by_part: of the gradients of each part of the model, [parts], fp64.
        failed: how many ranks found something wrong, 0-dim; their peers know of it by nothing else on a GPU.
        is_double: how many ranks have fp64 gradients, 0-dim.
        collected: this rank's gradients; partial ones are summed already, and not yet written back.
    """

    norm: Tensor
    by_part: Tensor
    failed: Tensor
    is_double: Tensor
    collected: list[Collected]


def global_norm(plan: NormPlan, order: float, *, problem: ValueError | None = None) -> GlobalNorm:
    """The p-norm of all gradients of all ranks together, each element counted once.

    Args:
        plan: this rank's parameters; the same on every rank of a pipeline stage.
        order: p > 0, or `math.inf`. Above 6 it takes as many collectives again, for the largest element.
        problem: what was found wrong on this rank already, to be told to the others.

    Returns:
        A `GlobalNorm`.

    Raises:
        ValueError: for a gradient that cannot be counted, naming it and the way out. On every rank that shares a sum
            with it, where the sum can be read without waiting (on the CPU); on a GPU on the rank that has it.
    """
    found, wrong = plan.collect()
    problem = problem or wrong
    found = _sum_partial(plan, found)
    if not LARGEST_PLAIN_ORDER < order < math.inf:
        return _measure(plan, found, order, problem)
    try:
        largest = _measure(plan, found, math.inf, problem).norm
    except ValueError as error:  # not all ranks have heard of it, and those that have not wait for the second sum
        _measure(plan, found, order, error)
        raise
    unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    of_multiples = _measure(plan, found, order, None, unit)
    return dataclasses.replace(of_multiples, norm=of_multiples.norm * unit, by_part=of_multiples.by_part * unit)


def _measure(
    plan: NormPlan, found: list[Collected], order: float, problem: ValueError | None, unit: Tensor | None = None
) -> GlobalNorm:
    """The norm of what was collected, in multiples of `unit`."""
    device = plan.device
    n_stages = stages_inside(plan)
    under_way: list[tuple[Tensor, dist.Work | None]] = []
    for group, of_group in _by_collective(plan, found):
        try:
            packed = _pack(plan, of_group, order, unit, n_stages)
        except RuntimeError as error:  # a kernel that is not there, no memory: the others wait for this rank
            problem = problem or ValueError(f"gradients cannot be summed on {device}: {error}")
            packed = torch.zeros(plan.n_parts + _FLAGS, dtype=accumulation_dtype(device), device=device)
        packed[_FAILED] = problem is not None
        under_way.append((packed, start_reduce(packed, group, _operation(order))))
    total = torch.zeros(plan.n_parts + _FLAGS, dtype=accumulation_dtype(device), device=device)
    has_peers = False
    for packed, work in under_way:
        if work is not None:
            has_peers = True
            work.wait()
        total = torch.maximum(total, packed) if math.isinf(order) else total + packed
    if plan.pp_mesh is not None and n_stages == 1:
        work = start_reduce(total, group_of_mesh(plan.pp_mesh), _operation(order))
        if work is not None:
            has_peers = True
            work.wait()
    if problem is not None:
        raise problem
    if has_peers and device.type == "cpu" and total[_FAILED].item():  # at hand: nothing is waited for
        raise ValueError(
            "another rank found a gradient that cannot be counted, and says which: gradients are as they were"
        )
    return _read(total, order, plan.n_parts, found)


def stages_inside(plan: NormPlan) -> int:
    """Pipeline stages among the ranks of the plan's mesh: 1 where a collective of their own is to sum them."""
    if plan.pp_mesh is None or plan.mesh is None or not ranks_of(plan.pp_mesh) <= ranks_of(plan.mesh):
        return 1
    return plan.pp_mesh.size()


def warm_up(plan: NormPlan) -> None:
    """Open the communicators that a plan's norm needs: the first collective on each takes far longer than the others.

    On every rank that holds a part of the model. Waits.

    Raises:
        ValueError: when something is wrong with the plan, here or on a rank that shares a sum with this one.
    """
    groups = [group for group, _ in _by_collective(plan, [])]
    if plan.pp_mesh is not None and stages_inside(plan) == 1:
        groups.append(group_of_mesh(plan.pp_mesh))
    groups += [mesh.get_group(axis) for mesh in plan.meshes for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    failed = torch.zeros(1, device=plan.device)
    for group in dict.fromkeys(groups):
        failed = failed.clamp(max=1.0) + float(plan.problem is not None)
        if work := start_reduce(failed, group):
            work.wait()
    if plan.problem is not None:
        raise plan.problem
    if failed.item():
        raise ValueError("another rank cannot plan for its gradients, and says why")


def _read(total: Tensor, order: float, n_parts: int, found: list[Collected]) -> GlobalNorm:
    sums = total[:n_parts]
    if math.isinf(order):
        norm, by_part = (torch.where(total[_IS_NAN] > 0, torch.nan, of) for of in (sums.max(), sums))
    else:
        norm, by_part = sums.sum().pow(1.0 / order), sums.pow(1.0 / order)
    return GlobalNorm(norm, by_part, total[_FAILED], total[_IS_DOUBLE], found)


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
            one = Collected(one.group, indices, gradients, [local_tensor(g) for g in gradients])
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


def _group_of(layout: Layout) -> dist.ProcessGroup:
    assert layout.mesh is not None
    return layout.mesh.get_group(layout.sharded[0]) if len(layout.sharded) == 1 else group_over(layout.sharding_ranks)


def _operation(order: float) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM


def _pack(plan: NormPlan, found: list[Collected], order: float, unit: Tensor | None, n_stages: int) -> Tensor:
    """[sum or largest of each part, flags]: one vector, one collective."""
    device = plan.device
    packed = torch.zeros(plan.n_parts + _FLAGS, dtype=accumulation_dtype(device), device=device)
    for one in found:
        if not one.locals:
            continue
        key = one.group.key
        if key.dtype == torch.float64:
            packed[_IS_DOUBLE] = 1.0
        value = to_device(power_sum(one.locals, order, unit), device)
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
        packed[_IS_NAN] = sums.isnan().any()
        packed[: plan.n_parts] = sums.nan_to_num(nan=0.0, posinf=math.inf)
    return packed
