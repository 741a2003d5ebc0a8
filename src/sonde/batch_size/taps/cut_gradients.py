"""Gradients that are cut over ranks which share a piece, as tensor parallelism cuts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sonde.parallel.placements import from_local, local_tensor, spec_of
from sonde.parallel.shares import CountedPart, counted_part, reduce_partial, same_placement, share_of


@dataclass(frozen=True)
class _Placed:
    """How a gradient was placed when it was last seen, and what follows from it."""

    spec: Any
    is_partial: bool
    part: CountedPart | None


class CutGradients:
    """What this rank adds to the squares of a piece that several ranks share, so that every element counts once.

    The placement of the gradient decides. A shard counts as it is. Of copies, the first counts. A partial gradient is
    kept until the piece ends, and summed over its ranks then; under sequence parallelism these are the norms' weights.

    Args:
        leaves: the tensors that backward makes gradients for.
        first_rank: the lowest of the ranks that share this rank's pieces, by its global number.
        as_leaves: whether each rank counts its own shard of a gradient that is whole while its leaf is cut. Otherwise
            the first rank counts all of it, which costs the others nothing.
    """

    def __init__(self, leaves: Sequence[Tensor], first_rank: int, *, as_leaves: bool = False) -> None:
        self._first_rank = first_rank
        self._like = [spec_of(leaf) if as_leaves else None for leaf in leaves]
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
