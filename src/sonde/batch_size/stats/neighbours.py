"""Are neighbouring pieces more alike than distant ones? Independent pieces could come in any order."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

Numbers = dict[str, tuple[float, float]]
"""What one window adds to the averages that `Dependence` judges: two numbers each, by name."""
FEWEST_PIECES = 3
"""Fewest pieces of a rank that have both neighbours and a distant pair."""
_ROUNDING = 1e-9
"""Inner products that differ by less than this part of the pieces' own squares differ by rounding."""


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


def standard_score(total: float, variance: float, n_ranks: float) -> tuple[float, float]:
    """A sum over ranks in standard errors; and the root of their number, by which what each rank shows adds up."""
    return total / math.sqrt(variance), math.sqrt(n_ranks)


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

    def numbers(self) -> Numbers:
        """A in standard errors; nothing where nothing was compared, or pieces differ by rounding only."""
        if self.n_ranks and (_ROUNDING * self.mean_square) ** 2 < self.variance < math.inf:
            return {"neighbours": standard_score(self.products, self.variance, self.n_ranks)}
        return {}
