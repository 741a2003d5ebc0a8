"""Whether a policy is almost uniform, where the entropy has no slope and first order says nothing."""

from __future__ import annotations

from torch import Tensor

from sonde.policy.stats.entropy_gradient import Responses

_NEAR_UNIFORM = 0.1
"""Scatter of the surprise over the entropy. Below it, the entropy is within 5 % of the logarithm of the vocabulary, for
a vocabulary of 10 to 10⁵ tokens."""


def surprise_sd(log_prob: Tensor, entropy: Tensor, responses: Responses) -> float:
    """Root mean square of −s_k − H_k over tokens, in nats: how far a token's surprise is from the entropy.

    It is 0 if the policy is uniform over the tokens that it may sample: then all of them have the log-probability −H.
    To first order, a change of logits by δ changes the entropy by −Cov(δ, log p), which is then 0 for every δ.

    Args:
        log_prob: s_k in nats, [responses, tokens].
        entropy: H_k in nats, [responses, tokens].
        responses: which tokens count.
    """
    s, h = responses.tokens("log_prob", log_prob), responses.tokens("entropy", entropy)
    return float(((s + h).square().sum() / responses.length.sum()).sqrt())


def is_near_uniform(entropy: float | None, scatter: float | None) -> bool:
    """Whether the policy is almost uniform; False if a number is unknown.

    Args:
        entropy: in nats a token.
        scatter: `surprise_sd`, in nats. A policy that is certain of each token has a small scatter too, and no entropy.
    """
    return entropy is not None and scatter is not None and scatter < _NEAR_UNIFORM * entropy
