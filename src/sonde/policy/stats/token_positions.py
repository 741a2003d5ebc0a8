"""The entropies of tokens by their position in the response: quantiles, in ranges of positions that double in width."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # a report needs `AtPositions` where torch is not installed
    from torch import Tensor

    from sonde.policy.stats.entropy_gradient import Responses


class AtPositions(NamedTuple):
    """The entropies of the tokens at some positions, in nats.

    Attributes:
        first: the first of these positions, from 1. Gaps in a response, as for a tool's answer, do not count.
        last: the last of them.
        n_tokens: number of tokens there.
        q10: 10 % of these tokens have less entropy.
        q50: half of them have less.
        q90: 90 % of them have less.
    """

    first: int
    last: int
    n_tokens: int
    q10: float
    q50: float
    q90: float


def entropy_by_position(entropy: Tensor, responses: Responses) -> tuple[AtPositions, ...]:
    """Positions 1, 2 to 3, 4 to 7, 8 to 15, … as far as there are tokens: the same ranges at every step.

    Args:
        entropy: H_k in nats, [responses, tokens].
        responses: which tokens count. Each weighs the same.

    Example:
        >>> import torch
        >>> from sonde.policy.stats.entropy_gradient import Responses
        >>> two = Responses(torch.tensor([[1, 1, 1], [1, 0, 0]]), torch.tensor([0, 1]))
        >>> found = entropy_by_position(torch.tensor([[0.5, 0.2, 0.1], [0.7, 0.0, 0.0]]), two)
        >>> [(at.first, at.last, at.n_tokens, round(at.q50, 3)) for at in found]
        [(1, 1, 2, 0.6), (2, 3, 2, 0.15)]
    """
    h = responses.tokens("entropy", entropy)[responses.mask]
    place = responses.mask.long().cumsum(1)[responses.mask]
    rows, first = [], 1
    while first <= int(place.max()):
        last = 2 * first - 1
        # Sorted, and not by torch.quantile, which refuses more than 2²⁴ values.
        here = h[(place >= first) & (place <= last)].sort().values
        rows.append(AtPositions(first, last, len(here), *(_quantile(here, q) for q in (0.1, 0.5, 0.9))))
        first = last + 1
    return tuple(rows)


def _quantile(rising: Tensor, q: float) -> float:
    """By the line between the two nearest values, as torch and numpy do."""
    place = q * (len(rising) - 1)
    low = int(place)
    high = min(low + 1, len(rising) - 1)
    return float(rising[low] + (place - low) * (rising[high] - rising[low]))
