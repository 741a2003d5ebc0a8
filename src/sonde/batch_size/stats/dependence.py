"""Are pieces, examples and ranks independent? A few numbers of each window, their averages, and a test on each.

Independent pieces could come in any order, and so could independent rows of a batch, whatever the weights, the loss and
the learning rate. So neighbours must be no more alike than others, nor rows in certain places of the batch.

Two kinds of data or of loss, each with a backward of its own, have gradients of their own size: the first piece of each
window has the larger one nearly always, or the smaller. More pieces that take turns are less alike as neighbours. Of
unequal pieces, the larger averages more noise away, so its gradient, over its weight, is not the larger one, unless
losses are sums, and their weights were not passed.

Two ranks see the same data where they have the same gradient while others differ.

Examples are compared as neighbours, with the opposite row, and half a batch apart, which is where the usual functions
put two rows that share a sample. Rows that share samples in places drawn anew for each batch are not seen here, but
where a window has several pieces: these then differ more than single examples say.

A score has the mean 0 and the variance 1 where data are independent, whatever the distribution of the gradients. The
same averages count the windows whose gradient was changed by more than a scale.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor

from sonde.batch_size.stats.noise_scale import RatioAverage
from sonde.stats.sealed_state import Stateful

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
_MEMORY = 100.0
"""Windows that are remembered at least: with a shorter memory, nothing could reach 6 standard errors."""
_AFTER = 5
"""Windows before the first judgement."""
_STANDARD_ERRORS = 6.0
"""Beyond it, chance is no explanation: 2e-9 for one judgement, so that a run of many judgements has no false alarm."""
_LEAST_SCORE = 0.25
"""Mean score of a rank below which a dependence is too weak to matter, however many ranks and windows confirm it."""
_SURE = 3.0
"""Standard errors beyond which rows were not sorted."""
_BEFORE_EXCESS = 10
"""Windows before pieces are first held against examples."""
_LEAST_EXCESS = 0.05
"""Smallest (p − e)/(p + e) that matters, p and e being tr Σ from pieces and from examples: p is 1.1 times e."""
_FEWEST_REPEATS, _LEAST_SHARE = 4.5, 0.2
"""Windows, weighted by age, in which two ranks were the same, before the first judgement; and their share. Sampling
with replacement, or the seam of two epochs, repeats data now and then."""
_ACCIDENTS, _SHARE_OF_ACCIDENTS = 1.5, 0.02
"""Changed windows, weighted by age, that are taken for accidents and raise no doubt; and their share."""
_SAME = 1e-9
"""Ratio of noise to signal below which pieces hold the same data. Kernels without a fixed order of sums leave 1e-12."""
_FACTOR = 3.0
"""A consistency beyond this factor from 1, over its whole interval, is not explained by chance."""
_CERTAINTY = 0.99
"""Confidence level of that interval."""

_SIZE = (
    "the first of a window's two pieces has the {} gradient nearly always, so they are of two kinds, or the same in "
    "every window. If each is another kind of data or of loss, put both backwards into one 'with probe.piece():'"
)
_PIECES = {
    ("place", 1): _SIZE.format("larger"),
    ("place", -1): _SIZE.format("smaller"),
    ("units", 1): (
        "pieces with more units have the larger gradient nearly always, as if their losses were sums. Then pass each "
        "one's units as weight= to 'probe.piece()', or make each loss a mean"
    ),
    ("neighbours", 1): (
        "neighbouring pieces are too alike to be independent. Put all backwards of one batch into one 'with "
        "probe.piece():', and shuffle micro-batches, also if the sampler sorts by length"
    ),
    ("neighbours", -1): (
        "neighbouring pieces are less alike than others, so pieces are not independent. Check for data that repeat "
        "within a window. If micro-batches alternate between kinds of data or losses, put one of each into one 'with "
        "probe.piece():'"
    ),
}
"""What is said of pieces whose score has this sign, the first that applies."""
_ROWS = {
    "opposite": "the first row of a batch and the last one, the second and the last but one, and so on",
    "half": "rows half a batch apart",
    "next": "neighbouring rows of a batch",
}
_SAME_DATA = ("differences", "consistency")
"""What shows the same data. Its memory is not lengthened."""
_AVERAGED = ("place", "units", "neighbours", *_ROWS, "excess", "ranks", "changed", *_SAME_DATA)


# Compared within one window.


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


N_SCORES = 4
"""Length of `order_scores`."""


def scores_of_examples(near: float, opposite: float, half: float, n: float) -> Numbers:
    """What was compared of a window's examples, in standard errors.

    Args:
        near: sum of the standard scores of neighbours, against rows two apart, which are as alike where rows lie in
            some order of their contents.
        opposite: of the first row and the last one, the second and the last but one, and so on.
        half: of rows that are half a batch apart.
        n: pieces that are added up.
    """
    if not n:
        return {}
    of_places = {"opposite": opposite, "half": half, "next": near}
    return {name: standard_score(total, n, round(n)) for name, total in of_places.items()}


def order_scores(gradients: Tensor) -> Tensor:
    """How much more alike than others a piece's examples in certain places are: what `scores_of_examples` takes; [4].

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


# Averaged and judged.


class Dependence(Stateful):
    """Averages over windows what speaks against independent data, and against trust in the averages.

    Args:
        memory: of the averages, in measured windows.
    """

    STATE = ("_of", "_why_changed", "_in_doubt", "_pair")

    def __init__(self, memory: float) -> None:
        longer = max(memory, _MEMORY)
        self._of = {name: RatioAverage(memory if name in _SAME_DATA else longer) for name in _AVERAGED}
        self._why_changed = self._pair = ""
        self._in_doubt: list[list[int]] = []
        """The changed parameters of each changed window, none of which has been seen sound since."""
        self._same: frozenset[tuple[int, int]] = frozenset()
        """The ranks that had the same gradient in the last window."""

    def add(self, numbers: Numbers) -> None:
        """Take numbers of a window, but those that are not finite."""
        for name, (x, y) in numbers.items():
            if math.isfinite(x) and math.isfinite(y):
                self._of[name].update(x, y)

    def see_change(self, why: str | None, changed: Set[int] = frozenset(), *, sound: Set[int] = frozenset()) -> None:
        """Take a window whose gradient was compared with its pieces.

        Each window compares few elements of few parameters. So there is doubt until one that was changed is seen sound:
        then the change was an accident, also to others, whose turn comes later. And there is doubt while several of the
        last windows were changed: others likely were too, unseen.

        Args:
            why: how it was changed; None if it was only scaled.
            changed: the parameters that were, by index.
            sound: the others that were compared.
        """
        self._in_doubt = [each for each in self._in_doubt if sound.isdisjoint(each)]
        if changed and self._of["changed"].windows:  # in the first window, gradients may be from before attach
            self._in_doubt = [each for each in self._in_doubt if changed.isdisjoint(each)] + [sorted(changed)]
        self._why_changed = self._why_changed if why is None else why
        self._of["changed"].update(float(why is not None))

    def see_ranks(self, same: frozenset[tuple[int, int]]) -> None:
        """Take the pairs of ranks that had the same gradient in a window.

        Among many ranks some two may be the same by chance, but not the same two in two windows.
        """
        lasting, self._same = sorted(same & self._same), same
        if lasting:
            self._pair = f"{lasting[0][0]} and {lasting[0][1]}"
        self._of["ranks"].update(float(bool(lasting)))

    @property
    def consistency(self) -> float | None:
        """tr Σ within ranks over tr Σ between ranks; infinite where ranks do not differ; None if not measurable."""
        ranks = self._of["consistency"]
        if not ranks.windows:
            return None
        # Ranks with the same data differ by rounding only.
        return ranks.x / ranks.y if ranks.y > _SAME * ranks.x else math.inf

    def doubts(self) -> dict[str, str]:
        """Reasons not to trust the averages, however narrow their interval: messages by name."""
        found = {
            "changed": self._changed(),
            "dependent_pieces": self._dependent_pieces(),
            "dependent_examples": self._dependent_examples(),
            "same_data": self._same_data() or self._same_ranks(),
        }
        return {name: message for name, message in found.items() if message}

    def _is_often(self, name: str, fewest: float, share: float) -> bool:
        """Whether something was seen in so many windows, weighted by age, and in such a share of them."""
        seen = self._of[name]
        return seen.x * seen.weight > fewest and seen.x > share

    def _changed(self) -> str | None:
        if not self._is_often("changed", _ACCIDENTS, _SHARE_OF_ACCIDENTS):
            seen = f"{self._why_changed}; no unchanged gradient of these parameters has been seen since"
            return seen if self._in_doubt else None
        n = self._of["changed"].x * self._of["changed"].weight
        return f"{self._why_changed}; {n:.0f} of the last windows were changed, and others may have been changed unseen"

    def _same_ranks(self) -> str | None:
        if not self._is_often("ranks", _FEWEST_REPEATS, _LEAST_SHARE):
            return None
        return (
            f"two ranks ({self._pair}) had the same gradient in {100 * self._of['ranks'].x:.0f} % of the windows: do "
            "they get the same data? Check that the sampler knows the rank"
        )

    def _lean(self, name: str) -> int:
        """The sign of a score; 0 where chance explains it."""
        score = self._of[name]
        is_chance = score.windows < _AFTER or abs(score.standard_errors) < _STANDARD_ERRORS
        if is_chance or abs(score.x) < _LEAST_SCORE * score.y:
            return 0
        return 1 if score.x > 0 else -1

    def _dependent_pieces(self) -> str | None:
        return next((message for (name, sign), message in _PIECES.items() if self._lean(name) == sign), None)

    def _dependent_examples(self) -> str | None:
        found = [f"{rows} are more alike than chance allows" for name, rows in _ROWS.items() if self._lean(name) > 0]
        # Sorted rows, by length for one, may be independent. Their neighbours are alike, and distant rows differ the
        # more: together, scores are positive only where rows share samples.
        near, opposite, half = (self._of[name].standard_errors for name in ("next", "opposite", "half"))
        if (near + 2 * opposite + half) / math.sqrt(6) < _SURE:
            found = []
        excess = self._of["excess"]
        is_certain = excess.x > max(_LEAST_EXCESS, _STANDARD_ERRORS * excess.error_of_x)
        if excess.windows >= _BEFORE_EXCESS and is_certain and excess.x < 1:
            times = (1 + excess.x) / (1 - excess.x)
            found.insert(0, f"pieces have {times:.2g} times the noise that single examples say")
        if not found:
            return None
        return (
            f"the examples of a batch are not independent: {found[0]}. If rows share samples, as after mixup, cutmix "
            "or repeated augmentation, read no single examples: accumulate gradients over 2 or more micro-batches that "
            "share none, or train on 2 or more ranks, with per_example='auto'. If batches come in a fixed order of "
            "classes, do the same, or draw their rows at random"
        )

    def _same_data(self) -> str | None:
        """The same data on all ranks give an infinite consistency, and those in all micro-batches of a rank give 0."""
        pieces, consistency = self._of["differences"], self.consistency
        if pieces.windows < _AFTER:
            return None
        if pieces.y > 0 and not pieces.x > _SAME * pieces.y:
            return (
                "all pieces have the same gradient: do all ranks and all micro-batches get the same data? "
                "Check the sampler's rank, its seed and set_epoch"
            )
        if consistency is None:
            return None
        # From the scatter of the windows: one window with a loss spike may dominate it.
        interval = self._of["consistency"].interval(_CERTAINTY)
        if math.isinf(consistency) or (interval.low is not None and interval.low > _FACTOR):
            how = f"{consistency:.3g}× less between ranks than within ranks"
            if math.isinf(consistency):
                how = "within ranks, and not at all between them"
            return f"gradients differ {how}: do all ranks get the same data? Check that the sampler knows the rank"
        if interval.high is not None and interval.high < 1 / _FACTOR:
            return (
                f"gradients differ {1 / max(consistency, 1e-12):.3g}× more between ranks than within ranks: do several "
                "micro-batches of a rank get the same data, or do ranks see different kinds of data?"
            )
        return None
