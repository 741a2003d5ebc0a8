"""Pieces under context parallelism, where ranks hold parts of the same sequences.

Each rank's backward makes the gradient of its part of the tokens. The piece's gradient is the mean over these ranks, so
a square has to wait for the sum over them. Gradients are summed in chunks of fixed length, one after another, as they
come: this sends as much as the reduction of a whole gradient, for every piece of a measured window.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from sonde.batch_size.taps.metric import GradientTerms, Metrics
from sonde.batch_size.taps.tap import GradientSummary, Problem
from sonde.batch_size.taps.witness import Witness
from sonde.parallel.devices import to_device

_MOST_WAITING = 8
"""Chunks that wait for a gradient that comes first in the order, at most: bounds their memory."""
_SHORTEST_CHUNK = 1024


def is_context_parallel() -> bool:
    """Whether torch's `context_parallel` is in force now: it replaces the attention while it is."""
    name = getattr(functional.scaled_dot_product_attention, "__module__", None) or ""
    return name.startswith("torch.distributed.tensor.experimental")


@dataclass(frozen=True)
class _Segment:
    """Elements `start` … `stop` of one parameter, which lie in a chunk from `place` on."""

    chunk: int
    place: int
    index: int
    start: int
    stop: int


class ContextPieces:
    """Reads pieces whose gradients are means over the ranks of context parallelism; all of these ranks together.

    Every piece takes the same collectives on all of these ranks, whichever parameters its backward reached.

    Args:
        leaves: the tensors that backward makes gradients for.
        group: the ranks that share the sequences.
        witness: elements to copy besides the norms.
        metrics: in which gradients are measured.
        staging_bytes: length of a chunk in bytes.
    """

    def __init__(
        self,
        leaves: Sequence[Tensor],
        group: dist.ProcessGroup,
        witness: Witness,
        metrics: Metrics,
        *,
        staging_bytes: int,
    ) -> None:
        self.leaves, self.group, self.witness, self.metrics = list(leaves), group, witness, metrics
        self.n_ranks, self.is_first, self.device = group.size(), group.rank() == 0, leaves[0].device
        self.dtype = torch.float64 if any(leaf.dtype == torch.float64 for leaf in leaves) else torch.float32
        self.chunk_numel = max(staging_bytes // self.dtype.itemsize, _SHORTEST_CHUNK)
        self.order_is_known = False
        self._plan(list(range(len(self.leaves)))[::-1])  # backward comes to the last layers first

    def begin(self) -> ContextPiece:
        """A piece that begins now."""
        return ContextPiece(self)

    def learn(self, arrived: Sequence[int]) -> None:
        """Take the order of gradients on the first rank for that of all later pieces. Waits for the device."""
        self.order_is_known = True
        known = set(arrived)
        order = torch.tensor([*arrived, *(i for i in self._order if i not in known)], device="cpu")
        order = to_device(order, self.device)
        dist.broadcast(order, group=self.group, group_src=0)
        self._plan(order.tolist())

    def _plan(self, order: list[int]) -> None:
        """Cut the gradients, one after another in this order, into chunks."""
        self._order = order
        self.of_parameter: dict[int, list[_Segment]] = {}
        self.of_chunk: list[list[_Segment]] = []
        ends = list(itertools.accumulate((self.leaves[i].numel() for i in order), initial=0))
        self.n_chunks = -(-ends[-1] // self.chunk_numel)
        self.of_chunk = [[] for _ in range(self.n_chunks)]
        for index, first, last in zip(order, ends, ends[1:], strict=False):
            self.of_parameter[index] = []
            at = first
            while at < last:
                chunk, place = divmod(at, self.chunk_numel)
                end = min(last, (chunk + 1) * self.chunk_numel)
                segment = _Segment(chunk, place, index, at - first, end - first)
                self.of_parameter[index].append(segment)
                self.of_chunk[chunk].append(segment)
                at = end


class ContextPiece:
    """Takes the gradients of one piece; as `PieceGradient`.

    Args:
        pieces: how they are read.
    """

    def __init__(self, pieces: ContextPieces) -> None:
        self._pieces = pieces
        self._waiting: dict[int, Tensor] = {}
        self._n_missing = [len(segments) for segments in pieces.of_chunk]
        self._next = 0
        self._is_lost = False
        self._arrived: dict[int, None] = {}
        self._terms = GradientTerms(pieces.metrics, len(pieces.leaves), pieces.device)
        self._witnessed: dict[int, Tensor] = {}

    def take(self, index: int, grad: Tensor, *, grad_is_sum: bool = False) -> Problem | None:
        """Copy a gradient into the chunks that it belongs to, and sum those that are complete.

        Args:
            index: of the leaf.
            grad: its gradient on this rank, as a hook sees it.
            grad_is_sum: not used, since `.grad` is of this rank alone.

        Returns:
            Why the piece is lost, if it is.
        """
        if index in self._arrived:
            return Problem.TOO_LARGE_TO_SUM  # a second backward: the first is summed already
        self._arrived[index] = None
        grad = grad.to_dense() if grad.is_sparse else grad
        if index in self._pieces.witness:
            self._witnessed[index] = self._pieces.witness.read(index, grad).clone()
        flat = grad.reshape(-1)
        for segment in self._pieces.of_parameter[index]:
            if not self._is_lost:
                buffer = self._buffer(segment.chunk)
                length = segment.stop - segment.start
                buffer[segment.place : segment.place + length].copy_(flat[segment.start : segment.stop])
            self._n_missing[segment.chunk] -= 1
            self._sum_complete()
        return Problem.OTHER_ORDER if self._is_lost else None

    def _buffer(self, chunk: int) -> Tensor:
        if chunk not in self._waiting:
            if len(self._waiting) >= _MOST_WAITING:
                # Forget the gradients and keep to the collectives: the other ranks wait for them.
                self._is_lost = True
                self._waiting.clear()
            pieces = self._pieces
            self._waiting[chunk] = torch.zeros(pieces.chunk_numel, dtype=pieces.dtype, device=pieces.device)
        return self._waiting[chunk]

    def _sum_complete(self) -> None:
        while self._next < self._pieces.n_chunks and not self._n_missing[self._next]:
            self._sum_next()

    def _sum_next(self) -> None:
        """Sum one chunk over ranks, and square the mean."""
        pieces, buffer = self._pieces, self._buffer(self._next)
        del self._waiting[self._next]
        dist.all_reduce(buffer, group=pieces.group)
        if pieces.is_first:
            buffer /= pieces.n_ranks
            for segment in pieces.of_chunk[self._next]:
                index, values = segment.index, buffer[segment.place : segment.place + segment.stop - segment.start]
                shape, is_known = pieces.leaves[index].shape, index in self._arrived
                self._terms.take_range(index, values, segment.start, shape, is_known=is_known)
        self._next += 1

    @torch.no_grad()
    def summary(self) -> GradientSummary:
        """The squares and the witness's elements, on the first of the ranks; 0 on the others."""
        pieces = self._pieces
        while self._next < pieces.n_chunks:
            self._sum_next()
        part = pieces.witness.join(self._witnessed, pieces.device) / pieces.n_ranks
        witness = torch.stack([part, part.square()])
        dist.all_reduce(witness, group=pieces.group)
        if not pieces.is_first:
            witness.zero_()
        if not pieces.order_is_known:
            pieces.learn(list(self._arrived))
        # The parts of different ranks may nearly cancel, as those of a key's bias do: rounding is relative to them.
        return GradientSummary(self._terms.sum(), witness[0], witness_squares=witness[1])
