"""The change of entropy that an update has made: from whole responses sampled before it, or from fresh responses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.policy.stats.entropy_gradient import Responses, token_and_prefix_weights, weighted_sums
from sonde.policy.stats.forecast_point import Per
from sonde.policy.stats.prefix_weights import CLIPPED_AT, Weighting, weights_from
from sonde.policy.stats.ratios import WeightedSums, rate_change

LEAST_ESS_FRACTION = 0.5
"""Smallest effective sample size over the number of responses. Below it, they do not represent the responses of θ⁺."""
_UNSEEN_JUMPS = 1.0
"""Responses that count as different beside those that are: if none differs, one could have."""


@dataclass(frozen=True)
class MeasuredChange:
    """A change of entropy, measured.

    Attributes:
        delta: the change in nats, a token or a response.
        se: its standard error, from the scatter of the prompts; None with fewer than 2 prompts.
        ess: effective sample size in responses, (Σω)²/Σω²; the number of responses if all weights are equal.
        ess_fraction: `ess` over the number of responses.
        n_differ: how many of the fresh responses differ from those before the update; None if they are the same ones,
            or if it is not known.
    """

    delta: float
    se: float | None
    ess: float
    ess_fraction: float
    n_differ: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether enough responses count. If few of them carry the weight, `delta` is theirs, and `se` is too small."""
        return self.ess_fraction >= LEAST_ESS_FRACTION

    def __str__(self) -> str:
        if not self.is_known:
            return f"not known (effective sample size {self.ess_fraction:.2g} of the responses)"
        text = f"{self.delta:+.2e} ± " + ("unknown" if self.se is None else f"{self.se:.1e}")
        return text if self.n_differ is None else f"{text} ({self.n_differ:,} of {self.ess:,.0f} responses differ)"


def importance_sampled_change(
    entropy: Tensor,
    entropy_after: Tensor,
    log_prob: Tensor,
    log_prob_after: Tensor,
    responses: Responses,
    *,
    sampled_log_prob: Tensor | None = None,
    weighting: Weighting = "snis",
    clip_at: float = CLIPPED_AT,
    per: Per = "token",
) -> MeasuredChange:
    """The entropy at θ⁺ minus the entropy at θ, both from the responses that θ sampled.

    A whole response weighs ω ∝ π_θ⁺(response)/π_θ(response). The effective sample size of these weights falls with the
    length of the responses, whatever the step: `change_by_finite_step` weighs each position by its prefix instead.

    Args:
        entropy: at θ in nats: H_k, or −w_k s_k for the entropy of sequences; [responses, tokens].
        entropy_after: at θ⁺, on the same prefixes.
        log_prob: s_k at θ, of the sampled tokens.
        log_prob_after: s_k at θ⁺.
        responses: which tokens count.
        sampled_log_prob: log-probabilities of the policy that sampled the responses; by default θ itself.
        weighting: as for `weights_from`.
        clip_at: as for `weights_from`.
        per: "token" for R, or "response".
    """
    reference = responses.tokens("sampled_log_prob", log_prob if sampled_log_prob is None else sampled_log_prob)

    def weights_of(log_prob: Tensor) -> Tensor:
        ratio = responses.tokens("log_prob", log_prob) - reference
        return weights_from(ratio.sum(1, keepdim=True), responses, weighting, clip_at)[:, 0]

    weights = weights_of(log_prob_after)
    change = rate_change(
        _sums(responses, entropy, weights_of(log_prob), per), _sums(responses, entropy_after, weights, per)
    )
    ess = float(weights.sum().square() / weights.square().sum())
    return MeasuredChange(change.delta, change.se, ess, ess / len(weights))


def resampled_change(
    entropy: Tensor,
    responses: Responses,
    entropy_after: Tensor,
    responses_after: Responses,
    *,
    per: Per = "token",
    n_differ: int | None = None,
) -> MeasuredChange:
    """The entropy of the responses sampled by θ⁺ minus that of the responses sampled by θ, to the same prompts.

    If both are sampled with the same random numbers, most of their scatter is common. The standard error is that of the
    prompts' differences, and small. After a small step, few responses differ, and most of the error is how many could
    have differed. So the standard error also holds one more difference, as large as that of unlike responses.

    Args:
        entropy: at θ in nats: H_k, or −w_k s_k for the entropy of sequences; [responses, tokens].
        responses: the responses that θ sampled.
        entropy_after: at θ⁺.
        responses_after: the responses that θ⁺ sampled.
        per: "token" for R, or "response".
        n_differ: how many of the two sets' responses differ, if it is known.

    Raises:
        ValueError: if the two sets of responses do not answer the same prompts.
    """
    if not torch.equal(responses.prompts, responses_after.prompts):
        raise ValueError(
            "both policies must answer the same prompts, so that they can be compared prompt by prompt: "
            "let the sampler take the same prompts in each call"
        )
    change = rate_change(
        _sums(responses, entropy, torch.ones_like(responses.length), per),
        _sums(responses_after, entropy_after, torch.ones_like(responses_after.length), per),
    )
    n = len(responses.length)
    se = change.se
    if se is not None:
        se = math.hypot(se, _unseen_jumps(responses, entropy, per))
    return MeasuredChange(change.delta, se, float(n), 1.0, n_differ)


def fixed_prefix_change(
    entropy: Tensor, entropy_after: Tensor, responses: Responses, prefix_weights: Tensor | None = None
) -> float:
    """The change of R on the same prefixes, as if the update changed no sampled token; in nats a token.

    To first order it equals the `sharpening` of an `EntropyChange`. The difference between the two shows how far the
    step is from linear.

    Args:
        entropy: H_k before the update in nats, [responses, tokens].
        entropy_after: H_k after it.
        responses: which tokens count.
        prefix_weights: by `prefix_weights`, of responses of another policy, [responses, tokens + 1]; None for 1.
    """
    weights, _ = token_and_prefix_weights(responses, prefix_weights)
    change, length = weighted_sums(entropy_after - entropy, responses, weights)
    return float(change.mean() / length.mean())


def _sums(responses: Responses, entropy: Tensor, weights: Tensor, per: Per) -> WeightedSums:
    """Σω h and Σω t of each prompt; t is the length, or 1 per response. weights: [responses]."""
    h = responses.tokens("entropy", entropy).sum(1)
    t = responses.length if per == "token" else torch.ones_like(responses.length)
    return WeightedSums(*(responses.per_prompt(weights * x)[:, None] for x in (h, t)))


def _unseen_jumps(responses: Responses, entropy: Tensor, per: Per) -> float:
    """The effect on the rate of a response that becomes another one to the same prompt, root mean square."""
    sums = _sums(responses, entropy, torch.ones_like(responses.length), per)
    rate, mean = float(sums.ratios()), float(sums.weight.mean())
    t = responses.length if per == "token" else torch.ones_like(responses.length)
    above = (responses.tokens("entropy", entropy).sum(1) - rate * t) / mean
    # Two responses to one prompt differ by twice the variance within the prompt. With one response to each prompt, any
    # two responses stand for them.
    alone = bool((responses.share == 1.0).all())
    centre = above.mean() if alone else responses.per_prompt(above)[responses.index]
    degrees = len(above) - (1 if alone else responses.n_prompts)
    sq_jump = 2.0 * float((above - centre).square().sum()) / max(degrees, 1)
    # A response's part in the rate is its share of its prompt, over the number of prompts.
    sq_part = float(responses.share.square().mean()) / responses.n_prompts**2
    return math.sqrt(_UNSEEN_JUMPS * sq_jump * sq_part)
