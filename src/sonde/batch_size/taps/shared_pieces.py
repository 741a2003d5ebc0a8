"""Pieces that a rank does not have alone: gradients cut over ranks, ranks that share sequences, experts fed by several.

Tensor parallelism cuts a gradient over the ranks that share a piece: each counts a part of it, so that every element
counts once. Under context parallelism each rank's backward makes the gradient of its part of the tokens. The piece's
gradient is the mean over these ranks, so a square has to wait for the sum over them. The weight of an expert's piece is
known only once the ranks that fed it are summed (see `stats/window_row.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.batch_size.taps.metric import GradientTerms, Metrics
from sonde.batch_size.taps.problems import Problem
from sonde.batch_size.taps.tap import GradientSummary, Number
from sonde.batch_size.taps.window_sums import PieceCounts, WindowSums, as_vector
from sonde.batch_size.taps.witness import Witness
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

    def take(self, index: int, gradient: Tensor, partial: dict[int, Tensor]) -> Tensor | None:
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


class ContextPieces:
    """Reads pieces whose gradients are means over the ranks of context parallelism; all of these ranks together.

    Gradients are summed in chunks, one after another, from the last layer to the first: this sends as much as the
    reduction of a whole gradient, for every piece of a measured window. Every piece takes the same collectives on all
    of these ranks, whichever parameters its backward reached.

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
        # Chunks of ranges of elements, (index, start, stop). Backward comes to the last layers first.
        self.chunks: list[list[tuple[int, int, int]]] = []
        room = 0
        for index in range(len(self.leaves))[::-1]:
            numel = self.leaves[index].numel()
            for start in range(0, numel, self.chunk_numel):
                stop = min(start + self.chunk_numel, numel)
                if stop - start > room:
                    self.chunks.append([])
                    room = self.chunk_numel
                self.chunks[-1].append((index, start, stop))
                room -= stop - start


class ContextPiece:
    """Takes the gradients of one piece; as `PieceGradient`.

    Args:
        pieces: how they are read.
    """

    def __init__(self, pieces: ContextPieces) -> None:
        self._pieces = pieces
        self._waiting: dict[int, Tensor] = {}
        self._arrived: set[int] = set()
        self._next = 0
        self._is_lost = False
        self._terms = GradientTerms(pieces.metrics, len(pieces.leaves), pieces.device)
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
        pieces, grad = self._pieces, grad.to_dense() if grad.is_sparse else grad
        if index in pieces.witness:
            self._witnessed[index] = pieces.witness.read(index, grad).clone()
        if not self._is_lost:
            self._waiting[index] = grad  # itself, no view: autograd then leaves it alone
        while self._next < len(pieces.chunks) and all(i in self._arrived for i, _, _ in pieces.chunks[self._next]):
            self._sum_next()
        if sum(map(Tensor.numel, self._waiting.values())) > _MOST_WAITING * pieces.chunk_numel:
            # Forget the gradients and keep to the collectives: the other ranks wait for them.
            self._is_lost = True
            self._waiting.clear()
        return Problem.OTHER_ORDER if self._is_lost else None

    def _sum_next(self) -> None:
        """Sum one chunk over ranks, and take the terms of the mean."""
        pieces, chunk = self._pieces, self._pieces.chunks[self._next]
        sizes = [stop - start for _, start, stop in chunk]
        buffer = torch.zeros(sum(sizes), dtype=pieces.dtype, device=pieces.device)
        parts = buffer.split(sizes)
        for part, (index, start, stop) in zip(parts, chunk, strict=True):
            if index in self._waiting:
                part.copy_(self._waiting[index].reshape(-1)[start:stop])
                if stop == pieces.leaves[index].numel():
                    del self._waiting[index]
        dist.all_reduce(buffer, group=pieces.group)
        if pieces.is_first:
            buffer /= pieces.n_ranks
            for part, (index, start, _) in zip(parts, chunk, strict=True):
                self._terms.take((index,), (part,), start)
        self._next += 1

    @torch.no_grad()
    def summary(self) -> GradientSummary:
        """The squares and the witness's elements, on the first of the ranks; 0 on the others."""
        pieces = self._pieces
        while self._next < len(pieces.chunks):
            self._sum_next()
        part = pieces.witness.join(self._witnessed, pieces.device) / pieces.n_ranks
        witness = torch.stack([part, part.square()])
        dist.all_reduce(witness, group=pieces.group)
        if not pieces.is_first:
            witness.zero_()
        # The parts of different ranks may nearly cancel, as those of a key's bias do: rounding is relative to them.
        return GradientSummary(self._terms.sum(), witness[0], witness_squares=witness[1])


class ExpertPieces:
    """Adds up the pieces of experts in one window on this rank. Squares add up over parameters in every metric.

    Args:
        experts: which parameters are experts', and the ranks that feed them.
        sums: of the other parameters.
        witness: elements that are compared.
    """

    def __init__(self, experts: ExpertRanks, sums: WindowSums, witness: Witness) -> None:
        self._experts, self._sums, self._witness, self._device = experts, sums, witness, sums.device
        self._n_metrics, n_parameters = sums.shape
        self.is_own = as_vector([float(i not in experts.indices) for i in range(n_parameters)], sums.device)
        """1 for other parameters than experts', 0 for those of experts; [parameters]."""
        self.forget()

    def forget(self) -> None:
        """Forget the pieces since the last window ended."""
        self._squares: list[Tensor] = []
        self._counts: list[Number] = []
        self._sum = zero_sums(self._witness.size, device=self._device)
        self._sum_of_squares = torch.zeros_like(self._sum)
        self._own_elements: Tensor | None = None

    @property
    def own_elements(self) -> Tensor:
        """1 for the witness's elements of other parameters than experts', 0 for those of experts; [witness]."""
        if self._own_elements is None:  # the witness moves on with every window
            own = [
                float(i not in self._experts.indices) for i, size in self._witness.sizes.items() for _ in range(size)
            ]
            own += [1.0] * (self._witness.size - len(own))
            self._own_elements = as_vector(own, self._device)
        return self._own_elements

    def take_from(self, gradient: GradientSummary, counts: PieceCounts) -> GradientSummary:
        """Keep the experts' part of a piece's gradient.

        Returns:
            The other part, with 0 for experts.
        """
        # Multiplied by 0, not left out: what is not finite stays so, and drops the window.
        self._squares.append(self._sums.per_group(gradient.terms * (1.0 - self.is_own)))
        self._counts += [counts.weight, counts.weight * counts.weight / counts.effective_units]
        own = gradient.witness * self.own_elements
        of_experts = gradient.witness - own
        self._sum += of_experts
        self._sum_of_squares += of_experts.square()
        return replace(gradient, terms=gradient.terms * self.is_own, witness=own)

    def take(self) -> tuple[dict[str, Tensor], dict[Problem, Number]]:
        """The sums of the window by name, to be summed over ranks; starts the next window.

        All ranks that feed the experts have to call this, also one without pieces.

        Returns:
            The sums; and problems: whether these ranks had different numbers of pieces, or too many.
        """
        n = min(len(self._squares), _MOST_PIECES)
        table = zero_sums(3, _MOST_PIECES, device=self._device)
        table[0, :n] = 1.0
        if n:
            table[1:, :n] = as_vector(self._counts[: 2 * n], self._device).view(n, 2).T
        dist.all_reduce(table, group=self._experts.group)
        n_feeding, weight, sq_weight_over_units = table
        differs = ((n_feeding > 0) & (n_feeding < self._experts.n_ranks)).any()
        differs = differs + float(len(self._squares) > _MOST_PIECES)
        weight = torch.where(n_feeding > 0, weight, 1.0)
        small = zero_sums(self._n_metrics, self._sums.n_groups + 1, device=self._device)
        if n:
            small = (torch.stack(self._squares[:n]) / weight[:n, None, None]).sum(0)
        counts = torch.stack([(sq_weight_over_units / weight).sum(), widened((n_feeding > 0).sum())])
        counts *= float(self._sums.counts_pieces and self._experts.is_first)
        sums = {"small": small, "counts": counts, "witness": self._sum, "witness_squares": self._sum_of_squares}
        self.forget()
        return sums, {Problem.EXPERTS_DIFFER: differs}
