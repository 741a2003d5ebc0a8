"""How much a step of any size changes a policy's entropy, from scores of the same responses before and after it.

No derivative is taken: the responses of θ represent those of θ⁺, position by position, by the likelihood ratio of each
position's prefix (see `prefix_weights.py`). In nats a token:

    R(θ⁺) = E[Σ_k ρ_<k H_k(θ⁺)]/E[Σ_k ρ_<k]      ρ_<k = Π_{j<k} π_θ⁺(y_j|y_<j)/π_θ(y_j|y_<j)      δH = R(θ⁺) − R(θ)

The part that weights of 1 give is *sharpening*: distributions change at the same prefixes. The rest is *drift*:
prefixes and lengths become more or less likely. The entropy of whole responses is a sum over positions instead, each
with weights of mean 1. If its token weights depend on what was sampled, whole responses are weighted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from sonde.policy.stats.entropy_change import SE_UNKNOWN, EntropyChange, EntropyObjective
from sonde.policy.stats.entropy_gradient import Responses
from sonde.policy.stats.prefix_weights import CLIPPED_AT, Support, Weighting, prefix_log_ratio, support, weights_from
from sonde.policy.stats.ratios import WeightedSums, effective_number, rate_change
from sonde.stats.intervals import student_t_quantile

_UNSEEN_JUMPS = math.sqrt(3.0) * math.log(2.0)
"""Nats: three positions (a rate that is often seen not once in a sample) at which a token enters or leaves. One token
more or less changes an entropy by log 2 at most, if all are as likely."""

Columns = Literal["one", "positions", "responses"]
"""How terms are added up: all tokens of a prompt together, each position apart, or each whole response."""


@dataclass(frozen=True)
class FiniteStep:
    """The change of entropy by a step, with what says how far it is to be trusted.

    Attributes:
        change: the change, each prompt's share, and its interval.
        support: how well the responses represent the policy after the step.
        without_each: the change without each prompt, [prompts], for the jackknife.
        degrees_of_freedom: of the standard error, for Student's t.
    """

    change: EntropyChange
    support: Support
    without_each: Tensor
    degrees_of_freedom: float


@dataclass(frozen=True)
class Scores:
    """A policy's scores of responses.

    Attributes:
        log_prob: s_k in nats, [responses, tokens].
        entropy: H_k in nats, [responses, tokens].
    """

    log_prob: Tensor
    entropy: Tensor


def change_by_finite_step(
    before: Scores,
    after: Scores,
    responses: Responses,
    objective: EntropyObjective,
    *,
    sampled_log_prob: Tensor | None = None,
    weighting: Weighting = "snis",
    clip_at: float = CLIPPED_AT,
    is_truncated: bool = False,
    level: float = 0.95,
) -> FiniteStep:
    """The entropy at θ⁺ minus the entropy at θ, both from the same responses.

    The standard error is the jackknife's over prompts. Its interval takes Student's t with the effective number of
    prompts that carry the weight, or that carry the standard error, if these are fewer. It also grows as support falls:
    the scatter of responses that are there does not show those that are missing.

    Args:
        before: at θ.
        after: at θ⁺.
        responses: which tokens count.
        objective: which entropy.
        sampled_log_prob: log-probabilities of the policy that sampled the responses, in nats, [responses, tokens]; by
            default θ itself. If it was another policy, its responses represent θ by weights too.
        weighting: as for `weights_from`.
        clip_at: as for `weights_from`.
        is_truncated: whether unlikely tokens are left out. Then the entropy of a position jumps where a token enters or
            leaves, and the error has room for jumps that no position of this sample shows.
        level: confidence level of the interval.

    Example:
        >>> import torch
        >>> responses = Responses(torch.ones(4, 3), torch.tensor([0, 0, 1, 1]))
        >>> before = Scores(torch.full((4, 3), -1.0), torch.ones(4, 3))
        >>> found = change_by_finite_step(before, Scores(before.log_prob, before.entropy - 0.1), responses,
        ...                               EntropyObjective("per_token"))
        >>> round(found.change.delta, 6), found.support.ess_fraction
        (-0.1, 1.0)
    """
    reference = before.log_prob if sampled_log_prob is None else sampled_log_prob
    columns = _columns(objective, responses)

    def weights(scores: Scores) -> Tensor:
        if columns == "responses":
            return _response_weights(scores, reference, responses, objective, weighting, clip_at)
        ratio = prefix_log_ratio(scores.log_prob, reference, responses)
        return weights_from(ratio, responses, weighting, clip_at, by_column=columns == "positions")

    def terms(scores: Scores) -> Tensor:
        if columns == "responses":
            return objective.terms(scores.log_prob, scores.entropy, responses)
        return objective.causal_terms(scores.entropy, responses)

    old, new = weights(before), weights(after)
    found = rate_change(_sums(old, terms(before), responses, columns), _sums(new, terms(after), responses, columns))
    sharpening = None
    if columns != "responses":
        same = _sums(old, terms(after) - terms(before), responses, columns)
        sharpening = (same.value / same.weight.mean(0)).sum(1)
    n, delta, se = responses.n_prompts, found.delta, found.se
    reason, low, high = "", None, None
    carried = support(new.expand_as(responses.mask), terms(after), responses)
    if se is not None:
        if is_truncated:
            se = math.hypot(se, _UNSEEN_JUMPS * objective.total_weight(responses) / float(responses.length.sum()))
        degrees = min(found.degrees_of_freedom, effective_number(found.without_each))
        half = student_t_quantile(0.5 + level / 2, degrees) * se / math.sqrt(carried.ess_fraction)
        low, high = delta - half, delta + half
    elif n < 2:
        reason = f"{SE_UNKNOWN}: it needs at least 2 evaluation prompts, got {n}: pass more prompts"
    else:
        reason = f"{SE_UNKNOWN}: after the step, one prompt has all the weight: use a smaller step"
    variance = None if se is None else se * se
    change = EntropyChange(delta, se, low, high, reason, found.per_prompt, sharpening, variance)
    return FiniteStep(change, carried, found.without_each, found.degrees_of_freedom)


def _columns(objective: EntropyObjective, responses: Responses) -> Columns:
    """How terms are added up before ratios are taken."""
    if objective.kind == "per_token":
        return "one"
    return "positions" if objective.depends_on(responses) == "nothing" else "responses"


def _sums(weights: Tensor, terms: Tensor, responses: Responses, columns: Columns) -> WeightedSums:
    """Weighted terms and weights of each prompt."""
    value, weight = weights * terms, weights
    if columns == "one":  # R: the number of tokens is weighted too
        value, weight = value.sum(1, keepdim=True), (weights * responses.mask).sum(1, keepdim=True)
    elif columns == "responses":
        value = value.sum(1, keepdim=True)
    # With "positions", a response that has ended still has its last weight: so each position's weights have mean 1.
    return WeightedSums(responses.per_prompt(value), responses.per_prompt(weight))


def _response_weights(
    scores: Scores,
    reference: Tensor,
    responses: Responses,
    objective: EntropyObjective,
    weighting: Weighting,
    clip_at: float,
) -> Tensor:
    """The weight of each whole response, or of its group if token weights depend on that; [responses, 1]."""
    ratio = responses.tokens("log_prob", scores.log_prob) - responses.tokens("reference", reference)
    whole = ratio.sum(1)
    if objective.depends_on(responses) == "group":
        whole = responses.per_prompt(whole / responses.share)[responses.index]
    return weights_from(whole[:, None], responses, weighting, clip_at)
