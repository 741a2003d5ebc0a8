"""The entropy of a policy's responses: averages, and how entropy varies with reward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.policy.stats.entropy_gradient import Responses, WeightedSums, covariance, standard_error, surprise_sd
from sonde.policy.stats.token_positions import AtPositions, entropy_by_position
from sonde.stats.intervals import LEVEL, student_t_quantile

QUANTILES = (5, 25, 50, 75, 95)
"""Per cent of responses below a quantile."""


@dataclass(frozen=True)
class Correlation:
    """Pearson's r over responses. Its interval allows for responses to one prompt being alike.

    Attributes:
        r: the correlation; None if unknown.
        low: lower end of its interval; None if unknown.
        high: upper end; None if unknown.
        reason: why the correlation is unknown; empty if it is known.
    """

    r: float | None
    low: float | None
    high: float | None
    reason: str = ""


@dataclass(frozen=True)
class PolicyEntropy:
    """Entropy and lengths of the sampled responses.

    Attributes:
        token_weighted: mean entropy over all tokens, in nats. Long responses weigh more.
        token_weighted_se: its standard error over prompts; None with fewer than 2.
        surprise_sd: scatter of −s_k around H_k, in nats; almost 0 for a uniform policy.
        sequence_weighted: mean over responses of each response's mean over its tokens, in nats.
        response_sd: standard deviation, over responses, of a response's mean over its tokens, in nats; None for one
            response.
        response_quantiles: quantiles of the same over responses, in nats, by their percentages in `QUANTILES`.
        sequence_sum: mean over responses of the sum over their tokens, in nats a response.
        advantage_correlation: correlation of a response's mean entropy with its advantage; None without advantages.
        log_prob_advantage: Cov(log π, A) over tokens, in nats × the unit of the advantage; None without advantages.
        mean_length: mean number of tokens in a response.
        sd_length: standard deviation of the number of tokens over responses; None for one response.
        longest: number of tokens in the longest response.
        at_limit: share of the responses that are as long as the mask is wide: they may have been cut off.
        n_prompts: number of prompts.
        n_responses: number of responses.
        n_tokens: number of sampled tokens.
        by_position: quantiles of the tokens' entropies by their position in the response.
    """

    token_weighted: float
    token_weighted_se: float | None
    surprise_sd: float
    sequence_weighted: float
    response_sd: float | None
    response_quantiles: Mapping[int, float]
    sequence_sum: float
    advantage_correlation: Correlation | None
    log_prob_advantage: float | None
    mean_length: float
    sd_length: float | None
    longest: int
    at_limit: float
    n_prompts: int
    n_responses: int
    n_tokens: int
    by_position: tuple[AtPositions, ...]


def policy_entropy(
    log_prob: Tensor, entropy: Tensor, responses: Responses, advantage: Tensor | None = None
) -> PolicyEntropy:
    """Summarise the sampled responses.

    Args:
        log_prob: s_k in nats, [responses, tokens].
        entropy: H_k in nats, [responses, tokens].
        responses: which tokens count.
        advantage: [responses] or [responses, tokens]. A response's advantage is the mean over its tokens.
    """
    h, length = responses.tokens("entropy", entropy), responses.length
    mean_entropy = h.sum(1) / length
    correlation, log_prob_advantage = None, None
    if advantage is not None:
        per_token = advantage[:, None].expand_as(responses.mask) if advantage.dim() == 1 else advantage
        per_response = responses.tokens("advantage", per_token).sum(1) / length
        correlation = correlate(mean_entropy, per_response, responses.index)
        log_prob_advantage = covariance(log_prob, per_token, responses)
    # Of all responses to a prompt: per_prompt() takes means.
    of_prompts = (responses.per_prompt((each / responses.share)[:, None]) for each in (h.sum(1), length))
    sums = WeightedSums(*of_prompts)
    return PolicyEntropy(
        token_weighted=float(sums.ratios()),
        token_weighted_se=standard_error(sums.above(sums.ratios())),
        surprise_sd=surprise_sd(log_prob, entropy, responses),
        sequence_weighted=float(mean_entropy.mean()),
        response_sd=float(mean_entropy.std()) if len(length) > 1 else None,
        response_quantiles={q: float(mean_entropy.quantile(q / 100)) for q in QUANTILES},
        sequence_sum=float(h.sum(1).mean()),
        advantage_correlation=correlation,
        log_prob_advantage=log_prob_advantage,
        mean_length=float(length.mean()),
        sd_length=float(length.std()) if len(length) > 1 else None,
        longest=int(length.max()),
        at_limit=float((length == responses.mask.shape[1]).double().mean()),
        n_prompts=responses.n_prompts,
        n_responses=len(length),
        n_tokens=int(length.sum()),
        by_position=entropy_by_position(entropy, responses),
    )


def correlate(x: Tensor, y: Tensor, cluster: Tensor) -> Correlation:
    """Pearson's r, with an interval by Fisher's transform and the scatter of whole clusters.

    Args:
        x: [samples].
        y: [samples].
        cluster: each sample's cluster, numbered from 0; [samples].

    Returns:
        r and its interval. For fewer than 3 clusters, or if x or y does not vary, the numbers are None with a reason.
    """
    x, y = x.double(), y.double()
    n, n_clusters = len(x), int(cluster.max()) + 1
    if n_clusters < 3:
        return Correlation(None, None, None, f"a correlation needs at least 3 prompts, got {n_clusters}")
    if not (float(x.std()) and float(y.std())):
        constant = "entropy" if not float(x.std()) else "advantage"
        return Correlation(None, None, None, f"every response has the same {constant}")
    u, v = ((t - t.mean()) / t.std(correction=0) for t in (x, y))
    r = min(max(float((u * v).mean()), -1.0), 1.0)
    # Each sample's influence on r, summed by cluster: the common part of one prompt's responses counts once.
    influence = u * v - 0.5 * r * (u.square() + v.square())
    by_cluster = torch.zeros(n_clusters, dtype=torch.float64).index_add_(0, cluster, influence)
    se = float(by_cluster.square().sum().sqrt()) / n * math.sqrt(n_clusters / (n_clusters - 1))
    if 1.0 - r * r < 1e-12:
        return Correlation(r, r, r)
    # Fisher's z = atanh r has a nearly constant variance, and dz = dr/(1 − r²).
    half = student_t_quantile(0.5 + LEVEL / 2, n_clusters - 1) * se / (1.0 - r * r)
    return Correlation(r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half))
