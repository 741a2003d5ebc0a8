"""Are neighbouring pieces more alike than distant ones? Independent pieces could come in any order."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FEWEST_PIECES = 3
"""Fewest pieces of a rank that have both neighbours and a distant pair."""
_ROUNDING = 1e-9
"""Inner products that differ by less than this part of the pieces' own squares differ by rounding."""
_AFTER = 5
"""Windows before the first judgement."""
_STANDARD_ERRORS = 6.0
"""Beyond it, chance is no explanation: 2e-9 for one judgement, so that a run of many judgements has no false alarm."""
_LEAST_SCORE = 0.25
"""Mean score of a rank below which a dependence is too weak to matter, however many ranks and windows confirm it."""
_SHORTEST_MEMORY = 100.0
"""Windows that are remembered at least: with a shorter memory, nothing could reach 6 standard errors."""


def neighbour_products(pieces: Tensor) -> Tensor:
    """How much more alike neighbouring pieces are than pieces in any other order would be.

    Let A be the sum of the inner products of neighbours, less their mean over all pairs. If pieces are independent
    samples, all orders are equally likely. Over all orders of K pieces, with c the inner products less their mean, and
    r the sums of its rows,

        E[A] = 0        Var[A] = ((K − 1) Σ_{i≠j} c_ij² − 2 Σ_i r_i²) / (K (K − 1))

    So A/√Var has mean 0 and variance 1, whatever the distribution of the gradients.

    Args:
        pieces: elements of the pieces' gradients over their weights, in the order in which they came;
            [pieces, elements], at least `FEWEST_PIECES`.

    Returns:
        A and Var[A], which add up over ranks; [2].
    """
    n = len(pieces)
    pairs, neighbours = _masks(n, pieces.dtype, pieces.device)
    products = pieces @ pieces.T
    mean = products.view(-1).dot(pairs.view(-1)) / (n * (n - 1))
    centred = (products - mean) * pairs
    flat, rows = centred.view(-1), centred.sum(1)
    variance = (flat.dot(flat) / n).sub(rows.dot(rows), alpha=2.0 / (n * (n - 1)))
    return torch.stack([flat.dot(neighbours), variance])


@functools.lru_cache(maxsize=64)
def _masks(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """1 for each pair of different pieces, [n, n]; and 1 for each pair of neighbours, once, [n·n]."""
    ones = torch.ones(n, n, dtype=dtype, device=device)
    return ones - torch.eye(n, dtype=dtype, device=device), (ones.triu(1) - ones.triu(2)).view(-1)


@dataclass(frozen=True)
class NeighbourSums:
    """The comparison of one window.

    Attributes:
        products: A, summed over ranks.
        variance: Var[A], summed over ranks.
        n_ranks: ranks that had pieces enough to compare.
        mean_square: mean of the pieces' own squares, of the same elements.
    """

    products: float = 0.0
    variance: float = 0.0
    n_ranks: int = 0
    mean_square: float = 0.0

    @property
    def score(self) -> float | None:
        """A in standard errors; None where nothing was compared, or pieces differ by rounding only."""
        if not (self.n_ranks and math.isfinite(self.products) and math.isfinite(self.variance)):
            return None
        if not self.variance > (_ROUNDING * self.mean_square) ** 2:
            return None
        return self.products / math.sqrt(self.variance)


class NeighbourWatch:
    """Averages the scores of windows, and judges whether pieces are independent.

    Args:
        decay: factor by which a window's weight shrinks with each later window.
    """

    def __init__(self, decay: float) -> None:
        self._decay = max(decay, 1.0 - 1.0 / _SHORTEST_MEMORY)
        self._score = self._weight = self._variance = 0.0
        self._windows = 0.0

    def update(self, window: NeighbourSums) -> None:
        """Take one window."""
        if (score := window.score) is None:
            return
        self._score = self._decay * self._score + score
        # A dependence within each of several ranks moves their common score by the root of their number.
        self._weight = self._decay * self._weight + math.sqrt(window.n_ranks)
        self._variance = self._decay**2 * self._variance + 1.0
        self._windows += 1

    @property
    def standard_errors(self) -> float:
        """The average score over its standard error; 0 before the first window."""
        return self._score / math.sqrt(self._variance) if self._variance else 0.0

    @property
    def lean(self) -> int:
        """1 where neighbours are more alike than others, −1 where less, 0 where chance explains the scores."""
        if self._windows < _AFTER or abs(self.standard_errors) < _STANDARD_ERRORS:
            return 0
        if abs(self._score) < _LEAST_SCORE * self._weight:
            return 0
        return 1 if self._score > 0 else -1

    def doubt(self) -> str | None:
        """Why pieces are not independent samples; None when nothing looks wrong."""
        if not self.lean:
            return None
        if self.lean > 0:
            return (
                "neighbouring pieces are too alike to be independent. Put all backwards of one batch into one 'with "
                "probe.piece():', and shuffle micro-batches, also if the sampler sorts by length"
            )
        return (
            "neighbouring pieces are less alike than others, so pieces are not independent. Check for data that repeat "
            "within a window. If micro-batches alternate between kinds of data or losses, put one of each into one "
            "'with probe.piece():'"
        )

    def state_dict(self) -> dict[str, float]:
        """Everything that `load_state_dict` needs."""
        return {
            "score": self._score,
            "weight": self._weight,
            "variance": self._variance,
            "windows": self._windows,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self._score, self._weight = state["score"], state["weight"]
        self._variance, self._windows = state["variance"], state["windows"]
