"""What a policy's responses say of its entropy, by themselves: averages, and how entropy goes with reward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.policy.stats.entropy_gradient import Responses, covariance
from sonde.stats.intervals import student_t_quantile


@dataclass(frozen=True)
class Correlation:
    """Pearson's r over responses, with an interval that knows that those to one prompt go together.

    Attributes:
        r: NaN where unknown.
        low: lower end.
        high: upper end.
        reason: why it is unknown; empty when it is known.
    """

    r: float
    low: float
    high: float
    reason: str = ""


@dataclass(frozen=True)
class PolicyEntropy:
    """Entropy and lengths of what was sampled.

    Attributes:
        token_weighted: mean entropy over all tokens, in nats: long responses weigh more.
        sequence_weighted: mean over responses of each one's mean over its tokens, in nats.
        sequence_sum: mean over responses of the sum over their tokens, in nats a response.
        surprise: mean over responses of −Σ s: the same in expectation, noisier.
        advantage_correlation: of a response's mean entropy with its advantage; None without advantages.
        log_prob_advantage: Cov(log π, A) over tokens, in nats × the advantage's unit; NaN without advantages.
        mean_length: tokens in a response.
        sd_length: their standard deviation over responses.
        longest: tokens in the longest.
        at_limit: share of the responses as long as the mask is wide, which perhaps did not end by themselves.
        n_prompts: how many there were.
        n_responses: likewise.
        n_tokens: likewise.
    """

    token_weighted: float
    sequence_weighted: float
    sequence_sum: float
    surprise: float
    advantage_correlation: Correlation | None
    log_prob_advantage: float
    mean_length: float
    sd_length: float
    longest: int
    at_limit: float
    n_prompts: int
    n_responses: int
    n_tokens: int


def policy_entropy(
    log_prob: Tensor, entropy: Tensor, responses: Responses, advantage: Tensor | None = None, *, level: float = 0.95
) -> PolicyEntropy:
    """Summarise what was sampled.

    Args:
        log_prob: s_k in nats, [responses, tokens].
        entropy: H_k in nats, likewise.
        responses: which tokens count.
        advantage: [responses] or [responses, tokens]; the mean over its tokens stands for a response's.
        level: confidence level.
    """
    s, h, length = responses.tokens("log_prob", log_prob), responses.tokens("entropy", entropy), responses.length
    mean_entropy = h.sum(1) / length
    correlation, going_together = None, math.nan
    if advantage is not None:
        of_tokens = advantage[:, None].expand_as(responses.mask) if advantage.dim() == 1 else advantage
        of_response = responses.tokens("advantage", of_tokens).sum(1) / length
        correlation = correlate(mean_entropy, of_response, responses.index, level=level)
        going_together = covariance(log_prob, of_tokens, responses)
    return PolicyEntropy(
        token_weighted=float(h.sum() / length.sum()),
        sequence_weighted=float(mean_entropy.mean()),
        sequence_sum=float(h.sum(1).mean()),
        surprise=float(-s.sum(1).mean()),
        advantage_correlation=correlation,
        log_prob_advantage=going_together,
        mean_length=float(length.mean()),
        sd_length=float(length.std()) if len(length) > 1 else math.nan,
        longest=int(length.max()),
        at_limit=float((length == responses.mask.shape[1]).double().mean()),
        n_prompts=responses.n_prompts,
        n_responses=len(length),
        n_tokens=int(length.sum()),
    )


def correlate(x: Tensor, y: Tensor, cluster: Tensor, *, level: float = 0.95) -> Correlation:
    """Pearson's r, with an interval by Fisher's transform and the scatter of whole clusters.

    Args:
        x: [samples].
        y: [samples].
        cluster: which samples go together, from 0 up, [samples].
        level: confidence level.

    Returns:
        r and its interval; NaN with a reason for fewer than 3 clusters, or where one of the two does not vary.
    """
    x, y = x.double(), y.double()
    n, n_clusters = len(x), int(cluster.max()) + 1
    nan = math.nan
    if n_clusters < 3:
        return Correlation(nan, nan, nan, f"a correlation needs at least 3 prompts, got {n_clusters}")
    if not (float(x.std()) and float(y.std())):
        which = "entropy" if not float(x.std()) else "advantage"
        return Correlation(nan, nan, nan, f"every response has the same {which}")
    u, v = ((t - t.mean()) / t.std(correction=0) for t in (x, y))
    r = min(max(float((u * v).mean()), -1.0), 1.0)
    # Each sample's influence on r, summed by cluster: what one prompt's responses have in common counts once.
    influence = u * v - 0.5 * r * (u.square() + v.square())
    of_clusters = torch.zeros(n_clusters, dtype=torch.float64).index_add_(0, cluster, influence)
    se = float(of_clusters.square().sum().sqrt()) / n * math.sqrt(n_clusters / (n_clusters - 1))
    if 1.0 - r * r < 1e-12:
        return Correlation(r, r, r)
    half = student_t_quantile(0.5 + level / 2, n_clusters - 1) * se / (1.0 - r * r)
    return Correlation(r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half))
