"""What the entropy is after an update, from responses that were sampled before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sonde.policy.stats.entropy_gradient import Responses, entropy_rate

Weighting = Literal["snis", "clip"]
Per = Literal["token", "response"]
CLIPPED_AT = 10.0
"""Times the mean weight, with "clip"."""


@dataclass(frozen=True)
class MeasuredChange:
    """A change of entropy, measured.

    Attributes:
        delta: in nats, a token or a response.
        se: its standard error, by the scatter of the prompts; NaN with fewer than 2.
        ess: effective sample size, in responses: (Σω)²/Σω²; how many there are, where nothing is weighed.
        ess_fraction: of the responses there are.
    """

    delta: float
    se: float
    ess: float
    ess_fraction: float


def importance_weights(log_ratio: Tensor, weighting: Weighting) -> Tensor:
    """ω_i ∝ exp(log_ratio_i), with a mean of 1; [responses], fp64.

    Args:
        log_ratio: S_i(θ⁺) − S_i(θ), the log-probabilities of whole responses, in nats; [responses].
        weighting: "snis" as they are, "clip" cut at 10 times their mean and normalised again: less variance, some bias.

    Raises:
        ValueError: when one is not finite.
    """
    log_ratio = log_ratio.double()
    if not bool(log_ratio.isfinite().all()):
        raise ValueError("log-probabilities must be finite before and after the update")
    weights = torch.exp(log_ratio - log_ratio.max())  # no overflow, however large the update
    weights = weights / weights.mean()
    if weighting == "clip":
        weights = weights.clamp(max=CLIPPED_AT)
        weights = weights / weights.mean()
    return weights


def importance_sampled_change(
    entropy: Tensor,
    entropy_after: Tensor,
    log_prob: Tensor,
    log_prob_after: Tensor,
    responses: Responses,
    *,
    weighting: Weighting = "snis",
    per: Per = "token",
) -> MeasuredChange:
    """The entropy at θ⁺ less that at θ, the responses of θ standing for those of θ⁺ by their weights.

    Args:
        entropy: of θ in nats, H_k, or −w_k s_k for that of sequences; [responses, tokens].
        entropy_after: of θ⁺, on the same prefixes.
        log_prob: s_k of θ, of the tokens sampled.
        log_prob_after: of θ⁺.
        responses: which tokens count.
        weighting: as for `importance_weights`.
        per: a token, for R; or a response.
    """
    before, after = responses.tokens("log_prob", log_prob), responses.tokens("log_prob_after", log_prob_after)
    weights = importance_weights((after - before).sum(1), weighting)
    influence, rate = _ratio(responses, entropy, torch.ones_like(weights), per)
    influence_after, rate_after = _ratio(responses, entropy_after, weights, per)
    ess = float(weights.sum().square() / weights.square().sum())
    return MeasuredChange(rate_after - rate, _standard_error(influence_after - influence), ess, ess / len(weights))


def resampled_change(
    entropy: Tensor, responses: Responses, entropy_after: Tensor, responses_after: Responses, *, per: Per = "token"
) -> MeasuredChange:
    """The entropy of what θ⁺ samples less that of what θ samples, to the same prompts.

    Sampling both with the same random numbers makes most of the scatter the same, and the standard error, which is that
    of the prompts' differences, small.

    Args:
        entropy: of θ in nats, H_k, or −w_k s_k for that of sequences; [responses, tokens].
        responses: what θ sampled.
        entropy_after: of θ⁺.
        responses_after: what it sampled.
        per: a token, for R; or a response.

    Raises:
        ValueError: when they do not answer the same prompts.
    """
    if not torch.equal(responses.prompts, responses_after.prompts):
        raise ValueError("both policies must answer the same prompts, to be compared prompt by prompt")
    influence, rate = _ratio(responses, entropy, torch.ones_like(responses.length), per)
    influence_after, rate_after = _ratio(responses_after, entropy_after, torch.ones_like(responses_after.length), per)
    n = float(len(responses.length))
    return MeasuredChange(rate_after - rate, _standard_error(influence_after - influence), n, 1.0)


def fixed_prefix_change(entropy: Tensor, entropy_after: Tensor, responses: Responses) -> float:
    """By how much R would change if the update changed no token that is sampled, in nats a token.

    To first order it is the `sharpening` of an `EntropyChange`: how far the two are apart tells how linear the step is.
    """
    return entropy_rate(entropy_after, responses)[0] - entropy_rate(entropy, responses)[0]


def _ratio(responses: Responses, entropy: Tensor, weights: Tensor, per: Per) -> tuple[Tensor, float]:
    """Each prompt's influence on Σω h/Σω t, and that; [prompts]. t is the length, or 1."""
    h = responses.tokens("entropy", entropy).sum(1)
    t = responses.length if per == "token" else torch.ones_like(responses.length)
    of_h, of_t = responses.per_prompt(weights * h), responses.per_prompt(weights * t)
    rate = float(of_h.mean() / of_t.mean())
    return (of_h - rate * of_t) / of_t.mean(), rate


def _standard_error(influence: Tensor) -> float:
    n = len(influence)
    return math.sqrt(float((influence - influence.mean()).square().sum()) / (n * (n - 1))) if n > 1 else math.nan
