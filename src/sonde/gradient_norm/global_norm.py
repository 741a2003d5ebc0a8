"""The norm of a whole model's gradient, however it is cut: local power sums, weighed, and summed over ranks.

With a mesh of all ranks, one collective does it. Without, each set of ranks that gradients are cut over takes one, and
its sum runs while the next gradients are read. The collectives carry the ranks' errors too: a rank with an error takes
part, and its peers do not hang.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.gradient_norm.agreement import (
    N_SLOTS,
    Contrast,
    NormRequest,
    RankSum,
    compared_numbers,
    contrast,
    disagreement,
    disagreements,
)
from sonde.gradient_norm.plan import Collected, NormPlan
from sonde.gradient_norm.power_sums import power_sum
from sonde.gradient_norm.refused_gradients import HeldError
from sonde.parallel.devices import has_float64, is_at_hand, to_device, zero_sums
from sonde.parallel.placements import local_tensor, ranks_of
from sonde.parallel.process_groups import group_of_mesh, group_over, is_fake, start_reduce
from sonde.parallel.shares import reduce_partial

_N_FLAGS = 3
MAX_PARTS = 1024
"""How many parts of the model have room in the vector. The vector has the same length on every rank, even if ranks were
given different parts: vectors of different lengths hang or abort the collective."""
_LENGTH = 2 * MAX_PARTS + _N_FLAGS + N_SLOTS


@dataclass(frozen=True)
class GlobalNorm:
    """A measured norm; the same bits on every rank that took part in the sum.

    Attributes:
        sums: the power sum, or the largest element, of each part of the model, 0-dim each, fp64.
        collected: this rank's gradients; partial ones are already summed, and not yet written back.
        is_double: whether a rank has fp64 gradients.
        is_single: whether a rank has none.
        vector: what came out of the sums over ranks; None for this rank alone.
        request: the options of this rank.
    """

    sums: Sequence[Tensor]
    collected: list[Collected]
    is_double: Tensor | bool
    is_single: Tensor | bool
    vector: SummedVector | None
    request: NormRequest

    @functools.cached_property
    def by_part(self) -> Tensor:
        """The norm of each part of the model, [parts], fp64."""
        return self._root(torch.stack([*self.sums]))

    @functools.cached_property
    def norm(self) -> Tensor:
        """Of the whole gradient, 0-dim, fp64."""
        if len(self.sums) == 1:
            return self._root(self.sums[0])
        parts = torch.stack([*self.sums])
        return self._root(parts.max() if math.isinf(self.request.order) else parts.sum())  # of NaN and numbers, NaN

    def _root(self, sums: Tensor) -> Tensor:
        if self.request.order == 2.0:
            return sums.sqrt()
        return sums if math.isinf(self.request.order) else sums.pow(1.0 / self.request.order)

    @functools.cached_property
    def failed(self) -> Tensor:
        """Whether a rank has an error or the ranks disagree, 0-dim bool.

        On a GPU, the other ranks learn of the error only from this. On the CPU they have raised.
        """
        if self.vector is None:
            return torch.zeros((), dtype=torch.bool, device=self.norm.device)
        return (self.vector.failed > 0) | self.vector.disagreements().any()

    @property
    def is_usable(self) -> Tensor:
        """Whether the norm is finite on all ranks, also rounded to fp32, and no rank has an error. 0-dim bool."""
        overflows = self.norm.to(torch.float32).isinf() & self.is_single
        return self.norm.isfinite() & ~overflows & ~self.failed

    def rounded(self, value: Tensor) -> Tensor:
        """`norm` or `by_part` as this rank returns it: in fp32, or in fp64 if this rank has fp64 gradients.

        On a GPU, NaN if a rank has an error: only the rank with the error has raised. (On the CPU all ranks have.)
        """
        if self.vector is not None and not is_at_hand(value.device):
            value = torch.where(self.failed, math.nan, value)
        return value.double() if _has_fp64(self.collected) else value.float()

    def error_of_peers(self, plan: NormPlan) -> ValueError | None:
        """What other ranks found, or what the ranks disagree about, if anything. Waits for the device."""
        if self.vector is None:
            return None
        if self.vector.failed.item():
            whose = "no gradient" if plan.mesh is not None else "no gradient of this rank"
            return ValueError(
                "another rank was called with something that cannot be used, or found a gradient that cannot be "
                f"counted, and its message says what: {whose} has been changed"
            )
        return disagreement(plan, self.request, self.vector.slots, self.vector.disagreements().tolist())


def global_norm(
    plan: NormPlan,
    order: float,
    *,
    max_norm: float | None = None,
    nonfinite: str = "ignore",
    problem: HeldError | None = None,
    riding: Tensor | None = None,
) -> GlobalNorm:
    """The p-norm of all gradients of all ranks together; each element counts once. Call it under `no_grad`.

    Args:
        plan: this rank's parameters; the same on every rank of a pipeline stage.
        order: p from above 0 to 6, or `math.inf`; NaN if it is not known, with a `problem`.
        max_norm: what the gradients will be clipped to; the ranks compare it.
        nonfinite: what will be done when the norm is not finite; the ranks compare it.
        problem: holds an error found on this rank before; raised once the other ranks know that there is one.
        riding: other numbers to sum over the ranks of the plan's mesh, in place and in the same collective, if the
            order is finite; fp64 or the widest dtype of the plan's device, 1-dim, of one length on all ranks.

    Returns:
        A `GlobalNorm`.

    Raises:
        ValueError: for a gradient that cannot be counted, naming the gradient and the way out; and when ranks differ in
            their options, or hold other parameters than they count. If the sum can be read without waiting (on the
            CPU), every rank that shares a sum with this rank raises; on a GPU this rank alone.
    """
    problem = problem or HeldError()
    collected = problem.attempt(plan.collect, otherwise=None, what="gradients cannot be collected")
    problem.keep(plan.problem)
    problem.keep(_lacks_float64(plan))
    # After an error, this rank joins its peers' sums with nothing.
    collected = _sum_partial(plan, collected or [Collected(key) for key in plan])
    request = NormRequest(order, max_norm, nonfinite)
    measured = None if plan.is_alone else _sum_over_ranks(plan, collected, request, problem, riding)
    # All sums are done and the peers have heard of the error: this rank may raise now.
    if measured is not None and problem.first is None and is_at_hand(plan.device):
        problem.keep(measured.error_of_peers(plan))
    if problem.first is not None:
        raise problem.first
    return measured or _norm_alone(plan, collected, request)


def _norm_alone(plan: NormPlan, collected: list[Collected], request: NormRequest) -> GlobalNorm:
    """The norm of gradients that no other rank counts, in few operations: they are half of a small model's clip."""
    order = request.order
    combine = torch.maximum if math.isinf(order) else torch.add
    sums: list[Tensor | None] = [None] * plan.n_parts
    for each in collected:
        if each.locals:
            part, value = each.key.part, _read(plan, each, order)
            sums[part] = value if (before := sums[part]) is None else combine(before, value)
    parts = [zero_sums(device=plan.device) if value is None else value for value in sums]
    has_fp64 = _has_fp64(collected)
    return GlobalNorm(parts, collected, has_fp64, not has_fp64, None, request)


def _has_fp64(collected: Sequence[Collected]) -> bool:
    """Whether this rank has fp64 gradients."""
    return any(g.locals and g.key.dtype == torch.float64 for g in collected)


def _lacks_float64(plan: NormPlan) -> ValueError | None:
    """Ranks are compared by sums of whole numbers that must be exact, for which fp32 is too short."""
    if plan.is_alone or has_float64(plan.device):
        return None
    return ValueError(
        f"a norm over several ranks needs fp64, which {plan.device} has not: clip by torch.nn.utils.clip_grad_norm_, "
        "and end windows by probe.step()"
    )


def _sum_partial(plan: NormPlan, collected: list[Collected]) -> list[Collected]:
    """Sum partial gradients over their ranks; a rank whose gradient is missing takes part with zeros."""
    partial = [gradients for gradients in collected if gradients.key.is_partial]
    if not partial:
        return collected
    # Every planned parameter takes part, in the plan's order: so all ranks issue the same collectives.
    by_index = {i: g for gradients in partial for i, g in zip(gradients.indices, gradients.gradients, strict=True)}
    planned = sorted(i for gradients in partial for i in plan.groups[gradients.key])
    reduced = reduce_partial([by_index[i] if i in by_index else plan.zeros(i) for i in planned])
    by_index = dict(zip(planned, reduced, strict=True))
    summed = []
    for gradients in collected:
        if gradients.key.is_partial:
            indices = plan.groups[gradients.key]
            whole = [by_index[i] for i in indices]
            gradients = Collected(gradients.key, indices, whole, [local_tensor(g) for g in whole])
        summed.append(gradients)
    return summed


def rank_sums(plan: NormPlan) -> list[RankSum]:
    """The sums over ranks that a norm takes, except that over stages: the same on every rank, even with no gradient.

    With a mesh, it is one. Without, each share of a set of ranks that gradients are cut over has one, and so have whole
    gradients, which this rank sums alone.
    """
    if plan.mesh is not None:
        return [RankSum(group_of_mesh(plan.mesh), _among(ranks_of(plan.mesh)), _among(plan.in_stage))]
    sums: dict[tuple[int, ...], RankSum] = {}
    for share in plan.shares:
        if share.mesh is not None and share.ranks and share.ranks not in sums:
            is_axis, among = len(share.sharded) == 1, _among(share.ranks)
            group = share.mesh.get_group(share.sharded[0]) if is_axis else group_over(share.ranks)
            sums[share.ranks] = RankSum(group, among, among, share.ranks)
    alone = contrast([0], [0])
    return [*sums.values(), RankSum(None, alone, alone, ())]


def _sum_over_stages(plan: NormPlan) -> RankSum | None:
    """The sum of the stages' totals, which comes last; None if the other sums span the pipeline stages."""
    if plan.pp_mesh is None or plan.n_stages == plan.n_stages_in_mesh:
        return None
    return RankSum(group_of_mesh(plan.pp_mesh), _among(ranks_of(plan.pp_mesh)), None)


def _among(ranks: Collection[int]) -> Contrast:
    return contrast(sorted(ranks), [dist.get_rank()])


def _sum_over_ranks(
    plan: NormPlan, collected: list[Collected], request: NormRequest, problem: HeldError, riding: Tensor | None
) -> GlobalNorm:
    """The power sum of the collected gradients. It raises nothing: `problem` holds what is wrong on this rank."""
    over_stages, sums = plan.remembered(_sum_over_stages), plan.remembered(rank_sums)
    uses_max, of_stages = math.isinf(request.order), None
    if over_stages is not None:  # packed first, since all sums have to hear of an error
        of_stages = SummedVector(plan, request)
        of_stages.fill([], over_stages, problem)
    # Start the sum of one set of ranks, then read the gradients of the next set while that sum is under way.
    under_way = []
    for each in sums:
        packed = SummedVector(plan, request, riding=riding)
        gradients = [g for g in collected if each.of_ranks in (None, g.key.ranks)]
        packed.fill(gradients, each, problem)
        packed.failed.fill_(problem.first is not None)
        packed.is_single.fill_(not _has_fp64(collected))
        packed.start(each.group)
        under_way.append(packed)
    for packed in under_way:
        if packed.wait() and riding is not None:
            riding.copy_(packed.riding)
    total = under_way[0]
    for packed in under_way[1:]:
        total.add(packed)
    if over_stages is not None and of_stages is not None:
        total.add(of_stages)
        total.start(over_stages.group)
        total.wait()
    # A fake group gives back this rank's own numbers: nothing can be compared.
    vector = None if any(is_fake(each.group) for each in sums) else total
    powers = torch.where(total.is_nan > 0, torch.nan, total.sums) if uses_max else total.sums
    return GlobalNorm(powers.unbind(), collected, total.is_double > 0, total.is_single > 0, vector, request)


def _read(plan: NormPlan, gradients: Collected, order: float) -> Tensor:
    """The power sum of a group's gradients on this rank, 0-dim on the plan's device."""
    return to_device(power_sum(gradients.locals, order, in_blocks=gradients.key.in_blocks), plan.device)


class SummedVector:
    """The vector and its views; zeros at first.

    Args:
        plan: the plan of this rank.
        request: its options. For p = ∞, the ranks take the maximum of their vectors, not the sum.
        riding: other numbers to sum in the same collective; of one length on all ranks.

    Attributes:
        vector: everything, on the plan's device; the same length on every rank.
        sums: the power sum, or the largest element, of each part of the model, [parts].
        is_nan: whether a part is NaN, [parts]. Only p = ∞ uses it.
        failed: how many ranks have an error, 0-dim.
        is_double: how many ranks have fp64 gradients, 0-dim.
        is_single: how many ranks have no fp64 gradients, 0-dim.
        slots: the numbers that are compared; see `agreement`.
        riding: the other numbers.
    """

    def __init__(self, plan: NormPlan, request: NormRequest, *, riding: Tensor | None = None) -> None:
        n, n_riding = plan.n_parts, 0 if riding is None else len(riding)
        self._plan, self._request, self.uses_max = plan, request, math.isinf(request.order)
        self.failed: Tensor
        self.is_single: Tensor
        self.vector = zero_sums(_LENGTH + n_riding, device=plan.device)
        parts, flags, self.slots, self.riding = self.vector.split([2 * MAX_PARTS, _N_FLAGS, N_SLOTS, n_riding])
        if riding is not None:
            self.riding.copy_(riding)
        self.sums, self.is_nan = parts[: 2 * n].view(2, n).unbind()
        self.failed, self.is_double, self.is_single = flags.unbind()

    def add(self, other: SummedVector) -> None:
        """Add the vector of another set of gradients."""
        combine = torch.maximum if self.uses_max else torch.add
        own = self.vector[:_LENGTH]
        combine(own, other.vector[:_LENGTH], out=own)

    def disagreements(self) -> Tensor:
        """What ranks disagree about; see `agreement.disagreements`."""
        return disagreements(self.slots, uses_max=self.uses_max, has_stages=self._plan.n_stages > 1)

    def start(self, group: dist.ProcessGroup | None) -> None:
        """Start the sum over ranks, if this rank is not alone."""
        self._work = start_reduce(self.vector, group, dist.ReduceOp.MAX if self.uses_max else dist.ReduceOp.SUM)

    def wait(self) -> bool:
        """Wait for the sum; whether there was one."""
        if self._work is not None:
            self._work.wait()
        return self._work is not None

    def fill(self, collected: list[Collected], among: RankSum, problem: HeldError) -> None:
        """Put in what this rank adds to one sum over ranks; nothing after an error, which `problem` then holds."""
        what = f"gradients cannot be summed on {self._plan.device}"
        problem.attempt(self._fill, collected, among, otherwise=None, what=what)

    def _fill(self, collected: list[Collected], among: RankSum) -> None:
        plan, request = self._plan, self._request
        order = 2.0 if math.isnan(request.order) else request.order
        powers = [(gradients, _read(plan, gradients, order)) for gradients in collected if gradients.locals]
        numbers = compared_numbers(plan, request, among, powers)
        # Whatever raises is above this line, so that an error leaves the vector as it was.
        for gradients, value in powers:
            part = self.sums.select(0, gradients.key.part)
            if self.uses_max:
                torch.maximum(part, value, out=part)
            else:
                part.add_(plan.weight(gradients.key) * value)
        self.is_double.fill_(_has_fp64(collected))
        if self.uses_max:
            # A maximum over ranks loses NaN. So flags carry NaN, and the sums are sent without it.
            self.is_nan.copy_(self.sums.isnan())
            self.sums.nan_to_num_(nan=0.0, posinf=math.inf)
        if numbers is not None:
            self.slots.copy_(numbers)


def compare_plans(plan: NormPlan) -> None:
    """Compare a new plan with those of the other ranks, and open the communicators that its norm needs.

    Each norm compares plans too; here it is known before training. And the first collective on a communicator takes far
    longer than the others. Call it on every rank that holds a part of the model. Waits.

    Args:
        plan: of this rank.

    Raises:
        ValueError: on every rank of the plan's mesh, or that shares a sum with this one, when something is wrong with
            the plan of one of them, or two have different parameters.
    """
    problem = HeldError(plan.problem_of_plan)
    if not plan.is_alone:
        request = NormRequest(2.0, is_plan=True)
        problem.keep(_sum_over_ranks(plan, [], request, problem, None).error_of_peers(plan))
    if problem.first is not None:
        raise problem.first
    # Partial gradients are summed over single axes of their meshes.
    meshes = dict.fromkeys(s.mesh for s in plan.shares if s.mesh is not None and s.mesh.get_coordinate() is not None)
    for group in dict.fromkeys(mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)):
        if work := start_reduce(torch.zeros(1, device=plan.device), group):
            work.wait()
