"""What the entropy is after an update, from responses that were sampled before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sonde.stats.entropy import Responses, entropy_rate

Weighting = Literal["snis", "clip"]
CLIPPED_AT = 10.0
"""Times the mean weight, with "clip"."""


@dataclass(frozen=True)
class MeasuredChange:
    """A change of R, measured.

    Attributes:
        delta: in nats a token.
        se: its standard error, by the scatter of the prompts; NaN with fewer than 2.
        ess: effective sample size, in responses: (Σω)²/Σω².
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
) -> MeasuredChange:
    """R(θ⁺) − R(θ), the responses of θ standing for those of θ⁺ by their weights.

    Args:
        entropy: H_k of θ in nats, [responses, tokens].
        entropy_after: of θ⁺, on the same prefixes.
        log_prob: s_k of θ, of the tokens sampled.
        log_prob_after: of θ⁺.
        responses: which tokens count.
        weighting: as for `importance_weights`.
    """
    before, after = responses.tokens("log_prob", log_prob), responses.tokens("log_prob_after", log_prob_after)
    weights = importance_weights((after - before).sum(1), weighting)
    h = responses.tokens("entropy", entropy).sum(1)
    h_after = responses.tokens("entropy_after", entropy_after).sum(1)
    influence, rate = _ratio(responses, h, torch.ones_like(weights))
    influence_after, rate_after = _ratio(responses, h_after, weights)
    ess = float(weights.sum().square() / weights.square().sum())
    return MeasuredChange(rate_after - rate, _standard_error(influence_after - influence), ess, ess / len(weights))


def fixed_prefix_change(entropy: Tensor, entropy_after: Tensor, responses: Responses) -> float:
    """By how much R would change if the update changed no token that is sampled, in nats a token.

    To first order it is the `sharpening` of an `EntropyChange`: how far the two are apart tells how linear the step is.
    """
    return entropy_rate(entropy_after, responses)[0] - entropy_rate(entropy, responses)[0]


def _ratio(responses: Responses, h: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    """Each prompt's influence on Σω h/Σω t, and that; [prompts]."""
    of_h, of_t = responses.per_prompt(weights * h), responses.per_prompt(weights * responses.length)
    rate = float(of_h.mean() / of_t.mean())
    return (of_h - rate * of_t) / of_t.mean(), rate


def _standard_error(influence: Tensor) -> float:
    n = len(influence)
    return math.sqrt(float((influence - influence.mean()).square().sum()) / (n * (n - 1))) if n > 1 else math.nan
