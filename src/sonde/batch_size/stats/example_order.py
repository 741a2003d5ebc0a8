"""Are the examples of a batch independent? Rows that share samples are not, nor are those in a fixed order of classes.

Independent rows could come in any order, whatever the weights, the loss and the learning rate. So rows in certain
places of the batch must not be more alike than others: neighbours, opposite rows, and rows half a batch apart, which is
where the usual functions put two rows that share a sample. Rows that share samples in places drawn anew for each batch
are not seen here, but where a window has several pieces: these then differ more than single examples say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sonde.batch_size.stats.neighbours import Numbers, standard_score

_FEWEST_EXAMPLES = 8
"""Fewest examples of a piece that are compared."""
_LEAST_DIFFERENCE = 1e-10
"""Mean square of the examples' differences over that of their gradients. Below it, differences are rounding."""


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
