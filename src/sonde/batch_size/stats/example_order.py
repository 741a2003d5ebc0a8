"""Are the examples of a batch independent? Rows that share samples are not, nor are those in a fixed order of classes.

Independent rows could come in any order, whatever the weights, the loss and the learning rate. So rows in certain
places of the batch must not be more alike than others: neighbours, opposite rows, and rows half a batch apart, which is
where the usual functions put two rows that share a sample. Rows that share samples in places drawn anew for each batch
are not seen here, but where a window has several pieces: these then differ more than single examples say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from sonde.batch_size.stats.neighbours import NeighbourSums, NeighbourWatch

_FEWEST_EXAMPLES = 8
"""Fewest examples of a piece that are compared."""
_LEAST_DIFFERENCE = 1e-10
"""Mean square of the examples' differences over that of their gradients. Below it, differences are rounding."""
_AFTER = 10
"""Windows before pieces are first held against examples."""
_STANDARD_ERRORS = 6.0
"""As for neighbouring pieces: beyond it, chance is no explanation."""
_LEAST_EXCESS = 0.05
"""Smallest (p − e)/(p + e) that matters, p and e being tr Σ from pieces and from examples: p is 1.1 times e."""
_MEMORY = 100.0
"""Windows that are remembered at least."""
_NOT_SORTED = "not_sorted"
_SURE = 3.0
"""Standard errors beyond which rows were not sorted."""


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

    @property
    def not_sorted(self) -> float:
        """Positive where rows share samples, but not where they were sorted, by length for one.

        Sorted rows may be independent. Their neighbours are alike, and distant rows differ the more.
        """
        return (self.next + 2 * self.opposite + self.half) / math.sqrt(6)


N_SCORES = len(fields(OrderScores))
"""Length of `order_scores`."""
_IN_WORDS = {
    "opposite": "the first row of a batch and the last one, the second and the last but one, and so on",
    "half": "rows half a batch apart",
    "next": "neighbouring rows of a batch",
}


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
    differs = rows.square().sum() > _LEAST_DIFFERENCE * size
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


class ExampleWatch:
    """Averages over windows what speaks against independent examples.

    Args:
        decay: factor by which a window's weight shrinks with each later window.
    """

    def __init__(self, decay: float) -> None:
        self._decay = max(decay, 1.0 - 1.0 / _MEMORY)
        self._orders = {name: NeighbourWatch(decay) for name in (*_IN_WORDS, _NOT_SORTED)}
        self._pieces = dict.fromkeys(("windows", "weight", "sq_weight", "sum", "squares"), 0.0)

    def update(self, order: OrderScores, excess: float | None) -> None:
        """Take one window.

        Args:
            order: of its examples.
            excess: (p − e)/(p + e), p and e being tr Σ from its pieces and from its examples; None without two pieces.
                It is at most 1 in size, so that no window outweighs the others.
        """
        if order.n and all(map(math.isfinite, astuple(order))):
            for name, watch in self._orders.items():
                watch.update(NeighbourSums(getattr(order, name), order.n, round(order.n)))
        if excess is None:
            return
        sums = self._pieces
        sums["windows"] += 1
        for name, value in (("weight", 1.0), ("sum", excess), ("squares", excess**2)):
            sums[name] = self._decay * sums[name] + value
        sums["sq_weight"] = self._decay**2 * sums["sq_weight"] + 1.0

    def doubt(self) -> str | None:
        """Why examples are not independent; None when nothing looks wrong."""
        likeness = "are more alike than chance allows"
        found = [f"{rows} {likeness}" for name, rows in _IN_WORDS.items() if self._orders[name].lean > 0]
        if self._orders[_NOT_SORTED].standard_errors < _SURE:
            found = []
        if (times := self._excess_of_pieces()) is not None:
            found.insert(0, f"pieces have {times:.2g} times the noise that single examples say")
        if not found:
            return None
        return (
            f"the examples of a batch are not independent: {found[0]}. If rows share samples, as after mixup, cutmix "
            "or repeated augmentation, read no single examples: accumulate gradients over 2 or more micro-batches that "
            "share none, or train on 2 or more ranks, with per_example='auto'. If batches come in a fixed order of "
            "classes, do the same, or draw their rows at random"
        )

    def _excess_of_pieces(self) -> float | None:
        """tr Σ from pieces over that from examples, where it is larger beyond chance."""
        sums = self._pieces
        if sums["windows"] < _AFTER or not sums["weight"]:
            return None
        mean = sums["sum"] / sums["weight"]
        variance = max(sums["squares"] / sums["weight"] - mean * mean, 0.0)
        error = math.sqrt(variance * sums["sq_weight"]) / sums["weight"]
        return (1 + mean) / (1 - mean) if mean > max(_LEAST_EXCESS, _STANDARD_ERRORS * error) and mean < 1 else None

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs."""
        return {"pieces": dict(self._pieces), **{name: watch.state_dict() for name, watch in self._orders.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, watch in self._orders.items():
            watch.load_state_dict(state[name])
        self._pieces = dict(state["pieces"])
