"""What is compared within one window of its pieces, its examples and its ranks: scores, marks and projections.

A score has the mean 0 and the variance 1 where data are independent, whatever the distribution of the gradients: of
independent pieces, and of independent rows of a batch, all orders are equally likely.

Examples are compared as neighbours, with the opposite row, and half a batch apart, which is where the usual functions
put two rows that share a sample, or the two of a pair.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
_FEWEST_RANKS = 3
"""Fewest ranks of which two can be the same while another differs."""
_ROUNDING_OF_GRADIENTS = 2e-6
"""Relative difference up to which two gradients are the same: fp32 kernels that add in another order, and a weight that
was divided out. Independent pieces differ by far more."""
_FEWEST_ELEMENTS = 4
"""Elements other than 0 that a gradient must have. Fewer may coincide by chance, as those of a sum of signs do."""
_LEAST_OF_RANKS = 1e-3
"""Mean squared difference of all pairs over a rank's square. Below it, rounding to 16 bits can make ranks equal."""
_FEWEST_EXAMPLES = 8
"""Fewest examples of a piece that are compared."""
_LEAST_OF_EXAMPLES = 1e-10
"""Mean square of the examples' differences over that of their gradients. Below it, differences are rounding."""
_ROUNDING_OF_TWINS = 1e-8
"""Squared relative difference of two rows up to which they are the same."""


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


def scores_of_pieces(counts: Mapping[str, float], products: float, variance: float, *, mean_square: float) -> Numbers:
    """What was compared of a window's pieces, in standard errors; nothing where pieces differ by rounding only.

    Args:
        counts: ranks that had pieces enough to compare neighbours ("n_comparing"), and the sums of `order_of_pieces`.
        products: A of `neighbour_products`, summed over ranks.
        variance: Var[A], summed over ranks.
        mean_square: mean of the pieces' own squares, of the same elements.
    """
    found: Numbers = {}
    rounding = _ROUNDING_OF_PRODUCTS * mean_square
    if counts["n_comparing"] and rounding * rounding < variance < math.inf:  # `**` raises where a product is infinite
        found["neighbours"] = standard_score(products, variance, counts["n_comparing"])
    for name in ("place", "units"):  # if either piece is as likely to be the larger, a rank's sign has the variance 1
        if n := counts[f"n_by_{name}"]:
            found[name] = standard_score(counts[f"by_{name}"], n, n)
    return found


def order_of_pieces(sq_norms: Sequence[Tensor], units: Sequence[float]) -> list[float | Tensor]:
    """Which of a rank's pieces has the larger gradient.

    Args:
        sq_norms: |h_k|²/w_k² of the rank's pieces, each 0-dim.
        units: their units; empty where the host does not know them.

    Returns:
        1 or −1 if the first of two equal pieces has the larger gradient, or the second, and 1 if this was compared;
        the same of the pieces with the most units and with the fewest, if these differ.
    """
    if len(units) < 2:
        return [0.0] * 4
    most, fewest = (units.index(find(units)) for find in (max, min))
    if units[most] >= _UNEQUAL * units[fewest]:
        return [0.0, 0.0, (sq_norms[most] - sq_norms[fewest]).sign(), 1.0]
    if len(units) > 2 or units[0] != units[1]:
        return [0.0] * 4
    return [(sq_norms[0] - sq_norms[1]).sign(), 1.0, 0.0, 0.0]


def rank_mark(rank_sum: Tensor) -> Tensor:
    """Two numbers by which ranks with the same gradient are recognised.

    Args:
        rank_sum: elements of the sum of a rank's gradients, [elements].

    Returns:
        The squared norm, and the projection on a fixed direction; 0 for a gradient with too few elements. [2].
    """
    direction = _direction(len(rank_sum), rank_sum.dtype, rank_sum.device)
    mark = torch.stack([rank_sum.dot(rank_sum), rank_sum.dot(direction)])
    return torch.where((rank_sum != 0).sum() >= _FEWEST_ELEMENTS, mark, 0.0)


@functools.lru_cache(maxsize=8)
def _direction(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """At most a unit vector, without a pattern that gradients could share; [n]."""
    return (torch.arange(n, dtype=dtype, device=device).square().cos() / math.sqrt(max(n, 1))).contiguous()


def same_ranks(marks: Tensor, *, spread: float) -> frozenset[tuple[int, int]] | None:
    """Find ranks with the same gradient while gradients differ between ranks.

    Args:
        marks: of `rank_mark`; [ranks, 2], float64 on the CPU.
        spread: variance of the ranks' gradients over their mean square, from 0 to 1.

    Returns:
        Pairs of them, the lower rank first; None for fewer than three ranks.
    """
    if len(marks) < _FEWEST_RANKS:
        return None
    # The mean squared difference of two ranks, over the mean square, is twice the spread.
    if not 2 * spread >= _LEAST_OF_RANKS:
        return frozenset()
    sizes, projections = marks.unbind(1)
    smaller = torch.minimum(sizes[:, None], sizes)
    is_same = (
        ((sizes[:, None] - sizes).abs() <= 2 * _ROUNDING_OF_GRADIENTS * smaller)
        & ((projections[:, None] - projections).abs() <= _ROUNDING_OF_GRADIENTS * smaller.sqrt())
        & (smaller > 0)
    )
    return frozenset((a, b) for a, b in is_same.triu(1).nonzero().tolist())


N_SCORES = 5
"""Length of `order_scores`."""


def scores_of_examples(near: float, opposite: float, half: float, twins: float, n: float) -> Numbers:
    """What was compared of a window's examples, in standard errors.

    Args:
        near: sum of the standard scores of neighbours, against rows two apart, which are as alike where rows lie in
            some order of their contents.
        opposite: of the first row and the last one, the second and the last but one, and so on.
        half: of rows that are half a batch apart.
        twins: pieces in which each row is there equally often, and more than once.
        n: pieces that are added up.
    """
    if not n:
        return {}
    of_places = {"opposite": opposite, "half": half, "next": near}
    scores = {name: standard_score(total, n, round(n)) for name, total in of_places.items()}
    return scores | {"twins": (twins / n, 1.0)}


def order_scores(gradients: Tensor) -> Tensor:
    """How much more alike than others a piece's examples in certain places are: what `scores_of_examples` takes; [5].

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
    # Against rows one place further, since distant rows differ more where rows are sorted.
    opposite, apart = (
        (first * other).sum() / half - (first[1:] * other[:-1]).sum() / (half - 1) for other in (last.flip(0), last)
    )
    over = math.sqrt(1 / half + 1 / (half - 1))
    scores = torch.stack([(near - two_apart) / math.sqrt(1 / (n - 1) + 1 / (n - 2)), opposite / over, apart / over])
    variance = variance * (n / (n - 3))
    is_known = differs & (variance > 0)
    scores = torch.where(is_known, scores * variance.rsqrt(), 0.0)
    return torch.cat([scores, torch.stack([_are_twins(gradients) & is_known, is_known]).to(scores.dtype)])


def _are_twins(gradients: Tensor) -> Tensor:
    """Whether each row is there equally often, and more than once; 0-dim. Rows drawn at random never are so even."""
    n = len(gradients)
    rows = gradients[gradients[:, 0].argsort()]
    differs = (rows[1:] - rows[:-1]).square().sum(1) > _ROUNDING_OF_TWINS * rows[1:].square().sum(1)
    is_first = torch.cat([differs.new_ones(1), differs])
    times = n // is_first.sum()
    return (times > 1) & ((torch.arange(n, device=rows.device) % times == 0) == is_first).all()


@dataclass(frozen=True)
class ProjectedWindow:
    """A window's mean gradient in a few random projections, and what its examples say of it.

    Attributes:
        mean: [projections].
        grad_sq: |G|² in these projections, estimated from the examples.
        noise: what their noise adds to |mean|² where there is no signal.
    """

    mean: Tensor
    grad_sq: float
    noise: float
