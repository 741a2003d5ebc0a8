"""Are the pieces of a window of one kind? Then none of two equal ones has the larger gradient more often.

Two kinds of data or of loss, each with a backward of its own, have gradients of their own size: the first piece of each
window has the larger one nearly always, or the smaller. (More pieces that take turns are less alike as neighbours:
`neighbours.py`.) And of unequal pieces, the larger averages more noise away, so its gradient, over its weight, is not
the larger one, unless losses are sums, and their weights were not passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sonde.batch_size.stats.neighbours import Numbers, standard_score

_UNEQUAL = 1.25
"""Pieces with this many times the units are unequal."""


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
