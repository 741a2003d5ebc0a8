"""The norm of a whole model's gradient, however it is cut: local power sums, weighed, and summed over ranks.

With a mesh of all ranks, one collective does it. Without, each set of ranks that gradients are cut over takes one, and
its sum runs while the next gradients are read. The collectives carry the ranks' errors too: a rank with an error takes
part, and its peers do not hang.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.gradient_norm.agreement import Contrast, contrast, disagreements
from sonde.gradient_norm.cross_check import NormRequest, Peers, disagreement
from sonde.gradient_norm.fused_clip import apply_folds
from sonde.gradient_norm.held_error import OTHER_CALL, OTHER_GRADIENT, OTHER_PLAN, unexpected
from sonde.gradient_norm.plan import Collected, NormPlan
from sonde.gradient_norm.power_sums import power_sum
from sonde.gradient_norm.summed_vector import SummedVector
from sonde.parallel.devices import has_float64, is_at_hand, to_device, zero_sums
from sonde.parallel.meshes import ranks_of
from sonde.parallel.placements import local_tensor
from sonde.parallel.process_groups import group_of_mesh, group_over, is_fake, start_reduce
from sonde.parallel.shares import Share, reduce_partial


@dataclass(frozen=True)
class GlobalNorm:
    """A measured norm; the same bits on every rank that took part in the sum.

    Attributes:
        total: what came out of the sums over ranks.
        request: the options of this rank.
        collected: this rank's gradients; partial ones are already summed, and not yet written back.
        has_peers: whether other ranks took part, really.
    """

    total: SummedVector
    request: NormRequest
    collected: list[Collected]
    has_peers: bool

    @functools.cached_property
    def by_part(self) -> Tensor:
        """The norm of each part of the model, [parts], fp64."""
        if self.total.uses_max:
            return torch.where(self.total.is_nan > 0, torch.nan, self.total.sums)
        return self.total.sums.pow(1.0 / self.request.order)

    @functools.cached_property
    def norm(self) -> Tensor:
        """Of the whole gradient, 0-dim, fp64."""
        if self.total.uses_max:
            return self.by_part.max()  # of NaN and numbers, it is NaN
        return self.total.sums.sum().pow(1.0 / self.request.order)

    @functools.cached_property
    def failed(self) -> Tensor:
        """How many ranks have an error, 0-dim, plus 1 if ranks disagree.

        On a GPU, the other ranks learn of the error only from this. On the CPU they have raised.
        """
        if not self.has_peers or is_at_hand(self.total.failed.device):
            return self.total.failed
        return self.total.failed + disagreements(self.total.slots, uses_max=self.total.uses_max).any()

    @property
    def is_finite(self) -> Tensor:
        """Whether the norm is finite on all ranks, also where it is rounded to fp32; alike on all ranks. 0-dim bool."""
        overflows = self.norm.to(torch.float32).isinf() & (self.total.is_single > 0)
        return self.norm.isfinite() & ~overflows

    @property
    def is_usable(self) -> Tensor:
        """Whether the norm is finite, and no rank has an error; alike on all ranks. 0-dim bool."""
        return self.is_finite & (self.failed == 0)

    def rounded(self, value: Tensor) -> Tensor:
        """`norm` or `by_part` as this rank returns it: in fp32, or in fp64 if this rank has fp64 gradients.

        On a GPU, NaN if a rank has an error: only the rank with the error has raised. (On the CPU all ranks have.)
        """
        if not is_at_hand(value.device):
            value = torch.where(self.failed > 0, math.nan, value)
        return value.to(torch.float64 if _has_fp64(self.collected) else torch.float32)

    def error_of_peers(self, plan: NormPlan) -> ValueError | None:
        """What other ranks found, or what the ranks disagree about, if anything. Waits for the device."""
        if not self.has_peers:
            return None
        if self.total.failed.item():
            why = OTHER_CALL if self.total.wrong_call.item() else OTHER_GRADIENT
            whose = "no gradient" if plan.mesh is not None else "no gradient of this rank"
            return ValueError(f"{why}: {whose} has been changed")
        return disagreement(plan, self.request, self.total.slots)


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
        order: p from above 0 to 6, or `math.inf`; NaN if it is not known, with a `problem`.
        max_norm: what the gradients will be clipped to; the ranks compare it.
        nonfinite: what will be done when the norm is not finite; the ranks compare it.
        problem: an error found on this rank before; raised once the other ranks know that there is one.
        riding: other numbers to sum over the ranks of the plan's mesh, in place and in the same collective, if the
            order is finite; fp64 or the widest dtype of the plan's device, 1-dim, of one length on all ranks.

    Returns:
        A `GlobalNorm`.

    Raises:
        ValueError: for a gradient that cannot be counted, naming the gradient and the way out; and when ranks differ in
            their options, or hold other parameters than they count. If the sum can be read without waiting (on the
            CPU), every rank that shares a sum with this rank raises; on a GPU this rank alone.
    """
    apply_folds(plan.parameters)
    collected, error = _collect(plan)
    problem = problem or plan.request_problem
    request = NormRequest(order, max_norm, nonfinite, is_wrong=problem is not None)
    problem = problem or plan.gradient_problem or error or _lacks_float64(plan)
    collected = _sum_partial(plan, collected)
    measured, error = _sum_over_ranks(plan, collected, request, problem, riding)
    problem = problem or error
    # All sums are done and the peers have heard of the error: this rank may raise now.
    if problem is None and is_at_hand(plan.device):
        problem = measured.error_of_peers(plan)
    if problem is not None:
        raise problem
    return measured


def _has_fp64(collected: list[Collected]) -> bool:
    """Whether this rank has fp64 gradients."""
    return any(g.locals and g.group.key.dtype == torch.float64 for g in collected)


def _lacks_float64(plan: NormPlan) -> ValueError | None:
    """Ranks are compared by sums of whole numbers that must be exact, for which fp32 is too short."""
    has_peers = plan.mesh is not None or plan.n_stages > 1 or any(share.ranks for share in plan.shares)
    if has_float64(plan.device) or not has_peers:
        return None
    return ValueError(
        f"a norm over several ranks needs fp64, which {plan.device} has not: clip by torch.nn.utils.clip_grad_norm_, "
        "and end windows by probe.step()"
    )


def _collect(plan: NormPlan) -> tuple[list[Collected], ValueError | None]:
    """The gradients that exist now. If an error prevents that, this rank joins its peers' sums with nothing."""
    try:
        return plan.collect(), None
    except Exception as error:  # a gradient of a kind that nobody knows, or a defect
        return [Collected(group) for group in plan.groups], unexpected("gradients cannot be collected", error)


def _sum_partial(plan: NormPlan, collected: list[Collected]) -> list[Collected]:
    """Sum partial gradients over their ranks; a rank whose gradient is missing takes part with zeros."""
    partial = [gradients for gradients in collected if gradients.group.key.is_partial]
    if not partial:
        return collected
    # Every planned parameter takes part, in the plan's order: so all ranks issue the same collectives.
    by_index = {i: g for gradients in partial for i, g in zip(gradients.indices, gradients.gradients, strict=True)}
    planned = sorted(i for gradients in partial for i in gradients.group.indices)
    reduced = reduce_partial([by_index[i] if i in by_index else plan.zeros(i) for i in planned])
    by_index = dict(zip(planned, reduced, strict=True))
    summed = []
    for gradients in collected:
        if gradients.group.key.is_partial:
            whole = [by_index[i] for i in gradients.group.indices]
            locals_ = [local_tensor(g) for g in whole]
            gradients = Collected(gradients.group, list(gradients.group.indices), whole, locals_)
        summed.append(gradients)
    return summed


def rank_sums(plan: NormPlan) -> list[tuple[Share | None, Peers]]:
    """The sums over ranks that a norm takes, except that over stages: the same on every rank, even with no gradient.

    With a mesh, it is one. Without, each share of a set of ranks that gradients are cut over has one, and so have whole
    gradients, which this rank sums alone.
    """
    if plan.mesh is not None:
        return [(None, Peers(_among(ranks_of(plan.mesh)), _among(plan.in_stage)))]
    shares: dict[tuple[int, ...], Share] = {}
    for share in plan.shares:
        shares.setdefault(share.ranks, share)
    alone = contrast([0], [0])
    cut = [(share, Peers(_among(ranks), _among(ranks))) for ranks, share in shares.items() if ranks]
    return [*cut, (None, Peers(alone, alone))]


def _peers_over_stages(plan: NormPlan) -> Peers:
    assert plan.pp_mesh is not None
    return Peers(_among(ranks_of(plan.pp_mesh)), None)


def _among(ranks: Collection[int]) -> Contrast:
    return contrast(sorted(ranks), [dist.get_rank()])


def process_group(plan: NormPlan, share: Share | None) -> dist.ProcessGroup | None:
    """The ranks of one of `rank_sums`; None for this rank alone."""
    if share is None or share.mesh is None:
        return group_of_mesh(plan.mesh) if plan.mesh is not None else None
    return share.mesh.get_group(share.sharded[0]) if len(share.sharded) == 1 else group_over(share.ranks)


def _sum_over_ranks(
    plan: NormPlan,
    collected: list[Collected],
    request: NormRequest,
    problem: ValueError | None,
    riding: Tensor | None,
) -> tuple[GlobalNorm, ValueError | None]:
    """The power sum of the collected gradients, and what is wrong on this rank. It raises nothing."""
    over_stages = None
    if plan.n_stages > plan.n_stages_in_mesh:  # packed first, since all sums have to hear of an error
        over_stages, error = _packed(plan, [], request, plan.remembered(_peers_over_stages))
        problem = problem or error
    # Start the sum of one set of ranks, then read the gradients of the next set while that sum is under way.
    under_way = []
    for share, peers in plan.remembered(rank_sums):
        ranks = share.ranks if share is not None else ()
        gradients = [g for g in collected if plan.mesh is not None or g.group.key.ranks == ranks]
        packed, error = _packed(plan, gradients, request, peers, riding)
        problem = problem or error
        packed.failed.fill_(problem is not None)
        packed.wrong_call.fill_(request.is_wrong)
        packed.is_single.fill_(not _has_fp64(collected))
        group = process_group(plan, share)
        under_way.append((packed, gradients, group, packed.start(group)))
    has_peers = False
    for packed, gradients, group, work in under_way:
        has_peers |= packed.wait(work, group)
        if riding is not None and work is not None:
            riding.copy_(packed.riding)
        if request.order == 2.0 and is_at_hand(plan.device):
            problem = problem or _measure_again(plan, packed, gradients, group)
    total = under_way[0][0]
    for packed, *_ in under_way[1:]:
        total.add(packed)
    # If the sums above do not span the pipeline stages, the stages' totals are summed last.
    if plan.pp_mesh is not None and over_stages is not None:
        total.add(over_stages)
        stages = group_of_mesh(plan.pp_mesh)
        has_peers |= total.wait(total.start(stages), stages)
    has_peers = has_peers and not any(is_fake(group) for _, _, group, _ in under_way)
    return GlobalNorm(total, request, collected, has_peers), problem


def _packed(
    plan: NormPlan, gradients: list[Collected], request: NormRequest, peers: Peers, riding: Tensor | None = None
) -> tuple[SummedVector, ValueError | None]:
    """What this rank adds to a sum over ranks: nothing if an error prevents that, and the error."""
    uses_max = math.isinf(request.order)
    packed = SummedVector(plan, uses_max=uses_max, riding=riding)
    try:
        packed.fill(plan, gradients, request, peers)
    except Exception as error:  # no such kernel, no memory, or a defect
        return SummedVector(plan, uses_max=uses_max, riding=riding), _cannot_sum(plan.device, error)
    return packed, None


def _measure_again(
    plan: NormPlan, packed: SummedVector, gradients: list[Collected], group: dist.ProcessGroup | None
) -> ValueError | None:
    """Read gradients again in fp64 where blocks in fp32 lost something: on every rank of a sum or on none of them.

    Only the sum over ranks decides, which all its ranks have alike. (On a GPU all is read in fp64 at once.) If a rank
    has failed or the ranks disagree, nothing is read again: ranks of another order or with other parts of the model
    would not come to the second sum. `error_of_peers` finds the error later.

    Returns:
        The error of this rank's second reading. Its peers learn of it in the same sum.
    """
    lost = packed.parts_to_read_again()
    if not lost or packed.is_refused():
        return None
    sums, failed, problem = zero_sums(plan.n_parts + 1, device=plan.device), 0.0, None
    try:
        for each in gradients:
            if each.group.key.part in lost:
                value = to_device(power_sum(each.locals, 2.0), plan.device)
                sums[each.group.key.part] += plan.weight(each.group) * value
    except Exception as error:  # no memory, or a defect: this rank still has to join the sum
        problem, failed = _cannot_sum(plan.device, error), 1.0
    sums[-1] = failed
    if work := start_reduce(sums, group):
        work.wait()
    packed.sums[lost] = sums[lost]
    packed.failed.add_(sums[-1])
    return problem


def _cannot_sum(device: torch.device, error: Exception) -> ValueError:
    return unexpected(f"gradients cannot be summed on {device}", error)


def warm_up(plan: NormPlan) -> None:
    """Open the communicators that a plan's norm needs: the first collective on each takes far longer than the others.

    Call it on every rank that holds a part of the model. Waits.

    Raises:
        ValueError: when something is wrong with the plan, on this rank or on a rank that shares a sum with it.
    """
    groups = [process_group(plan, share) for share, _ in plan.remembered(rank_sums)]
    if plan.pp_mesh is not None and plan.n_stages > plan.n_stages_in_mesh:
        groups.append(group_of_mesh(plan.pp_mesh))
    # Partial gradients are summed over single axes of their meshes.
    meshes = dict.fromkeys(s.mesh for s in plan.shares if s.mesh is not None and s.mesh.get_coordinate() is not None)
    groups += [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    problem = plan.request_problem or plan.gradient_problem
    failed = torch.zeros(1, device=plan.device)
    for group in dict.fromkeys(groups):
        failed = failed.clamp(max=1.0) + float(problem is not None)
        if work := start_reduce(failed, group):
            work.wait()
    if problem is not None:
        raise problem
    if failed.item():
        raise ValueError(OTHER_PLAN)
