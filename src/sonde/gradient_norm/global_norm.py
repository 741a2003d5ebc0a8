"""The norm of a whole model's gradient, however it is cut: local power sums, weighed, and summed over ranks.

With a mesh of all ranks, one collective does it. Without, each set of ranks that gradients are cut over takes one.
The same collectives carry the ranks' errors: a rank with an error takes part, and its peers do not hang.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.gradient_norm.agreement import NormRequest, disagreements, second_sum_follows
from sonde.gradient_norm.cross_check import (
    ALONE,
    SumPlaces,
    places_among,
    places_in_mesh,
    places_over_stages,
)
from sonde.gradient_norm.disagreement import disagreement
from sonde.gradient_norm.gradient_groups import Collected
from sonde.gradient_norm.held_error import OTHER_CALL, OTHER_GRADIENT, OTHER_PLAN, unexpected
from sonde.gradient_norm.partial_gradients import reduce_partial
from sonde.gradient_norm.plan import NormPlan
from sonde.gradient_norm.power_sums import LARGEST_PLAIN_ORDER
from sonde.gradient_norm.summed_vector import SummedVector, own_square_sum, pack, pack_exact
from sonde.parallel.devices import has_float64, zero_sums
from sonde.parallel.placements import Layout, local_tensor
from sonde.parallel.process_groups import group_of_mesh, group_over, is_fake, start_reduce


@dataclass(frozen=True)
class GlobalNorm:
    """A measured norm; the same bits on every rank that took part in the sum.

    Attributes:
        norm: of the whole gradient, 0-dim, fp64.
        by_part: of the gradients of each part of the model, [parts], fp64.
        failed: how many ranks have an error, 0-dim, plus 1 if ranks disagree. On a GPU, the other ranks learn of the
            error only from this.
        is_double: how many ranks have fp64 gradients, 0-dim.
        is_single: how many ranks have no fp64 gradients, and return the norm in fp32, 0-dim.
        collected: this rank's gradients; partial ones are already summed, and not yet written back.
        request: the options of this rank.
        summed: what came out of the last sum over ranks.
    """

    norm: Tensor
    by_part: Tensor
    failed: Tensor
    is_double: Tensor
    is_single: Tensor
    collected: list[Collected]
    request: NormRequest
    summed: Summed

    @property
    def is_finite(self) -> Tensor:
        """Whether the norm is finite on all ranks, also where it is rounded to fp32; alike on all ranks. 0-dim bool."""
        overflows = self.norm.to(torch.float32).isinf() & (self.is_single > 0)
        return self.norm.isfinite() & ~overflows

    @property
    def is_usable(self) -> Tensor:
        """Whether the norm is finite, and no rank has an error; alike on all ranks. 0-dim bool."""
        return self.is_finite & (self.failed == 0)

    def rounded(self, value: Tensor) -> Tensor:
        """`norm` or `by_part` as this rank returns it: in fp32, or in fp64 if this rank has fp64 gradients.

        On a GPU, NaN if a rank has an error: only the rank with the error has raised. (On the CPU all ranks have.)
        """
        if value.device.type != "cpu":
            value = torch.where(self.failed > 0, math.nan, value)
        return value.to(torch.float64 if _has_fp64(self.collected) else torch.float32)

    def error_of_peers(self, plan: NormPlan) -> ValueError | None:
        """What other ranks found, or what the ranks disagree about, if anything. Waits for the device."""
        return _error_of_peers(plan, self.request, self.summed) if self.summed.has_peers else None


@torch.no_grad()
def global_norm(
    plan: NormPlan,
    order: float,
    *,
    max_norm: float | None = None,
    nonfinite: str = "ignore",
    problem: ValueError | None = None,
    riding: Tensor | None = None,
) -> GlobalNorm:
    """The p-norm of all gradients of all ranks together; each element counts once.

    Args:
        plan: this rank's parameters; the same on every rank of a pipeline stage.
        order: p > 0, or `math.inf`. Above 6 it takes twice as many collectives, first for the largest element. NaN if
            it is not known, with a `problem`: then this rank follows its peers.
        max_norm: what the gradients will be clipped to; the ranks compare it.
        nonfinite: what will be done when the norm is not finite; the ranks compare it.
        problem: an error found on this rank before; raised once the other ranks know that there is one.
        riding: other numbers to sum over the ranks of the plan's mesh, in place and in the same collective, if the
            order is at most 6; fp64 or the widest dtype of the plan's device, 1-dim, of one length on all ranks.

    Returns:
        A `GlobalNorm`.

    Raises:
        ValueError: for a gradient that cannot be counted, naming the gradient and the way out; and when ranks differ in
            their options, or hold other parameters than they count. If the sum can be read without waiting (on the
            CPU), every rank that shares a sum with this rank raises; on a GPU this rank alone.
    """
    collected, error = _collect(plan)
    problem = problem or plan.request_problem
    wrong_call = problem is not None
    problem = problem or plan.gradient_problem or error or _lacks_float64(plan)
    collected = _sum_partial(plan, collected)
    request = NormRequest(order, max_norm, nonfinite, wrong_call)
    is_in_two = LARGEST_PLAIN_ORDER < order < math.inf
    first_order = math.inf if is_in_two else 2.0 if math.isnan(order) else order
    first = _sum_over_ranks(plan, collected, request, first_order, problem, riding=riding)
    measured = _unpack(first, first_order, collected, request)
    error = first.error
    if error is None and is_in_two and plan.device.type != "cpu":
        error = measured.error_of_peers(plan)
    if error is not None:
        # With a mesh, all ranks have heard of the error. Without, some ranks share no sum with the failed one: they go
        # on, and wait for this rank's second sum.
        if plan.mesh is None and second_sum_follows(first.total.slots):
            _sum_over_ranks(plan, collected, request, LARGEST_PLAIN_ORDER, error)
        raise error
    return _in_units_of_largest(plan, measured) if is_in_two else measured


@torch.no_grad()
def own_square_sums(plan: NormPlan) -> Tensor:
    """This rank's part of the sum of squares of each part of the model, to be summed over the ranks of the plan's mesh.

    Partial gradients are summed over their own ranks here: one all-reduce for each kind. All ranks have to call this.

    Args:
        plan: this rank's parameters, with a mesh.

    Returns:
        [parts], on the plan's device; each element of the model counts once in the sum over ranks.

    Raises:
        ValueError: for a gradient that cannot be counted.
    """
    collected = _sum_partial(plan, plan.collect())
    if plan.gradient_problem is not None:
        raise plan.gradient_problem
    sums = zero_sums(plan.n_parts, device=plan.device)
    for gradients in collected:
        if gradients.locals:
            sums[gradients.group.key.part] += own_square_sum(plan, gradients)
    return sums


def _lacks_float64(plan: NormPlan) -> ValueError | None:
    """Ranks are compared by sums of whole numbers that must be exact, for which pairs of fp32 are too short."""
    has_peers = plan.mesh is not None or plan.n_stages > 1 or any(layout.sharding_ranks for layout in plan.layouts)
    if has_float64(plan.device) or not has_peers:
        return None
    return ValueError(
        f"a norm over several ranks needs fp64, which {plan.device} has not: clip by torch.nn.utils.clip_grad_norm_, "
        "and end windows by probe.step()"
    )


def _in_units_of_largest(plan: NormPlan, largest: GlobalNorm) -> GlobalNorm:
    """The norm above order 6, by a second sum: large powers of elements leave the range of fp64.

    So elements are divided by the largest element of their part first, and the part's norm is multiplied by it.

    Args:
        plan: the plan of this rank.
        largest: the largest elements, from the first sum.
    """
    order, units = largest.request.order, _unit(largest.by_part)
    second = _sum_over_ranks(plan, largest.collected, largest.request, order, None, units)
    if second.error is not None:
        raise second.error
    in_units = _unpack(second, order, largest.collected, largest.request)
    by_part = in_units.by_part * units
    unit = _unit(by_part.max())
    norm = unit * (by_part / unit).pow(order).sum().pow(1.0 / order)
    return dataclasses.replace(in_units, norm=norm, by_part=by_part)


def _unit(largest: Tensor) -> Tensor:
    """What to divide by, so that powers stay in the range of fp64: 1 where the largest element is 0 or not finite."""
    return torch.where((largest > 0) & largest.isfinite(), largest, 1.0)


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


def _collect(plan: NormPlan) -> tuple[list[Collected], ValueError | None]:
    """The gradients that exist now. If an error prevents that, this rank joins its peers' sums with nothing."""
    try:
        return plan.collect(), None
    except Exception as error:  # a gradient of a kind that nobody knows, or a defect
        return [Collected(group) for group in plan.groups], unexpected("gradients cannot be collected", error)


def _sum_over_ranks(
    plan: NormPlan,
    collected: list[Collected],
    request: NormRequest,
    order: float,
    problem: ValueError | None,
    units: Tensor | None = None,
    riding: Tensor | None = None,
) -> Summed:
    """The power sum of the collected gradients, in multiples of `units`, [parts]. It raises nothing."""
    device, operation, over_stages = plan.device, _operation(order), None
    if plan.n_stages > plan.n_stages_in_mesh:  # packed first, since all sums have to hear of an error
        over_stages, error = _packed(plan, [], request, order, units, places_over_stages(plan))
        problem = problem or error
    # Start the sum of one set of ranks, then read the gradients of the next set while that sum is under way.
    under_way: list[_UnderWay] = []
    is_single = not _has_fp64(collected)
    for process_group, places, gradients in _by_collective(plan, collected):
        packed, error = _packed(plan, gradients, request, order, units, places)
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
        if order == 2.0 and device.type == "cpu" and (error := _measure_again(plan, started)):
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
    if problem is None and has_peers and device.type == "cpu":  # on the CPU, reading waits for nothing
        return dataclasses.replace(summed, error=_error_of_peers(plan, request, summed))
    return summed


def _packed(
    plan: NormPlan,
    gradients: list[Collected],
    request: NormRequest,
    order: float,
    units: Tensor | None,
    places: SumPlaces,
) -> tuple[SummedVector, ValueError | None]:
    """What this rank adds to a sum over ranks: nothing if an error prevents that, and the error."""
    try:
        return pack(plan, gradients, request, order, units, places), None
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
    would not come to the second sum. `_error_of_peers` finds the error later.

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
        sums_and_failed[-1] = 1.0
    if work := start_reduce(sums_and_failed, started.process_group):
        work.wait()
    packed.sums[lost] = sums_and_failed[:-1]
    packed.failed.add_(sums_and_failed[-1])
    return problem


def _cannot_sum(device: torch.device, error: Exception) -> ValueError:
    return unexpected(f"gradients cannot be summed on {device}", error)


def _has_fp64(collected: list[Collected]) -> bool:
    """Whether this rank has fp64 gradients."""
    return any(g.locals and g.group.key.dtype == torch.float64 for g in collected)


def _error_of_peers(plan: NormPlan, request: NormRequest, summed: Summed) -> ValueError | None:
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
    process_groups += [mesh.get_group(axis) for mesh in plan.meshes for axis in range(mesh.ndim) if mesh.size(axis) > 1]
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


def _unpack(summed: Summed, order: float, collected: list[Collected], request: NormRequest) -> GlobalNorm:
    total, sums = summed.total, summed.total.sums
    if summed.uses_max:
        by_part = torch.where(total.is_nan > 0, torch.nan, sums)
        norm = by_part.max()  # of NaN and numbers, it is NaN
    else:
        norm, by_part = sums.sum().pow(1.0 / order), sums.pow(1.0 / order)
    failed = total.failed
    if summed.has_peers and sums.device.type != "cpu":  # on the CPU the ranks have raised instead
        failed = failed + disagreements(total.slots, uses_max=summed.uses_max).any()
    return GlobalNorm(norm, by_part, failed, total.is_double, total.is_single, collected, request, summed)


def _sum_partial(plan: NormPlan, collected: list[Collected]) -> list[Collected]:
    """Sum partial gradients over their ranks; a rank whose gradient is missing takes part with zeros."""
    partial = [gradients for gradients in collected if gradients.group.key.is_partial]
    if not partial:
        return collected
    # Every planned parameter takes part, in the plan's order: so all ranks issue the same collectives.
    by_index = {i: g for gradients in partial for i, g in zip(gradients.indices, gradients.gradients, strict=True)}
    planned = sorted(i for gradients in partial for i in gradients.group.indices)
    reduced = reduce_partial([by_index[i] if i in by_index else plan.zeros(i) for i in planned])
    reduced_by_index = dict(zip(planned, reduced, strict=True))
    summed = []
    for gradients in collected:
        if gradients.group.key.is_partial:
            indices = list(gradients.group.indices)
            whole = [reduced_by_index[i] for i in indices]
            gradients = Collected(gradients.group, indices, whole, [local_tensor(g) for g in whole])
        summed.append(gradients)
    return summed


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
    by_ranks: dict[tuple[int, ...], list[Collected]] = {layout.sharding_ranks: [] for layout in plan.layouts}
    for gradients in collected:
        by_ranks.setdefault(gradients.group.key.ranks, []).append(gradients)
    for layout in plan.layouts:
        ranks = layout.sharding_ranks
        yield _process_group(layout), places_among(ranks), by_ranks.pop(ranks)
    yield None, ALONE, by_ranks.pop((), [])


def _process_group(layout: Layout) -> dist.ProcessGroup:
    assert layout.mesh is not None
    return layout.mesh.get_group(layout.sharded[0]) if len(layout.sharded) == 1 else group_over(layout.sharding_ranks)


def _operation(order: float) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM
