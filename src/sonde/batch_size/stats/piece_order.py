"""Are the pieces of a window of one kind? Then none of two equal ones has the larger gradient more often.

Two kinds of data or of loss, each with a backward of its own, have gradients of their own size: the first piece of each
window has the larger one nearly always, or the smaller. (More pieces that take turns are less alike as neighbours:
`neighbours.py`.) And of unequal pieces, the larger averages more noise away, so its gradient, over its weight, is not
the larger one, unless losses are sums, and their weights were not passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sonde.batch_size.stats.neighbours import NeighbourSums, NeighbourWatch

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


class OrderWatch:
    """Averages over windows, and judges whether pieces are of one kind.

    Args:
        decay: factor by which a window's weight shrinks with each later window.
    """

    def __init__(self, decay: float) -> None:
        self._watches = {"place": NeighbourWatch(decay), "units": NeighbourWatch(decay)}

    def update(self, window: OrderSums) -> None:
        """Take one window."""
        # If either piece is as likely to have the larger gradient, a rank's sign has the mean 0 and the variance 1.
        place, units = window.n_by_place, window.n_by_units
        self._watches["place"].update(NeighbourSums(window.by_place, place, place))
        self._watches["units"].update(NeighbourSums(window.by_units, units, units))

    def doubt(self) -> str | None:
        """Why pieces are no samples of one kind; None when nothing looks wrong."""
        if lean := self._watches["place"].lean:
            size = "larger" if lean > 0 else "smaller"
            return (
                f"the first of a window's two pieces has the {size} gradient nearly always, so they are of two kinds, "
                "or the same in every window. If each is another kind of data or of loss, put both backwards into one "
                "'with probe.piece():'"
            )
        if self._watches["units"].lean > 0:
            return (
                "pieces with more units have the larger gradient nearly always, as if their losses were sums. Then "
                "pass each one's units as weight= to 'probe.piece()', or make each loss a mean"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs."""
        return {name: watch.state_dict() for name, watch in self._watches.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, watch in self._watches.items():
            watch.load_state_dict(state[name])
