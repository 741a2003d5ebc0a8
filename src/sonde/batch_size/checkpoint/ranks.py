"""Ranks that measure one model together: sums of what each has done, and of their gradients.

Each rank takes its own batches, and ranks may have different numbers of them. So no backward may start a collective:
all collectives are here, in the same order on every rank, whatever its data.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.parallel.devices import to_device
from sonde.parallel.process_groups import start_reduce
from sonde.parallel.same_on_ranks import holds_on_all

_CHUNK_BYTES = 25 * 2**20
"""Gradients are summed over ranks in pieces of about this size, copied to one buffer each."""


class MeasuringRanks:
    """The ranks of a measurement.

    Args:
        group: of the ranks; None for this process alone.
        device: of the model.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self.n = 1 if group is None else group.size()

    def agree(self, *, on_all: bool) -> bool:
        """Whether something holds on every rank.

        Args:
            on_all: whether it holds on this one.
        """
        return holds_on_all(self._group, self._device, here=on_all)

    def sum(self, numbers: list[float]) -> list[float]:
        """Numbers added up over ranks, by one small collective. Waits."""
        if self.n == 1:
            return numbers
        vector = to_device(torch.tensor(numbers, dtype=torch.float64, device="cpu"), self._device)
        self._add_up(vector)
        return vector.tolist()

    def _add_up(self, vector: Tensor) -> None:
        if (work := start_reduce(vector, self._group)) is not None:
            work.wait()

    @torch.no_grad()
    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Add the gradients of all ranks up in `.grad`; a rank without one adds zero.

        Args:
            parameters: of which any rank has a gradient.
        """
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for chunk in _chunks([p.grad for p in parameters if p.grad is not None]):
            flat = torch.cat([grad.reshape(-1) for grad in chunk])
            self._add_up(flat)
            for grad, summed in zip(chunk, flat.split([grad.numel() for grad in chunk]), strict=True):
                grad.copy_(summed.view(grad.shape))


def _chunks(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbouring gradients of one dtype and device, of bounded size together."""
    starts = itertools.accumulate((grad.numel() * grad.element_size() for grad in gradients), initial=0)
    placed = zip(gradients, starts, strict=False)
    for _, chunk in itertools.groupby(placed, lambda each: (each[0].dtype, each[0].device, each[1] // _CHUNK_BYTES)):
        yield [grad for grad, _ in chunk]
