"""Do data repeat within a window? Two pieces, or two ranks, with the same gradient while others differ."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.batch_size.stats.neighbours import Numbers

FEWEST_RANKS = 3
"""Fewest ranks of which two can be the same while another differs."""
_ROUNDING = 2e-6
"""Relative difference up to which two gradients are the same: fp32 kernels that add in another order, and a weight that
was divided out. Independent pieces differ by far more."""
_FEWEST_ELEMENTS = 4
"""Elements other than 0 that a gradient must have. Fewer may coincide by chance, as those of a sum of signs do."""
_LEAST_DIFFERENCE = 1e-3
"""Mean squared difference of all pairs over a piece's square. Below it, rounding to 16 bits can make pieces equal."""


def repeats_piece(pieces: Tensor) -> Tensor:
    """Whether two pieces are the same while the pieces differ.

    Differences do not depend on the true gradient, which all pieces share: however much it dominates, independent
    pieces differ.

    Args:
        pieces: elements of the pieces' gradients over their weights; [pieces, elements], at least `FEWEST_PIECES` of
            `neighbours`.

    Returns:
        1 or 0, which add up over ranks; 0-dim.
    """
    n = len(pieces)
    # Without a matrix product: |x|² + |y|² − 2⟨x, y⟩ would cancel, to nothing where the accumulators are fp32.
    distances = torch.cdist(pieces, pieces, compute_mode="donot_use_mm_for_euclid_dist")
    sizes = torch.linalg.vector_norm(pieces, dim=1)
    sizes = torch.where(_has_evidence(pieces), sizes, torch.nan)  # NaN equals nothing
    smaller = torch.minimum(sizes[:, None], sizes)
    mean_square = distances.square().sum() / (n * (n - 1))
    is_same = (distances <= _ROUNDING * smaller) & (mean_square >= _LEAST_DIFFERENCE * smaller.square())
    return is_same.fill_diagonal_(False).any().to(pieces.dtype)


def rank_mark(rank_sum: Tensor) -> Tensor:
    """Two numbers by which ranks with the same gradient are recognised.

    Args:
        rank_sum: elements of the sum of a rank's gradients, [elements].

    Returns:
        The squared norm, and the projection on a fixed direction; 0 for a gradient with too few elements. [2].
    """
    direction = _direction(len(rank_sum), rank_sum.dtype, rank_sum.device)
    mark = torch.stack([rank_sum.dot(rank_sum), rank_sum.dot(direction)])
    return torch.where(_has_evidence(rank_sum), mark, 0.0)


@functools.lru_cache(maxsize=8)
def _direction(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """At most a unit vector, without a pattern that gradients could share; [n]."""
    return (torch.arange(n, dtype=dtype, device=device).square().cos() / math.sqrt(max(n, 1))).contiguous()


def _has_evidence(gradients: Tensor) -> Tensor:
    return (gradients != 0).sum(-1) >= _FEWEST_ELEMENTS


def same_ranks(marks: Tensor, *, spread: float) -> frozenset[tuple[int, int]]:
    """Find ranks with the same gradient while gradients differ between ranks.

    Args:
        marks: of `rank_mark`; [ranks, 2], float64 on the CPU.
        spread: variance of the ranks' gradients over their mean square, from 0 to 1.

    Returns:
        Each rank that repeats a lower one, after the lowest such rank.
    """
    # The mean squared difference of two ranks, over the mean square, is twice the spread.
    if len(marks) < FEWEST_RANKS or not 2 * spread >= _LEAST_DIFFERENCE:
        return frozenset()
    order = marks[:, 0].argsort(stable=True)  # equal ranks become neighbours
    sizes, projections = marks[order].unbind(1)
    is_same = (sizes.diff() <= 2 * _ROUNDING * sizes[:-1]) & (projections.diff().abs() <= _ROUNDING * sizes[:-1].sqrt())
    ranks, pairs = order.tolist(), set[tuple[int, int]]()
    cluster = ranks[:1]
    for rank, continues in zip(ranks[1:], (is_same & (sizes[:-1] > 0)).tolist(), strict=True):
        cluster = [*cluster, rank] if continues else [rank]
        pairs |= {(min(cluster), other) for other in cluster if other != min(cluster)}
    return frozenset(pairs)


@dataclass(frozen=True)
class Repeats:
    """Repeats in one window.

    Attributes:
        n_ranks: ranks with pieces enough to compare.
        n_repeating: those of them on which two pieces are the same.
        same_ranks: pairs of ranks with the same gradient.
        n_compared: ranks that were compared with each other; 0 if there are too few.
    """

    n_ranks: int = 0
    n_repeating: int = 0
    same_ranks: frozenset[tuple[int, int]] = frozenset()
    n_compared: int = 0

    def numbers(self) -> Numbers:
        """The share of ranks that repeat a piece."""
        return {"pieces": (self.n_repeating / self.n_ranks, 1.0)} if self.n_ranks else {}
