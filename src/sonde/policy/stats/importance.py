"""The change of entropy that an update has made: from responses sampled before it, or from fresh responses."""

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
"""Largest weight with "clip", as a multiple of the mean weight."""
LEAST_ESS_FRACTION = 0.5
"""Smallest effective sample size over the number of responses. Below it, they do not represent the responses of θ⁺."""


@dataclass(frozen=True)
class MeasuredChange:
    """A change of entropy, measured.

    Attributes:
        delta: the change in nats, a token or a response.
        se: its standard error, from the scatter of the prompts; None with fewer than 2 prompts.
        ess: effective sample size in responses, (Σω)²/Σω²; the number of responses if all weights are equal.
        ess_fraction: `ess` over the number of responses.
    """

    delta: float
    se: float | None
    ess: float
    ess_fraction: float

    @property
    def is_known(self) -> bool:
        """Whether enough responses count. If few of them carry the weight, `delta` is theirs, and `se` is too small."""
        return self.ess_fraction >= LEAST_ESS_FRACTION

    def __str__(self) -> str:
        if not self.is_known:
            return f"not known (effective sample size {self.ess_fraction:.2g} of the responses)"
        return f"{self.delta:+.2e} ± " + ("unknown" if self.se is None else f"{self.se:.1e}")


def importance_weights(log_ratio: Tensor, weighting: Weighting) -> Tensor:
    """ω_i ∝ exp(log_ratio_i), with a mean of 1; [responses], fp64.

    Args:
        log_ratio: S_i(θ⁺) − S_i(θ), where S_i is the log-probability of a whole response, in nats; [responses].
        weighting: "snis" keeps the weights as they are. "clip" cuts them at 10 times their mean and normalises again:
            less variance, some bias.

    Raises:
        ValueError: if a log-ratio is not finite.
    """
    log_ratio = log_ratio.double()
    if not bool(log_ratio.isfinite().all()):
        raise ValueError("log-probabilities must be finite before and after the update")
    weights = torch.exp(log_ratio - log_ratio.max())  # the shift prevents overflow, however large the update
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
    """The entropy at θ⁺ minus the entropy at θ, both from the responses that θ sampled.

    Importance weights make the responses of θ represent those of θ⁺.

    Args:
        entropy: at θ in nats: H_k, or −w_k s_k for the entropy of sequences; [responses, tokens].
        entropy_after: at θ⁺, on the same prefixes.
        log_prob: s_k at θ, of the sampled tokens.
        log_prob_after: s_k at θ⁺.
        responses: which tokens count.
        weighting: as for `importance_weights`.
        per: "token" for R, or "response".
    """
    before, after = responses.tokens("log_prob", log_prob), responses.tokens("log_prob_after", log_prob_after)
    weights = importance_weights((after - before).sum(1), weighting)
    influence, rate = _ratio(responses, entropy, torch.ones_like(weights), per)
    influence_after, rate_after = _ratio(responses, entropy_after, weights, per)
    ess = float(weights.sum().square() / weights.square().sum())
    # One set of responses serves both rates: their common scatter cancels in the difference of the influences.
    return MeasuredChange(rate_after - rate, _standard_error(influence_after - influence), ess, ess / len(weights))


def resampled_change(
    entropy: Tensor, responses: Responses, entropy_after: Tensor, responses_after: Responses, *, per: Per = "token"
) -> MeasuredChange:
    """The entropy of the responses sampled by θ⁺ minus that of the responses sampled by θ, to the same prompts.

    If both are sampled with the same random numbers, most of their scatter is common. The standard error is that of the
    prompts' differences, and small.

    Args:
        entropy: at θ in nats: H_k, or −w_k s_k for the entropy of sequences; [responses, tokens].
        responses: the responses that θ sampled.
        entropy_after: at θ⁺.
        responses_after: the responses that θ⁺ sampled.
        per: "token" for R, or "response".

    Raises:
        ValueError: if the two sets of responses do not answer the same prompts.
    """
    if not torch.equal(responses.prompts, responses_after.prompts):
        raise ValueError(
            "both policies must answer the same prompts, so that they can be compared prompt by prompt: "
            "let the sampler take the same prompts in each call"
        )
    influence, rate = _ratio(responses, entropy, torch.ones_like(responses.length), per)
    influence_after, rate_after = _ratio(responses_after, entropy_after, torch.ones_like(responses_after.length), per)
    n = float(len(responses.length))
    return MeasuredChange(rate_after - rate, _standard_error(influence_after - influence), n, 1.0)


def fixed_prefix_change(entropy: Tensor, entropy_after: Tensor, responses: Responses) -> float:
    """The change of R on the same prefixes, as if the update changed no sampled token; in nats a token.

    To first order it equals the `sharpening` of an `EntropyChange`. The difference between the two shows how far the
    step is from linear.
    """
    return entropy_rate(entropy_after, responses)[0] - entropy_rate(entropy, responses)[0]


def _ratio(responses: Responses, entropy: Tensor, weights: Tensor, per: Per) -> tuple[Tensor, float]:
    """Each prompt's influence on Σω h/Σω t, [prompts], and the ratio itself. t is the length, or 1 per response."""
    h = responses.tokens("entropy", entropy).sum(1)
    t = responses.length if per == "token" else torch.ones_like(responses.length)
    weighted_h, weighted_t = responses.per_prompt(weights * h), responses.per_prompt(weights * t)
    rate = float(weighted_h.mean() / weighted_t.mean())
    return (weighted_h - rate * weighted_t) / weighted_t.mean(), rate


def _standard_error(influence: Tensor) -> float | None:
    n = len(influence)
    return math.sqrt(float((influence - influence.mean()).square().sum()) / (n * (n - 1))) if n > 1 else None
