"""The vector that the ranks of a norm sum: power sums by part of the model, flags, and numbers that are compared."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.gradient_norm.agreement import N_SLOTS, disagreements
from sonde.gradient_norm.cross_check import NormRequest, Peers, compared_numbers
from sonde.gradient_norm.plan import Collected, NormPlan
from sonde.gradient_norm.power_sums import SMALLEST_EXACT, power_sum, square_sum_in_blocks
from sonde.parallel.devices import to_device, zero_sums
from sonde.parallel.process_groups import start_reduce

_N_FLAGS = 4
_MAX_PARTS = 64
"""How many parts of the model have room in the vector. The vector has the same length on every rank, even if ranks were
given different parts: vectors of different lengths hang or abort the collective."""
_LENGTH = 2 * _MAX_PARTS + _N_FLAGS + N_SLOTS


class SummedVector:
    """The vector and its views; zeros at first.

    Args:
        plan: the plan of this rank.
        uses_max: the ranks take the maximum of their vectors, not the sum.
        riding: other numbers to sum in the same collective; of one length on all ranks.

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
        riding: the other numbers.
    """

    def __init__(self, plan: NormPlan, *, uses_max: bool, riding: Tensor | None = None) -> None:
        n, n_riding = plan.n_parts, 0 if riding is None else len(riding)
        self.uses_max = uses_max
        self._operation = dist.ReduceOp.MAX if uses_max else dist.ReduceOp.SUM
        self.failed: Tensor
        self.is_single: Tensor
        self.vector = zero_sums(_LENGTH + n_riding, device=plan.device)
        parts, flags, self.slots, self.riding = self.vector.split([2 * _MAX_PARTS, _N_FLAGS, N_SLOTS, n_riding])
        if riding is not None:
            self.riding.copy_(riding)
        self.overflow = zero_sums(2 * n, device=plan.device) if n > _MAX_PARTS else None
        of_parts: Tensor = (parts if self.overflow is None else self.overflow)[: 2 * n].view(2, n)
        self.sums, self.in_blocks = of_parts[0], of_parts[1]
        self.is_nan = self.in_blocks
        self.failed, self.wrong_call, self.is_double, self.is_single = flags.unbind()

    def add(self, other: SummedVector) -> None:
        """Add the vector of another set of gradients."""
        combine = torch.maximum if self.uses_max else torch.add
        own = self.vector[:_LENGTH]
        combine(own, other.vector[:_LENGTH], out=own)
        if self.overflow is not None and other.overflow is not None:
            combine(self.overflow, other.overflow, out=self.overflow)

    def start(self, group: dist.ProcessGroup | None) -> dist.Work | None:
        """Start the sum over ranks; None if this rank is alone."""
        return start_reduce(self.vector, group, self._operation)

    def wait(self, work: dist.Work | None, group: dist.ProcessGroup | None) -> bool:
        """Wait for the sum, and sum the overflow too; returns whether there were other ranks to wait for.

        If the ranks disagree, their overflows may differ in length: then none of them is summed.
        """
        if work is None:
            return False
        work.wait()
        if self.overflow is not None and not self.is_refused():
            more = start_reduce(self.overflow, group, self._operation)
            assert more is not None  # as there was work before
            more.wait()
        return True

    def is_refused(self) -> bool:
        """Whether a rank has failed or the ranks disagree; after the sum, the same on all its ranks. Waits."""
        return bool(self.failed > 0) or bool(disagreements(self.slots, uses_max=self.uses_max).any())

    def parts_to_read_again(self) -> list[int]:
        """Parts of the model whose squares may have left the range of fp32 in blocks. Waits for the device."""
        read = enumerate(zip(self.in_blocks.tolist(), self.sums.tolist(), strict=True))
        return [part for part, (n_ranks, total) in read if n_ranks and not SMALLEST_EXACT <= total < math.inf]

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
        if key.in_blocks and order == 2.0:
            self.in_blocks.select(0, key.part).fill_(1.0)
        value, part = to_device(_read(gradients, order), plan.device), self.sums.select(0, key.part)
        if self.uses_max:
            torch.maximum(part, value, out=part)
        else:
            part.add_(plan.weight(gradients.group) * value)
        return value


def _read(gradients: Collected, order: float) -> Tensor:
    """The power sum of a group's gradients on this rank."""
    if gradients.group.key.in_blocks and order == 2.0:
        return square_sum_in_blocks(gradients.locals)
    return power_sum(gradients.locals, order)
