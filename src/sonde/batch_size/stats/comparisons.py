"""What is compared within one window: pieces with each other, ranks with each other, examples with each other.

Independent pieces could come in any order, and so could independent rows of a batch, whatever the weights, the loss and
the learning rate. So neighbours must be no more alike than others, nor rows in certain places of the batch.

Two kinds of data or of loss, each with a backward of its own, have gradients of their own size: the first piece of each
window has the larger one nearly always, or the smaller. More pieces that take turns are less alike as neighbours. Of
unequal pieces, the larger averages more noise away, so its gradient, over its weight, is not the larger one, unless
losses are sums, and their weights were not passed.

Data repeat within a window where two pieces, or two ranks, have the same gradient while others differ.

Examples are compared as neighbours, with the opposite row, and half a batch apart, which is where the usual functions
put two rows that share a sample. Rows that share samples in places drawn anew for each batch are not seen here, but
where a window has several pieces: these then differ more than single examples say.

`dependence.py` averages the numbers of each window, and judges them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

Numbers = dict[str, tuple[float, float]]
"""What one window adds to the averages that `Dependence` judges: two numbers each, by name."""
FEWEST_PIECES = 3
"""Fewest pieces of a rank that have both neighbours and a distant pair."""
_ROUNDING_OF_PRODUCTS = 1e-9
"""Inner products that differ by less than this part of the pieces' own squares differ by rounding."""
_UNEQUAL = 1.25
"""Pieces with this many times the units are unequal."""
FEWEST_RANKS = 3
"""Fewest ranks of which two can be the same while another differs."""
_ROUNDING_OF_GRADIENTS = 2e-6
"""Relative difference up to which two gradients are the same: fp32 kernels that add in another order, and a weight that
was divided out. Independent pieces differ by far more."""
_FEWEST_ELEMENTS = 4
"""Elements other than 0 that a gradient must have. Fewer may coincide by chance, as those of a sum of signs do."""
_LEAST_OF_PIECES = 1e-3
"""Mean squared difference of all pairs over a piece's square. Below it, rounding to 16 bits can make pieces equal."""
_FEWEST_EXAMPLES = 8
"""Fewest examples of a piece that are compared."""
_LEAST_OF_EXAMPLES = 1e-10
"""Mean square of the examples' differences over that of their gradients. Below it, differences are rounding."""


def standard_score(total: float, variance: float, n_ranks: float) -> tuple[float, float]:
    """A sum over ranks in standard errors; and the root of their number, by which what each rank shows adds up."""
    return total / math.sqrt(variance), math.sqrt(n_ranks)


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

    def numbers(self) -> Numbers:
        """A in standard errors; nothing where nothing was compared, or pieces differ by rounding only."""
        if self.n_ranks and (_ROUNDING_OF_PRODUCTS * self.mean_square) ** 2 < self.variance < math.inf:
            return {"neighbours": standard_score(self.products, self.variance, self.n_ranks)}
        return {}


@dataclass(frozen=True)
class OrderSums:
    """One window, summed over ranks.

    Attributes:
        by_place: ranks where the first of two equal pieces had the larger gradient, less those where the second had.
        n_by_place: ranks with two equal pieces.
        by_units: ranks where the piece with the most units had a larger gradient than the one with the fewest, less the
            others.
        n_by_units: ranks with unequal pieces.
    """

    by_place: float = 0.0
    n_by_place: int = 0
    by_units: float = 0.0
    n_by_units: int = 0

    def numbers(self) -> Numbers:
        """Both in standard errors: if either piece is as likely to be the larger, a rank's sign has the variance 1."""
        both = {"place": (self.by_place, self.n_by_place), "units": (self.by_units, self.n_by_units)}
        return {name: standard_score(total, n, n) for name, (total, n) in both.items() if n}


def order_of_pieces(sq_norms: Sequence[Tensor], units: Sequence[float]) -> list[float | Tensor]:
    """What a rank adds to `OrderSums`, in its order.

    Args:
        sq_norms: |h_k|²/w_k² of the rank's pieces, each 0-dim.
        units: their units; empty where the host does not know them.
    """
    if len(units) < 2:
        return [0.0] * 4
    most, fewest = (units.index(find(units)) for find in (max, min))
    if units[most] >= _UNEQUAL * units[fewest]:
        return [0.0, 0.0, (sq_norms[most] - sq_norms[fewest]).sign(), 1.0]
    if len(units) > 2 or units[0] != units[1]:
        return [0.0] * 4
    return [(sq_norms[0] - sq_norms[1]).sign(), 1.0, 0.0, 0.0]


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
    is_same = (distances <= _ROUNDING_OF_GRADIENTS * smaller) & (mean_square >= _LEAST_OF_PIECES * smaller.square())
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
    if len(marks) < FEWEST_RANKS or not 2 * spread >= _LEAST_OF_PIECES:
        return frozenset()
    order = marks[:, 0].argsort(stable=True)  # equal ranks become neighbours
    sizes, projections = marks[order].unbind(1)
    is_same = (sizes.diff() <= 2 * _ROUNDING_OF_GRADIENTS * sizes[:-1]) & (
        projections.diff().abs() <= _ROUNDING_OF_GRADIENTS * sizes[:-1].sqrt()
    )
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


@dataclass(frozen=True)
class OrderScores:
    """How much more alike than others examples in certain places of their batches are: sums of standard scores.

    Attributes:
        next: neighbours, against rows two apart, which are as alike where rows lie in some order of their contents.
        opposite: the first row and the last one, the second and the last but one, and so on.
        half: rows that are half a batch apart.
        n: pieces that are added up.
    """

    next: float = 0.0
    opposite: float = 0.0
    half: float = 0.0
    n: float = 0.0

    def numbers(self) -> Numbers:
        """Each in standard errors; and together, positive where rows share samples, but not where they were sorted.

        Sorted rows, by length for one, may be independent. Their neighbours are alike, and distant rows differ the
        more.
        """
        if not self.n:
            return {}
        of_places = {"opposite": self.opposite, "half": self.half, "next": self.next}
        of_places["not_sorted"] = (self.next + 2 * self.opposite + self.half) / math.sqrt(6)
        return {name: standard_score(total, self.n, round(self.n)) for name, total in of_places.items()}


N_SCORES = len(fields(OrderScores))
"""Length of `order_scores`."""


def order_scores(gradients: Tensor) -> Tensor:
    """The scores of one piece, in the order of `OrderScores`; [4].

    With c the inner product of two different rows of length 1, less its mean over all pairs, the mean of c over m pairs
    has the expectation 0 over all orders, and a variance of E[c²]/m · n/(n − 3) at most.

    Args:
        gradients: elements or projections of each example's gradient, [examples, elements].
    """
    half = len(gradients) // 2
    n = 2 * half
    if n < _FEWEST_EXAMPLES:
        return gradients.new_zeros(N_SCORES)
    rows = torch.cat([gradients[:half], gradients[-half:]])
    size = rows.square().sum()
    rows = rows - rows.mean(0)
    differs = rows.square().sum() > _LEAST_OF_EXAMPLES * size
    rows = torch.nn.functional.normalize(rows, dim=1)  # no row outweighs the others
    rows = rows - rows.mean(0)
    squares = rows.square().sum(1)
    mean = -squares.sum() / (n * (n - 1))  # Σ rows = 0, so the products of different rows add up to −Σ|row|²
    variance = ((rows.T @ rows).square().sum() - squares.square().sum()) / (n * (n - 1)) - mean.square()
    first, last = rows[:half], rows[half:]
    near, two_apart = ((rows[k:] * rows[:-k]).sum() / (n - k) for k in (1, 2))
    opposite, apart = ((first * other).sum() / half - mean for other in (last.flip(0), last))
    scores = torch.stack(
        [(near - two_apart) / math.sqrt(1 / (n - 1) + 1 / (n - 2)), opposite * math.sqrt(half), apart * math.sqrt(half)]
    )
    variance = variance * (n / (n - 3))
    is_known = differs & (variance > 0)
    scores = torch.where(is_known, scores * variance.rsqrt(), 0.0)
    return torch.cat([scores, is_known.to(scores.dtype).view(1)])
