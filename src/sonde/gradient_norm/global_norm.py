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

from sonde.gradient_norm.agreement import N_SLOTS, Contrast, contrast, disagreements
from sonde.gradient_norm.cross_check import NormRequest, Peers, compared_numbers, disagreement
from sonde.gradient_norm.fused_clip import apply_folds
from sonde.gradient_norm.plan import Collected, NormPlan
from sonde.gradient_norm.power_sums import power_sum
from sonde.gradient_norm.refused_gradients import OTHER_CALL, OTHER_GRADIENT, unexpected
from sonde.parallel.devices import has_float64, is_at_hand, to_device, zero_sums
from sonde.parallel.placements import local_tensor, ranks_of
from sonde.parallel.process_groups import group_of_mesh, group_over, is_fake, start_reduce
from sonde.parallel.shares import Share, reduce_partial

_N_FLAGS = 4
_MAX_PARTS = 64
"""How many parts of the model have room in the vector. The vector has the same length on every rank, even if ranks were
given different parts: vectors of different lengths hang or abort the collective."""
_LENGTH = 2 * _MAX_PARTS + _N_FLAGS + N_SLOTS


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
        return value.to(torch.float64 if _has_fp64(self.collected) else torch.float32)

    def error_of_peers(self, plan: NormPlan) -> ValueError | None:
        """What other ranks found, or what the ranks disagree about, if anything. Waits for the device."""
        if self.vector is None:
            return None
        if self.vector.failed.item():
            why = OTHER_CALL if self.vector.wrong_call.item() else OTHER_GRADIENT
            whose = "no gradient" if plan.mesh is not None else "no gradient of this rank"
            return ValueError(f"{why}: {whose} has been changed")
        return disagreement(plan, self.request, self.vector.slots, self.vector.disagreements().tolist())


def global_norm(
    plan: NormPlan,
    order: float,
    *,
    max_norm: float | None = None,
    nonfinite: str = "ignore",
    problem: ValueError | None = None,
    riding: Tensor | None = None,
) -> GlobalNorm:
    """The p-norm of all gradients of all ranks together; each element counts once. Call it under `no_grad`.

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
    if plan.is_alone:
        if problem is not None:
            raise problem
        return _norm_alone(plan, collected, request)
    measured, error = _sum_over_ranks(plan, collected, request, problem, riding)
    problem = problem or error
    # All sums are done and the peers have heard of the error: this rank may raise now.
    if problem is None and is_at_hand(plan.device):
        problem = measured.error_of_peers(plan)
    if problem is not None:
        raise problem
    return measured


def _norm_alone(plan: NormPlan, collected: list[Collected], request: NormRequest) -> GlobalNorm:
    """The norm of gradients that no other rank counts, in few operations: they are half of a small model's clip."""
    order = request.order
    combine = torch.maximum if math.isinf(order) else torch.add
    sums: list[Tensor | None] = [None] * plan.n_parts
    for each in collected:
        if each.locals:
            part, value = each.group.key.part, _read(plan, each, order)
            sums[part] = value if (before := sums[part]) is None else combine(before, value)
    parts = [zero_sums(device=plan.device) if value is None else value for value in sums]
    has_fp64 = _has_fp64(collected)
    return GlobalNorm(parts, collected, has_fp64, not has_fp64, None, request)


def _has_fp64(collected: Sequence[Collected]) -> bool:
    """Whether this rank has fp64 gradients."""
    return any(g.locals and g.group.key.dtype == torch.float64 for g in collected)


def _lacks_float64(plan: NormPlan) -> ValueError | None:
    """Ranks are compared by sums of whole numbers that must be exact, for which fp32 is too short."""
    if plan.is_alone or has_float64(plan.device):
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


def _is_dry_run(plan: NormPlan) -> bool:
    return any(is_fake(process_group(plan, share)) for share, _ in plan.remembered(rank_sums))


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
        under_way.append((packed, group, packed.start(group)))
    for packed, group, work in under_way:
        packed.wait(work, group)
        if riding is not None and work is not None:
            riding.copy_(packed.riding)
    total = under_way[0][0]
    for packed, *_ in under_way[1:]:
        total.add(packed)
    # If the sums above do not span the pipeline stages, the stages' totals are summed last.
    if plan.pp_mesh is not None and over_stages is not None:
        total.add(over_stages)
        stages = group_of_mesh(plan.pp_mesh)
        total.wait(total.start(stages), stages)
    # A fake group gives back this rank's own numbers: nothing can be compared.
    vector = None if plan.remembered(_is_dry_run) else total
    sums = torch.where(total.is_nan > 0, torch.nan, total.sums) if total.uses_max else total.sums
    return GlobalNorm(sums.unbind(), collected, total.is_double > 0, total.is_single > 0, vector, request), problem


def _packed(
    plan: NormPlan, gradients: list[Collected], request: NormRequest, peers: Peers, riding: Tensor | None = None
) -> tuple[SummedVector, ValueError | None]:
    """What this rank adds to a sum over ranks: nothing if an error prevents that, and the error."""
    uses_max = math.isinf(request.order)
    packed = SummedVector(plan, uses_max=uses_max, riding=riding)
    try:
        packed.fill(plan, gradients, request, peers)
    except Exception as error:  # no such kernel, no memory, or a defect
        problem = unexpected(f"gradients cannot be summed on {plan.device}", error)
        return SummedVector(plan, uses_max=uses_max, riding=riding), problem
    return packed, None


def _read(plan: NormPlan, gradients: Collected, order: float) -> Tensor:
    """The power sum of a group's gradients on this rank, 0-dim on the plan's device."""
    return to_device(power_sum(gradients.locals, order, in_blocks=gradients.group.key.in_blocks), plan.device)


class SummedVector:
    """The vector and its views; zeros at first.

    Args:
        plan: the plan of this rank.
        uses_max: the ranks take the maximum of their vectors, not the sum.
        riding: other numbers to sum in the same collective; of one length on all ranks.

    Attributes:
        vector: everything except `overflow`, on the plan's device; the same length on every rank.
        overflow: `sums` and `is_nan` if there is no room for them in `vector`, [2 · parts]; else None. It takes a
            collective of its own, after the ranks have agreed on its length.
        sums: the power sum, or the largest element, of each part of the model, [parts].
        is_nan: whether a part is NaN, [parts]. Only p = ∞ uses it.
        failed: how many ranks have an error, 0-dim.
        wrong_call: how many ranks have an error in their call, 0-dim.
        is_double: how many ranks have fp64 gradients, 0-dim.
        is_single: how many ranks have no fp64 gradients, 0-dim.
        slots: the numbers that are compared; see `agreement`.
        riding: the other numbers.
    """

    def __init__(self, plan: NormPlan, *, uses_max: bool, riding: Tensor | None = None) -> None:
        n, n_riding = plan.n_parts, 0 if riding is None else len(riding)
        self.uses_max, self._has_stages = uses_max, plan.n_stages > 1
        self._operation = dist.ReduceOp.MAX if uses_max else dist.ReduceOp.SUM
        self.failed: Tensor
        self.is_single: Tensor
        self.vector = zero_sums(_LENGTH + n_riding, device=plan.device)
        parts, flags, self.slots, self.riding = self.vector.split([2 * _MAX_PARTS, _N_FLAGS, N_SLOTS, n_riding])
        if riding is not None:
            self.riding.copy_(riding)
        self.overflow = zero_sums(2 * n, device=plan.device) if n > _MAX_PARTS else None
        of_parts: Tensor = (parts if self.overflow is None else self.overflow)[: 2 * n].view(2, n)
        self.sums, self.is_nan = of_parts.unbind()
        self.failed, self.wrong_call, self.is_double, self.is_single = flags.unbind()

    def add(self, other: SummedVector) -> None:
        """Add the vector of another set of gradients."""
        combine = torch.maximum if self.uses_max else torch.add
        own = self.vector[:_LENGTH]
        combine(own, other.vector[:_LENGTH], out=own)
        if self.overflow is not None and other.overflow is not None:
            combine(self.overflow, other.overflow, out=self.overflow)

    def disagreements(self) -> Tensor:
        """What ranks disagree about; see `agreement.disagreements`."""
        return disagreements(self.slots, uses_max=self.uses_max, has_stages=self._has_stages)

    def start(self, group: dist.ProcessGroup | None) -> dist.Work | None:
        """Start the sum over ranks; None if this rank is alone."""
        return start_reduce(self.vector, group, self._operation)

    def wait(self, work: dist.Work | None, group: dist.ProcessGroup | None) -> None:
        """Wait for the sum, and sum the overflow too.

        If the ranks disagree, their overflows may differ in length: then none of them is summed. Every rank knows.
        """
        if work is None:
            return
        work.wait()
        if self.overflow is None or bool((self.failed > 0) | self.disagreements().any()):
            return
        if more := start_reduce(self.overflow, group, self._operation):
            more.wait()

    def fill(self, plan: NormPlan, collected: list[Collected], request: NormRequest, peers: Peers) -> None:
        """Put in what this rank adds to one sum over ranks: its gradients, and the numbers that are compared."""
        order = 2.0 if math.isnan(request.order) else request.order
        powers = [(gradients, self._add_group(plan, gradients, order)) for gradients in collected if gradients.locals]
        if self.uses_max:
            # A maximum over ranks loses NaN. So flags carry NaN, and the sums are sent without it.
            self.is_nan.copy_(self.sums.isnan())
            self.sums.nan_to_num_(nan=0.0, posinf=math.inf)
        if (numbers := compared_numbers(plan, request, peers, powers)) is not None:
            self.slots.copy_(numbers)

    def _add_group(self, plan: NormPlan, gradients: Collected, order: float) -> Tensor:
        """Add a group of gradients to its part of the model; returns this rank's power sum, 0-dim on plan's device."""
        key = gradients.group.key
        if key.dtype == torch.float64:
            self.is_double.fill_(1.0)
        value, part = _read(plan, gradients, order), self.sums.select(0, key.part)
        if self.uses_max:
            torch.maximum(part, value, out=part)
        else:
            part.add_(plan.weight(gradients.group) * value)
        return value


def compare_plans(plan: NormPlan, *, verify: bool) -> None:
    """Compare a new plan with those of the other ranks, and open the communicators that its norm needs.

    Each norm compares plans too; here it is known before training. And the first collective on a communicator takes far
    longer than the others. Call it on every rank that holds a part of the model. Waits.

    Args:
        plan: of this rank.
        verify: whether this rank will verify the plan; the ranks compare it.

    Raises:
        ValueError: on every rank of the plan's mesh, or that shares a sum with this one, when something is wrong with
            the plan of one of them, or two have different parameters.
    """
    problem = plan.request_problem or plan.gradient_problem
    request = NormRequest(2.0, verify=verify, is_plan=True)
    if not plan.is_alone:
        measured, error = _sum_over_ranks(plan, [], request, problem, None)
        problem = problem or error or measured.error_of_peers(plan)
    if problem is not None:
        raise problem
    # Partial gradients are summed over single axes of their meshes.
    meshes = dict.fromkeys(s.mesh for s in plan.shares if s.mesh is not None and s.mesh.get_coordinate() is not None)
    for group in dict.fromkeys(mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)):
        if work := start_reduce(torch.zeros(1, device=plan.device), group):
            work.wait()
