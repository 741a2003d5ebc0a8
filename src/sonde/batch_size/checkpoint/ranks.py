"""Sums over ranks that measure one model together: of what each has done, and of their gradients.

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

_CHUNK_BYTES = 25 * 2**20
"""Gradients are summed over ranks in pieces of about this size, copied to one buffer each."""


def sum_numbers(numbers: list[float], ranks: dist.ProcessGroup | None, device: torch.device) -> list[float]:
    """Numbers added up over ranks, by one small collective. Waits.

    Args:
        numbers: as many on every rank.
        ranks: None for this process alone.
        device: of the model.
    """
    if ranks is None or ranks.size() == 1:
        return numbers
    vector = to_device(torch.tensor(numbers, dtype=torch.float64, device="cpu"), device)
    _add_up(vector, ranks)
    return vector.tolist()


@torch.no_grad()
def sum_gradients(parameters: Sequence[Tensor], ranks: dist.ProcessGroup | None) -> None:
    """Add the gradients of all ranks up in `.grad`; a rank without one adds zero.

    Args:
        parameters: of which any rank has a gradient.
        ranks: None for this process alone.
    """
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    for chunk in _chunks([p.grad for p in parameters if p.grad is not None]):
        flat = torch.cat([grad.reshape(-1) for grad in chunk])
        _add_up(flat, ranks)
        for grad, summed in zip(chunk, flat.split([grad.numel() for grad in chunk]), strict=True):
            grad.copy_(summed.view(grad.shape))


def _add_up(vector: Tensor, ranks: dist.ProcessGroup | None) -> None:
    if (work := start_reduce(vector, ranks)) is not None:
        work.wait()


def _chunks(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbouring gradients of one dtype and device, of bounded size together."""
    starts = itertools.accumulate((grad.numel() * grad.element_size() for grad in gradients), initial=0)
    placed = zip(gradients, starts, strict=False)
    for _, chunk in itertools.groupby(placed, lambda each: (each[0].dtype, each[0].device, each[1] // _CHUNK_BYTES)):
        yield [grad for grad, _ in chunk]
