"""Ranks that measure one model together: what they agree on, and the sum of their gradients.

Each rank takes its own batches, and ranks may have different numbers of them. So no backward may start a collective:
all collectives are here, in the same order on every rank, whatever its data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.parallel.devices import to_device
from sonde.parallel.process_groups import start_reduce

_CHUNK_BYTES = 25 * 2**20
"""Gradients are summed over ranks in pieces of about this size, copied to one buffer each."""


@dataclass(frozen=True)
class WindowTotals:
    """What all ranks together did in a window.

    Attributes:
        n_pieces: micro-batches.
        n_failed: ranks that raised an error.
        sums: this rank's own numbers, added up over ranks.
        has_gradient: whether any rank has a gradient of each parameter; [parameters].
    """

    n_pieces: int
    n_failed: int
    sums: tuple[float, ...]
    has_gradient: tuple[bool, ...]


class MeasuringRanks:
    """The ranks of a measurement.

    Args:
        group: of the ranks; None for this process alone.
        parameters: those that are measured.
        reduces: whether `sum_gradients` is to add the gradients up, since the model does not do it in backward.
        counts_pieces: whether this rank counts its micro-batches; of ranks that share them, one does.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        parameters: Sequence[Tensor],
        *,
        reduces: bool,
        counts_pieces: bool = True,
    ) -> None:
        self._counts_pieces = counts_pieces
        self._group = group if group is not None and group.size() > 1 else None
        self._parameters, self._reduces = list(parameters), reduces
        self._device = parameters[0].device
        self.n = 1 if self._group is None else self._group.size()

    def compare(self, facts: Mapping[str, object], own: float, failure: Exception | None) -> list[float]:
        """Refuse ranks that were called with other arguments, or that have failed.

        Args:
            facts: values that must be the same on all ranks, by name.
            own: a number of this rank.
            failure: an error of this rank, which is raised here.

        Returns:
            The number of every rank.

        Raises:
            ValueError: when ranks disagree.
            RuntimeError: when another rank failed.
        """
        gathered: list[tuple[str, dict[str, object], float]] = [("", dict(facts), own)]
        if self._group is not None:
            # A rank that failed takes part too: otherwise its peers would hang.
            message = f"{type(failure).__name__}: {failure}" if failure is not None else ""
            every: list[tuple[str, dict[str, object], float]] = [gathered[0]] * self.n
            dist.all_gather_object(every, (message, dict(facts), own), group=self._group)
            gathered = every
        if failure is not None:
            raise failure
        for rank, (message, theirs, _) in enumerate(gathered):
            if message:
                raise RuntimeError(f"rank {rank} could not begin to measure: {message}")
            for name, value in gathered[0][1].items():
                if theirs[name] != value:
                    raise ValueError(
                        f"ranks must measure alike, got {name} {value!r:.80} on rank 0 and {theirs[name]!r:.80} on "
                        f"rank {rank}: pass the same arguments on every rank, but for the data"
                    )
        return [number for _, _, number in gathered]

    def agree(self, *, on_all: bool) -> bool:
        """Whether something holds on every rank.

        Args:
            on_all: whether it holds on this one.
        """
        return self._sum([float(not on_all)])[0] == 0.0

    def end_window(self, n_pieces: int, numbers: Sequence[float], *, failed: bool) -> WindowTotals:
        """What all ranks did in the window that ends: one small collective.

        Args:
            n_pieces: micro-batches on this rank.
            numbers: to add up over ranks, as many on each.
            failed: whether this rank raised an error.
        """
        if not self._counts_pieces:
            n_pieces, numbers = 0, [0.0] * len(numbers)
        present = [float(p.grad is not None) for p in self._parameters]
        summed = self._sum([float(n_pieces), float(failed), *numbers, *present])
        sums, holders = summed[2 : 2 + len(numbers)], summed[2 + len(numbers) :]
        return WindowTotals(round(summed[0]), round(summed[1]), tuple(sums), tuple(n > 0 for n in holders))

    def _sum(self, numbers: list[float]) -> list[float]:
        if self._group is None:
            return numbers
        vector = to_device(torch.tensor(numbers, dtype=torch.float64, device="cpu"), self._device)
        if (work := start_reduce(vector, self._group)) is not None:
            work.wait()
        return vector.tolist()

    def check_gradients(self) -> None:
        """Refuse gradients that cannot be added up over ranks.

        Raises:
            ValueError: for sparse gradients on several ranks.
        """
        if (
            self._group is not None
            and self._reduces
            and any(p.grad is not None and p.grad.is_sparse for p in self._parameters)
        ):
            raise ValueError("sparse gradients cannot be added up over ranks: use Embedding(sparse=False), or one rank")

    @torch.no_grad()
    def sum_gradients(self, totals: WindowTotals) -> None:
        """Add the gradients of all ranks up in `.grad`, as an optimizer would get them.

        A parameter that no rank has a gradient of keeps none.
        """
        if self._group is None or not self._reduces:
            return
        parameters = [p for p, is_there in zip(self._parameters, totals.has_gradient, strict=True) if is_there]
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for chunk in _chunks([p.grad for p in parameters if p.grad is not None]):
            flat = torch.cat([grad.reshape(-1) for grad in chunk])
            if (work := start_reduce(flat, self._group)) is not None:
                work.wait()
            for grad, summed in zip(chunk, flat.split([grad.numel() for grad in chunk]), strict=True):
                grad.copy_(summed.view(grad.shape))


def _chunks(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbouring gradients of one dtype and device, of bounded size together."""
    chunk: list[Tensor] = []
    n_bytes = 0
    for grad in gradients:
        kind = (grad.dtype, grad.device)
        if chunk and (n_bytes > _CHUNK_BYTES or kind != (chunk[0].dtype, chunk[0].device)):
            yield chunk
            chunk, n_bytes = [], 0
        chunk.append(grad)
        n_bytes += grad.numel() * grad.element_size()
    if chunk:
        yield chunk
