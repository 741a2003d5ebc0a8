"""Pieces that a rank does not have alone: gradients cut over ranks, ranks that share sequences, experts fed by several.

Tensor parallelism cuts a gradient over the ranks that share a piece: each counts a part of it, so that every element
counts once. Under context parallelism each rank's backward makes the gradient of its part of the tokens. The piece's
gradient is the mean over these ranks, so a square has to wait for the sum over them. The weight of an expert's piece is
known only once the ranks that fed it are summed: experts are a class of pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.batch_size.taps.leaf_hooks import GradientSummary
from sonde.batch_size.taps.metric import GradientMetric, GradientTerms
from sonde.batch_size.taps.problems import Problem
from sonde.batch_size.taps.witness import Witness
from sonde.batch_size.units import Number, PieceCounts, as_vector
from sonde.parallel.data_ranks import ExpertRanks
from sonde.parallel.devices import widened, zero_sums
from sonde.parallel.placements import from_local, local_tensor, spec_of
from sonde.parallel.shares import CountedPart, counted_part, reduce_partial, same_placement, share_of

_MOST_WAITING = 8
"""Chunks that wait for a gradient that comes first in the order, at most: bounds their memory."""
_SHORTEST_CHUNK = 1024
_MOST_PIECES = 256
"""Pieces of a rank and window that experts have, at most. All ranks reduce a vector of one length."""


@dataclass(frozen=True)
class _Placed:
    """How a gradient was placed when it was last seen, and what follows from it."""

    spec: Any
    is_partial: bool
    part: CountedPart | None


class CutGradients:
    """What this rank adds to the squares of a piece that several ranks share, so that every element counts once.

    The placement of the gradient decides. A shard counts as it is. Of copies, the first counts. Of a gradient that is
    whole while its leaf is cut, each rank counts its own shard, as Adam's second moments are cut. A partial gradient is
    kept until the piece ends, and summed over its ranks then; under sequence parallelism these are the norms' weights.

    Args:
        leaves: the tensors that backward makes gradients for.
        first_rank: the lowest of the ranks that share the gradients, by its global number.
    """

    def __init__(self, leaves: Sequence[Tensor], first_rank: int) -> None:
        self._first_rank, self._like = first_rank, [spec_of(leaf) for leaf in leaves]
        self._placed: list[_Placed | None] = [None] * len(leaves)
        self.specs: list[Any] = [None] * len(leaves)
        """How the part of each gradient that counts here is placed; None for a plain one."""

    def part(self, index: int, gradient: Tensor, partial: dict[int, Tensor]) -> Tensor | None:
        """This rank's part of a gradient; None if it counts later or on another rank.

        Args:
            index: of the parameter.
            gradient: as a leaf hook sees it.
            partial: the piece's partial gradients so far, by parameter; added to.
        """
        spec, placed = spec_of(gradient), self._placed[index]
        if placed is None or (spec is not placed.spec and not same_placement(spec, placed.spec)):
            is_partial = bool(share_of(spec).partial)
            part = counted_part(spec, self._first_rank, like=self._like[index])
            placed = self._placed[index] = _Placed(spec, is_partial, part)
        if placed.is_partial:
            # Local tensors: to clone or add DTensors may reduce them.
            local = local_tensor(gradient)
            partial[index] = partial[index] + local if index in partial else local.clone()
            return None
        if placed.part is None:
            return None
        self.specs[index] = placed.part.spec
        return placed.part.of(local_tensor(gradient))

    def sum_partial(self, partial: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Sum the partial gradients over their ranks, by one all-reduce of each kind. All these ranks have to call it.

        Returns:
            This rank's parts, by parameter.
        """
        indices, parts = sorted(partial), {}
        placed = [from_local(partial[i], placed.spec) for i in indices if (placed := self._placed[i]) is not None]
        for index, gradient in zip(indices, reduce_partial(placed), strict=True):
            part = counted_part(spec_of(gradient), self._first_rank, like=self._like[index])
            if part is not None:
                self.specs[index] = part.spec
                parts[index] = part.of(local_tensor(gradient))
        return parts


class ContextPiece:
    """Takes the gradients of one piece after another, each the mean over the ranks of context parallelism.

    All of these ranks take them together. Gradients are summed in chunks, one after another, from the last layer to the
    first: this sends as much as the reduction of a whole gradient, for every piece of a measured window. Every piece
    takes the same collectives on all of these ranks, whichever parameters its backward reached.

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
        metrics: Sequence[GradientMetric],
        *,
        staging_bytes: int,
    ) -> None:
        self._leaves, self._group, self._witness, self._metrics = list(leaves), group, witness, metrics
        self._is_first, self._device = group.rank() == 0, leaves[0].device
        self._dtype = torch.float64 if any(leaf.dtype == torch.float64 for leaf in leaves) else torch.float32
        self._chunk_numel = max(staging_bytes // self._dtype.itemsize, _SHORTEST_CHUNK)
        # Chunks of ranges of elements, (index, start, stop). Backward comes to the last layers first.
        self._chunks: list[list[tuple[int, int, int]]] = []
        room = 0
        for index in range(len(self._leaves))[::-1]:
            numel = self._leaves[index].numel()
            for start in range(0, numel, self._chunk_numel):
                stop = min(start + self._chunk_numel, numel)
                if stop - start > room:
                    self._chunks.append([])
                    room = self._chunk_numel
                self._chunks[-1].append((index, start, stop))
                room -= stop - start
        self.begin()

    def begin(self) -> None:
        """Begin a piece."""
        self._waiting: dict[int, Tensor] = {}
        self._arrived: set[int] = set()
        self._next = 0
        self._is_lost = False
        self._terms = GradientTerms(self._metrics, len(self._leaves), self._device)
        self._witnessed: dict[int, Tensor] = {}

    def take(self, index: int, grad: Tensor) -> Problem | None:
        """Let a gradient wait for those before it in the order, and sum the chunks that are complete.

        Args:
            index: of the leaf.
            grad: its gradient on this rank, as a hook sees it.

        Returns:
            Why the piece is lost, if it is.
        """
        if index in self._arrived:
            return Problem.TOO_LARGE_TO_SUM  # a second backward: the first is summed already
        self._arrived.add(index)
        grad = grad.to_dense() if grad.is_sparse else grad
        if index in self._witness.indices:
            self._witnessed[index] = self._witness.read(index, grad).clone()
        if not self._is_lost:
            self._waiting[index] = grad  # itself, no view: autograd then leaves it alone
        while self._next < len(self._chunks) and all(i in self._arrived for i, _, _ in self._chunks[self._next]):
            self._sum_next()
        if sum(map(Tensor.numel, self._waiting.values())) > _MOST_WAITING * self._chunk_numel:
            # Forget the gradients and keep to the collectives: the other ranks wait for them.
            self._is_lost = True
            self._waiting.clear()
        return Problem.OTHER_ORDER if self._is_lost else None

    def _sum_next(self) -> None:
        """Sum one chunk over ranks, and take the terms of the mean."""
        chunk = self._chunks[self._next]
        sizes = [stop - start for _, start, stop in chunk]
        buffer = torch.zeros(sum(sizes), dtype=self._dtype, device=self._device)
        parts = buffer.split(sizes)
        for part, (index, start, stop) in zip(parts, chunk, strict=True):
            if index in self._waiting:
                part.copy_(self._waiting[index].reshape(-1)[start:stop])
                if stop == self._leaves[index].numel():
                    del self._waiting[index]
        dist.all_reduce(buffer, group=self._group)
        if self._is_first:
            buffer /= self._group.size()
            for part, (index, start, _) in zip(parts, chunk, strict=True):
                self._terms.take((index,), (part,), start)
        self._next += 1

    @torch.no_grad()
    def summary(self) -> GradientSummary:
        """The squares and the witness's elements, on the first of the ranks; 0 on the others."""
        while self._next < len(self._chunks):
            self._sum_next()
        part = self._witness.join(self._witnessed, self._device) / self._group.size()
        witness = torch.stack([part, part.square()])
        dist.all_reduce(witness, group=self._group)
        if not self._is_first:
            witness.zero_()
        # The parts of different ranks may nearly cancel, as those of a key's bias do: rounding is relative to them.
        return GradientSummary(self._terms.sum(), witness[0], witness_squares=witness[1])


@dataclass(frozen=True)
class PieceClass:
    """A class of parameters that is solved apart from the rest, since it has pieces of its own.

    It has columns in the window's sums and elements in the witness. No parameter is in two classes. Single examples are
    refused beside a class, and metrics in which norms add up before they are squared: they speak of the whole model.

    Attributes:
        name: plural, for people and for the names of its sums.
        indices: of its parameters in the whole model.
        likely_cause: what may have changed its gradient, if it is no multiple of the sum of its pieces.
        begin: makes its pieces of one window.
    """

    name: str
    indices: frozenset[int]
    likely_cause: str
    begin: Callable[[], ExpertPieces]


def experts_apart(experts: ExpertRanks) -> PieceClass:
    """The class of experts that several ranks feed."""
    likely_cause = "was it changed, or do experts get tokens from other ranks than those over which they are spread"
    return PieceClass("experts", experts.indices, likely_cause, functools.partial(ExpertPieces, experts))


class ExpertPieces:
    """The squares of experts in the pieces of one window on this rank, until the pieces' weights are known.

    A backward sends the tokens of E ranks to each expert, so the pieces of experts are fewer and larger: with r over
    the E ranks, piece k has the weight w_k = Σ_r w_rk and n_k = w_k²/Σ_r(w_rk²/n_rk) effective units. Then Σ w_k²/n_k,
    and with it v, are those of all other parameters; u is smaller. A unit none of whose tokens reach an expert adds
    nothing to that expert's gradient. The expert's gradients scatter the more: uneven routing shows in tr Σ.

    Args:
        experts: the ranks that feed them.
    """

    def __init__(self, experts: ExpertRanks) -> None:
        self._experts = experts
        self._squares: list[Tensor] = []
        self._counts: list[Number] = []

    def add(self, squares: Tensor, counts: PieceCounts) -> None:
        """Add one of this rank's pieces; squares: |h_k|², [metrics, groups]. The weight is this rank's part of it."""
        self._squares.append(squares)
        self._counts += [counts.weight, counts.weight * counts.weight / counts.effective_units]

    def sum(self, squares: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[Problem, Number]]:
        """Sum the pieces' weights over the ranks that feed the experts, by one collective; divide the squares by them.

        Args:
            squares: Σ |h_k|²/w_k with the weights of the rest, [metrics, groups].

        Returns:
            The same with weights of their own; the numbers of `Pieces` in which they differ from the rest, by name; and
            a problem: that these ranks had different numbers of pieces, or too many. All are still to be summed over
            ranks.
        """
        n = min(len(self._squares), _MOST_PIECES)
        table = zero_sums(3, _MOST_PIECES, device=squares.device)
        table[0, :n] = 1.0
        if n:
            table[1:, :n] = as_vector(self._counts[: 2 * n], squares.device).view(n, 2).T
        dist.all_reduce(table, group=self._experts.group)
        n_feeding, weight, sq_weight_over_units = table
        differs = ((n_feeding > 0) & (n_feeding < self._experts.n_ranks)).any()
        weight = torch.where(n_feeding > 0, weight, 1.0)
        over_weight = torch.zeros_like(squares)
        if n:
            over_weight = (torch.stack(self._squares[:n]) / weight[:n, None, None]).sum(0)
        counts = torch.stack([(sq_weight_over_units / weight).sum(), widened((n_feeding > 0).sum())])
        counts *= float(self._experts.is_first)
        numbers = {"weight_over_units": counts[0], "n_pieces": counts[1]}
        return over_weight, numbers, {Problem.EXPERTS_DIFFER: differs + float(len(self._squares) > _MOST_PIECES)}
