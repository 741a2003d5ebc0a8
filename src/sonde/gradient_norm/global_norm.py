"""The norm of a whole model's gradient, however it is cut: local power sums, weighed, and summed over ranks.

With a mesh of all ranks, one collective does it. Without, each set of ranks that gradients are cut over takes one.
The same collectives carry the ranks' errors: a rank with an error takes part, and its peers do not hang.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.gradient_norm.agreement import NormRequest, disagreements
from sonde.gradient_norm.held_error import unexpected
from sonde.gradient_norm.plan import Collected, NormPlan
from sonde.gradient_norm.sum_over_ranks import Summed, error_of_sum, has_fp64, sum_over_ranks
from sonde.gradient_norm.summed_vector import own_square_sum
from sonde.parallel.devices import has_float64, is_at_hand, zero_sums
from sonde.parallel.placements import local_tensor
from sonde.parallel.shares import reduce_partial


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
        if not is_at_hand(value.device):
            value = torch.where(self.failed > 0, math.nan, value)
        return value.to(torch.float64 if has_fp64(self.collected) else torch.float32)

    def error_of_peers(self, plan: NormPlan) -> ValueError | None:
        """What other ranks found, or what the ranks disagree about, if anything. Waits for the device."""
        return error_of_sum(plan, self.request, self.summed) if self.summed.has_peers else None


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
    collected, error = _collect(plan)
    problem = problem or plan.request_problem
    wrong_call = problem is not None
    problem = problem or plan.gradient_problem or error or _lacks_float64(plan)
    collected = _sum_partial(plan, collected)
    request = NormRequest(order, max_norm, nonfinite, wrong_call)
    if math.isnan(order):  # this rank raises after the sum, whatever its peers sum
        order = 2.0
    summed = sum_over_ranks(plan, collected, request, order, problem, riding=riding)
    measured = _unpack(summed, order, collected, request)
    if summed.error is not None:
        raise summed.error
    return measured


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


def _unpack(summed: Summed, order: float, collected: list[Collected], request: NormRequest) -> GlobalNorm:
    total, sums = summed.total, summed.total.sums
    if summed.uses_max:
        by_part = torch.where(total.is_nan > 0, torch.nan, sums)
        norm = by_part.max()  # of NaN and numbers, it is NaN
    else:
        norm, by_part = sums.sum().pow(1.0 / order), sums.pow(1.0 / order)
    failed = total.failed
    if summed.has_peers and not is_at_hand(sums.device):  # on the CPU the ranks have raised instead
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
