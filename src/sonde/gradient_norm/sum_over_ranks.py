"""Sums over the ranks that share a model's gradient, while the next gradients are read.

The collectives carry the ranks' errors too: a rank with an error takes part, and its peers do not hang.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.gradient_norm.agreement import NormRequest
from sonde.gradient_norm.cross_check import (
    ALONE,
    SumPlaces,
    places_among,
    places_in_mesh,
    places_over_stages,
)
from sonde.gradient_norm.disagreement import disagreement
from sonde.gradient_norm.held_error import OTHER_CALL, OTHER_GRADIENT, OTHER_PLAN, unexpected
from sonde.gradient_norm.plan import Collected, NormPlan
from sonde.gradient_norm.summed_vector import SummedVector, pack, pack_exact
from sonde.parallel.devices import is_at_hand
from sonde.parallel.process_groups import group_of_mesh, group_over, is_fake, start_reduce
from sonde.parallel.shares import Share


@dataclass(frozen=True)
class Summed:
    """What came out of the sums over ranks.

    Attributes:
        total: of all sums.
        uses_max: the sums took the maximum over ranks.
        has_peers: whether other ranks took part, really.
        error: what this rank has to raise: its own error or, on the CPU, that of its peers.
    """

    total: SummedVector
    uses_max: bool
    has_peers: bool
    error: ValueError | None


def sum_over_ranks(
    plan: NormPlan,
    collected: list[Collected],
    request: NormRequest,
    order: float,
    problem: ValueError | None,
    riding: Tensor | None = None,
) -> Summed:
    """The power sum of the collected gradients. It raises nothing."""
    device, operation, over_stages = plan.device, _operation(order), None
    if plan.n_stages > plan.n_stages_in_mesh:  # packed first, since all sums have to hear of an error
        over_stages, error = _packed(plan, [], request, order, places_over_stages(plan))
        problem = problem or error
    # Start the sum of one set of ranks, then read the gradients of the next set while that sum is under way.
    under_way: list[_UnderWay] = []
    is_single = not has_fp64(collected)
    for process_group, places, gradients in _by_collective(plan, collected):
        packed, error = _packed(plan, gradients, request, order, places)
        problem = problem or error
        packed.failed.fill_(problem is not None)
        packed.wrong_call.fill_(request.is_wrong)
        packed.is_single.fill_(is_single)
        vector = packed.vector if riding is None else torch.cat([packed.vector, riding])
        work = start_reduce(vector, process_group, operation)
        under_way.append(_UnderWay(process_group, gradients, packed, vector, work))
    has_peers = False
    for started in under_way:
        has_peers |= started.wait(operation, riding)
        if order == 2.0 and is_at_hand(device) and (error := _measure_again(plan, started)):
            problem = problem or error
    total, *others = [started.packed for started in under_way]
    for packed in others:
        total.add(packed, order)
    # If the sums above do not span the pipeline stages, the stages' totals are summed last.
    if plan.pp_mesh is not None and over_stages is not None:
        total.add(over_stages, order)
        stages = group_of_mesh(plan.pp_mesh)
        has_peers |= _wait(total, start_reduce(total.vector, stages, operation), stages, operation)
    # All sums are done and the peers have heard of the error: this rank may raise now.
    has_peers = has_peers and not any(is_fake(started.process_group) for started in under_way)
    summed = Summed(total, math.isinf(order), has_peers, problem)
    if problem is None and has_peers and is_at_hand(device):
        return dataclasses.replace(summed, error=error_of_sum(plan, request, summed))
    return summed


def _packed(
    plan: NormPlan,
    gradients: list[Collected],
    request: NormRequest,
    order: float,
    places: SumPlaces,
) -> tuple[SummedVector, ValueError | None]:
    """What this rank adds to a sum over ranks: nothing if an error prevents that, and the error."""
    try:
        return pack(plan, gradients, request, order, places), None
    except Exception as error:  # no such kernel, no memory, or a defect
        return SummedVector(plan), _cannot_sum(plan.device, error)


@dataclass(frozen=True)
class _UnderWay:
    """A sum over ranks that has been started; the arguments that started it."""

    process_group: dist.ProcessGroup | None
    gradients: list[Collected]
    packed: SummedVector
    vector: Tensor
    work: dist.Work | None

    def wait(self, operation: dist.ReduceOp.RedOpType, riding: Tensor | None) -> bool:
        """Wait for the sum, and take what rode in it; returns whether there were other ranks to wait for."""
        if self.work is not None and riding is not None:
            self.work.wait()
            n = len(self.packed.vector)
            self.packed.vector.copy_(self.vector[:n])
            riding.copy_(self.vector[n:])
        return _wait(self.packed, self.work, self.process_group, operation)


def _wait(
    packed: SummedVector,
    work: dist.Work | None,
    process_group: dist.ProcessGroup | None,
    operation: dist.ReduceOp.RedOpType,
) -> bool:
    """Wait for a sum, and sum the overflow too; returns whether there were other ranks to wait for.

    If the ranks disagree, their overflows may differ in length: then none of them is summed.
    """
    if work is None:
        return False
    work.wait()
    if packed.overflow is not None and not packed.is_refused(uses_max=operation == dist.ReduceOp.MAX):
        more = start_reduce(packed.overflow, process_group, operation)
        assert more is not None  # as there was work before
        more.wait()
    return True


def _measure_again(plan: NormPlan, started: _UnderWay) -> ValueError | None:
    """Read gradients again in fp64 where blocks in fp32 lost something: on every rank of a sum or on none of them.

    Only the sum over ranks decides, which all its ranks have alike. (On a GPU all is read in fp64 at once.) If a rank
    has failed or the ranks disagree, nothing is read again: ranks of another order or with other parts of the model
    would not come to the second sum. `error_of_sum` finds the error later.

    Returns:
        The error of this rank's second reading. Its peers learn of it in the same sum.
    """
    packed = started.packed
    lost = packed.parts_to_read_again()
    if not lost or packed.is_refused(uses_max=False):
        return None
    sums_and_failed, problem = packed.sums.new_zeros(len(lost) + 1), None
    try:
        sums_and_failed[:-1] = pack_exact(plan, started.gradients, lost)
    except Exception as error:  # no memory, or a defect: this rank still has to join the sum
        problem = _cannot_sum(plan.device, error)
        sums_and_failed[-1].fill_(1.0)
    if work := start_reduce(sums_and_failed, started.process_group):
        work.wait()
    packed.sums[lost] = sums_and_failed[:-1]
    packed.failed.add_(sums_and_failed[-1])
    return problem


def _cannot_sum(device: torch.device, error: Exception) -> ValueError:
    return unexpected(f"gradients cannot be summed on {device}", error)


def has_fp64(collected: list[Collected]) -> bool:
    """Whether this rank has fp64 gradients."""
    return any(g.locals and g.group.key.dtype == torch.float64 for g in collected)


def error_of_sum(plan: NormPlan, request: NormRequest, summed: Summed) -> ValueError | None:
    """The error that all ranks of a sum raise. (On a GPU it would wait: there, the clip uses `GlobalNorm.failed`.)"""
    if summed.total.failed.item():
        why = OTHER_CALL if summed.total.wrong_call.item() else OTHER_GRADIENT
        whose = "no gradient" if plan.mesh is not None else "no gradient of this rank"
        return ValueError(f"{why}: {whose} has been changed")
    return disagreement(plan, request, summed.total.slots, uses_max=summed.uses_max)


def warm_up(plan: NormPlan) -> None:
    """Open the communicators that a plan's norm needs: the first collective on each takes far longer than the others.

    Call it on every rank that holds a part of the model. Waits.

    Raises:
        ValueError: when something is wrong with the plan, on this rank or on a rank that shares a sum with it.
    """
    process_groups = [process_group for process_group, _, _ in _by_collective(plan, [])]
    if plan.pp_mesh is not None and plan.n_stages > plan.n_stages_in_mesh:
        process_groups.append(group_of_mesh(plan.pp_mesh))
    # Partial gradients are summed over single axes of their meshes.
    meshes = dict.fromkeys(s.mesh for s in plan.shares if s.mesh is not None and s.mesh.get_coordinate() is not None)
    process_groups += [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    problem = plan.request_problem or plan.gradient_problem
    failed = torch.zeros(1, device=plan.device)
    for process_group in dict.fromkeys(process_groups):
        failed = failed.clamp(max=1.0) + float(problem is not None)
        if work := start_reduce(failed, process_group):
            work.wait()
    if problem is not None:
        raise problem
    if failed.item():
        raise ValueError(OTHER_PLAN)


def _by_collective(
    plan: NormPlan, collected: list[Collected]
) -> Iterable[tuple[dist.ProcessGroup | None, SumPlaces, list[Collected]]]:
    """Process groups, this rank's places in them, and the gradients to sum over each.

    They come in the same order on every rank, even with no gradients.
    """
    if plan.mesh is not None:
        group = group_of_mesh(plan.mesh)
        yield group, ALONE if group is None else places_in_mesh(plan), collected
        return
    by_ranks: dict[tuple[int, ...], list[Collected]] = {share.ranks: [] for share in plan.shares if share.ranks}
    shares = {share.ranks: share for share in reversed(plan.shares)}  # one for each set of ranks
    for gradients in collected:
        by_ranks.setdefault(gradients.group.key.ranks, []).append(gradients)
    for ranks in [ranks for ranks in by_ranks if ranks]:
        yield _process_group(shares[ranks]), places_among(ranks), by_ranks.pop(ranks)
    yield None, ALONE, by_ranks.pop((), [])


def _process_group(share: Share) -> dist.ProcessGroup:
    assert share.mesh is not None
    return share.mesh.get_group(share.sharded[0]) if len(share.sharded) == 1 else group_over(share.ranks)


def _operation(order: float) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM
