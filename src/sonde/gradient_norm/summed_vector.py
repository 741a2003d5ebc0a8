"""The vector that the ranks of a norm sum: power sums by part of the model, flags, and numbers that are compared."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sonde.gradient_norm.agreement import N_SLOTS, NormRequest, copies_tolerance, disagreements
from sonde.gradient_norm.cross_check import SumPlaces, add_copies, ballot, holdings, places_over_stages
from sonde.gradient_norm.plan import Collected, NormPlan
from sonde.gradient_norm.power_sums import SMALLEST_EXACT, power_sum, square_sum_in_blocks
from sonde.gradient_norm.ties import add_ties
from sonde.parallel.devices import to_device, zero_sums

_N_FLAGS = 4
_MAX_PARTS = 64
"""How many parts of the model have room in the vector. The vector has the same length on every rank, even if ranks were
given different parts: vectors of different lengths hang or abort the collective."""


class SummedVector:
    """The vector and its views; zeros at first.

    Args:
        plan: the plan of this rank.

    Attributes:
        vector: everything except `overflow`, on the plan's device; the same length on every rank.
        overflow: `sums` and `in_blocks` if there is no room for them in `vector`, [2 · parts]; else None. It takes a
            collective of its own, after the ranks have agreed on its length.
        sums: the power sum, or the largest element, of each part of the model, [parts].
        in_blocks: how many ranks read some gradients of a part in blocks, [parts]. Only p = 2 uses it.
        is_nan: whether a part is NaN, [parts]. Only p = ∞ uses it, and so it has the memory of `in_blocks`.
        failed: how many ranks have an error, 0-dim.
        wrong_call: how many ranks have an error in their call, 0-dim.
        is_double: how many ranks have fp64 gradients, 0-dim.
        is_single: how many ranks have no fp64 gradients, 0-dim.
        slots: the numbers that are compared; see `agreement`.
    """

    def __init__(self, plan: NormPlan) -> None:
        n = plan.n_parts
        self.vector = zero_sums(2 * _MAX_PARTS + _N_FLAGS + N_SLOTS, device=plan.device)
        parts, flags, self.slots = self.vector.split([2 * _MAX_PARTS, _N_FLAGS, N_SLOTS])
        self.overflow = zero_sums(2 * n, device=plan.device) if n > _MAX_PARTS else None
        of_parts: Tensor = (parts if self.overflow is None else self.overflow)[: 2 * n].view(2, n)
        self.sums, self.in_blocks = of_parts[0], of_parts[1]
        self.is_nan = self.in_blocks
        self.failed, self.wrong_call, self.is_double, self.is_single = flags.unbind()

    def add(self, other: SummedVector, order: float) -> None:
        """Add the vector of another set of gradients."""
        combine = torch.maximum if math.isinf(order) else torch.add
        combine(self.vector, other.vector, out=self.vector)
        if self.overflow is not None and other.overflow is not None:
            combine(self.overflow, other.overflow, out=self.overflow)

    def is_refused(self, *, uses_max: bool) -> bool:
        """Whether a rank has failed or the ranks disagree; after the sum, the same on all its ranks. Waits."""
        return bool(self.failed > 0) or bool(disagreements(self.slots, uses_max=uses_max).any())

    def parts_to_read_again(self) -> list[int]:
        """Parts of the model whose squares may have left the range of fp32 in blocks. Waits for the device."""
        read = enumerate(zip(self.in_blocks.tolist(), self.sums.tolist(), strict=True))
        return [part for part, (n_ranks, total) in read if n_ranks and not SMALLEST_EXACT <= total < math.inf]


def pack(
    plan: NormPlan,
    collected: list[Collected],
    request: NormRequest,
    order: float,
    places: SumPlaces,
) -> SummedVector:
    """The vector that this rank adds to one sum over ranks.

    Args:
        plan: the plan of this rank.
        collected: the gradients of this sum.
        request: the options of this rank, which are compared.
        order: of the norm.
        places: the positions of this rank in this sum.
    """
    packed, uses_max = SummedVector(plan), math.isinf(order)
    has_peers, has_stages = places.everyone.n_ranks > 1, plan.n_stages > 1
    cast = held = None
    if has_peers or (has_stages and not uses_max):
        held = holdings(plan)
        cast = ballot(plan, held, request, places, uses_max=uses_max)
    for gradients in collected:
        if not gradients.locals:
            continue
        value = _add_group(packed, plan, gradients, order)
        # A maximum over ranks cannot compare the ranks of each stage apart.
        if cast is not None and held is not None and not (uses_max and has_stages):
            key, n_elements = gradients.group.key, sum(g.numel() for g in gradients.locals)
            tolerance = copies_tolerance(order, key.dtype, n_elements)
            add_copies(cast, held, key, value, tolerance, only_whole=uses_max)
    if uses_max:
        # A maximum over ranks loses NaN. So flags carry NaN, and the sums are sent without it.
        packed.is_nan.copy_(packed.sums.isnan())
        packed.sums.nan_to_num_(nan=0.0, posinf=math.inf)
    if cast is not None and held is not None:
        if has_stages and not uses_max:
            weighed = [(gradients, plan.weight(gradients.group)) for gradients in collected]
            add_ties(cast, held.ties, weighed, places_over_stages(plan).everyone, plan.device)
        packed.slots.copy_(cast.slots(plan.device))
    return packed


def _add_group(packed: SummedVector, plan: NormPlan, gradients: Collected, order: float) -> Tensor:
    """Add a group of gradients to its part of the model; returns this rank's power sum, 0-dim on the plan's device."""
    key = gradients.group.key
    part = packed.sums.select(0, key.part)
    if key.dtype == torch.float64:
        packed.is_double.fill_(1.0)
    if _reads_in_blocks(gradients, order):
        packed.in_blocks.select(0, key.part).fill_(1.0)
    value = to_device(_read(gradients, order), plan.device)
    if math.isinf(order):
        torch.maximum(part, value, out=part)
    else:
        part.add_(plan.weight(gradients.group) * value)
    return value


def own_square_sum(plan: NormPlan, gradients: Collected) -> Tensor:
    """What this rank adds to the sum of squares of a group's gradients over all ranks: 0-dim, on the plan's device."""
    return plan.weight(gradients.group) * to_device(_read(gradients, 2.0), plan.device)


def pack_exact(plan: NormPlan, collected: list[Collected], parts: list[int]) -> Tensor:
    """Sums of squares of some parts of the model, all read in fp64, [parts]."""
    sums = zero_sums(len(parts), device=plan.device)
    for gradients in collected:
        if gradients.group.key.part in parts:
            value = to_device(power_sum(gradients.locals, 2.0), plan.device)
            sums[parts.index(gradients.group.key.part)] += plan.weight(gradients.group) * value
    return sums


def _reads_in_blocks(gradients: Collected, order: float) -> bool:
    return bool(gradients.group.in_blocks) and order == 2.0


def _read(gradients: Collected, order: float) -> Tensor:
    """The power sum of a group's gradients on this rank."""
    if not _reads_in_blocks(gradients, order):
        return power_sum(gradients.locals, order)
    in_blocks: list[Tensor] = []
    others: list[Tensor] = []
    for index, local in zip(gradients.indices, gradients.locals, strict=True):
        (in_blocks if index in gradients.group.in_blocks and local.layout is torch.strided else others).append(local)
    return square_sum_in_blocks(in_blocks) + power_sum(others, order)
