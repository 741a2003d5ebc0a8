"""Gradients that are cut over ranks which share a piece, as tensor parallelism cuts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sonde.gradient_norm.gradient_groups import same_placement
from sonde.gradient_norm.partial_gradients import reduce_partial
from sonde.parallel.placements import WHOLE, from_local, holds_first_copy, layout_of_spec, local_tensor, spec_of


@dataclass(frozen=True)
class _Placed:
    """How a gradient was placed when it was last seen, and what follows from it."""

    spec: Any
    is_partial: bool
    counts: bool


class CutGradients:
    """What this rank adds to the squares of a piece that several ranks share, so that every element counts once.

    The placement of the gradient decides. A shard counts as it is. Of copies, the first counts. A partial gradient is
    kept until the piece ends, and summed over its ranks then; under sequence parallelism these are the norms' weights.

    Args:
        n_parameters: measured parameters.
        first_rank: the lowest of the ranks that share this rank's pieces, by its global number.
    """

    def __init__(self, n_parameters: int, first_rank: int) -> None:
        self._first_rank = first_rank
        self._placed: list[_Placed | None] = [None] * n_parameters
        self.specs: list[Any] = [None] * n_parameters
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
            layout = WHOLE if spec is None else layout_of_spec(spec)
            counts = holds_first_copy(layout, self._first_rank)
            placed = self._placed[index] = _Placed(spec, bool(layout.partial), counts)
        if placed.is_partial:
            # Local tensors: to clone or add DTensors may reduce them.
            local = local_tensor(gradient)
            partial[index] = partial[index] + local if index in partial else local.clone()
            return None
        self.specs[index] = spec
        return local_tensor(gradient) if placed.counts else None

    def sum_partial(self, partial: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Sum the partial gradients over their ranks, by one all-reduce of each kind. All these ranks have to call it.

        Returns:
            This rank's parts, by parameter.
        """
        indices, parts = sorted(partial), {}
        placed = [from_local(partial[i], placed.spec) for i in indices if (placed := self._placed[i]) is not None]
        for index, gradient in zip(indices, reduce_partial(placed), strict=True):
            self.specs[index] = spec_of(gradient)
            if holds_first_copy(layout_of_spec(self.specs[index]), self._first_rank):
                parts[index] = local_tensor(gradient)
        return parts
