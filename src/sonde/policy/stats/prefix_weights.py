"""Weights that make the responses of one policy represent those of another, position by position.

A token counts under another policy as often as its *prefix* is more likely there: by the likelihood ratio of the
response's own tokens before it. Tokens that nobody sampled, such as a tool's answer, have no part in the ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.policy.stats.entropy_gradient import Responses
from sonde.policy.stats.forecast_point import LEAST_MEAN_SUPPORT, LEAST_SUPPORT, MOST_UNSUPPORTED


@dataclass(frozen=True)
class Support:
    """How well the responses of one policy represent those of another.

    The effective sample size of a position is (Σρ)²/Σρ² over the responses that reach it. It falls with each position,
    since prefixes grow. So a long response may be represented well up to some position.

    Attributes:
        ess_fraction: effective sample size over the number of responses, a mean over positions. Each weighs as much as
            it carries of the entropy after the update.
        unsupported: the part of the entropy that positions with less than 0.2 carry; from 0 to 1.
        from_position: the first of these positions in the response, from 0; None if there is none.
    """

    ess_fraction: float
    unsupported: float
    from_position: int | None

    @property
    def is_enough(self) -> bool:
        """Whether support is enough on average, and positions with support carry at least half of the entropy."""
        return self.unsupported <= MOST_UNSUPPORTED and self.ess_fraction >= LEAST_MEAN_SUPPORT


def prefix_log_ratio(log_prob: Tensor, reference: Tensor, responses: Responses) -> Tensor:
    """log of the weights of the first 0, 1, … tokens of each response, Σ_{j<k} (s_j − r_j); [responses, tokens + 1].

    Column k is that of token k, and the last column is that of the whole response.

    Args:
        log_prob: s_k of the policy to represent, in nats, [responses, tokens].
        reference: r_k of the policy that the responses represent so far.
        responses: which tokens count.
    """
    ratio = responses.tokens("log_prob", log_prob) - responses.tokens("reference", reference)
    return torch.nn.functional.pad(ratio.cumsum(1), (1, 0))


def prefix_weights(log_prob: Tensor, reference: Tensor, responses: Responses, clip_at: float | None = None) -> Tensor:
    """These weights up to a common factor; clipped as by `weights_from`."""
    return weights_from(prefix_log_ratio(log_prob, reference, responses), responses, clip_at)


def weights_from(
    log_ratio: Tensor, responses: Responses, clip_at: float | None = None, *, by_column: bool = False
) -> Tensor:
    """exp(log_ratio) up to a common factor, fp64; the shape of `log_ratio`.

    Args:
        log_ratio: [responses, columns].
        responses: whose weights these are.
        clip_at: largest weight of each column, as a multiple of their mean; then they get their former mean again: less
            variance, some bias. None keeps the weights as they are, self-normalised.
        by_column: whether each column has a factor of its own.
    """
    largest = log_ratio.amax(0) if by_column else log_ratio.max()
    weights = torch.exp(log_ratio - largest)  # the shift prevents overflow, however large the update
    if clip_at is not None:
        share = responses.share[:, None] / responses.n_prompts
        mean = (share * weights).sum(0)
        cut = torch.minimum(weights, clip_at * mean)
        weights = cut * (mean / (share * cut).sum(0))
    return weights


def support(weights: Tensor, entropy: Tensor, responses: Responses) -> Support:
    """How well weighted responses represent a policy.

    Args:
        weights: ρ_<k of each token, up to a common factor, [responses, tokens].
        entropy: the terms whose sum is the entropy, [responses, tokens].
        responses: which tokens count.
    """
    # By the position in the response, which gaps for a tool's answer do not move.
    position = responses.mask.long().cumsum(1)[responses.mask] - 1
    own = weights[responses.mask].double()

    def by_position(values: Tensor) -> Tensor:
        total = torch.zeros(responses.mask.shape[1], dtype=torch.float64)
        return total.index_add_(0, position, values)

    n, total, squares = by_position(torch.ones_like(own)), by_position(own), by_position(own.square())
    reached = squares > 0
    fraction = total[reached].square() / squares[reached] / n[reached]
    share = responses.share[:, None].expand_as(responses.mask)[responses.mask]
    carried = by_position(share * own * responses.tokens("entropy", entropy)[responses.mask].abs())[reached]
    # A policy that is certain of all tokens has no entropy: then positions weigh as their tokens do.
    carried = carried if float(carried.sum()) else by_position(share * own)[reached]
    carried = carried / carried.sum()
    lacks = fraction < LEAST_SUPPORT
    positions = reached.nonzero()[:, 0][lacks]
    return Support(
        float((carried * fraction).sum()),
        float(carried[lacks].sum()),
        int(positions[0]) if len(positions) else None,
    )
