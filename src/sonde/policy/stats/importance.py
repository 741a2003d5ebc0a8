"""How much a step of any size changes a policy's entropy, from scores before and after it, without a derivative.

The responses of θ represent those of θ⁺ by weights, position by position: by the likelihood ratio of each position's
prefix (see `prefix_weights.py`). In nats a token:

    R(θ⁺) = E[Σ_k ρ_<k H_k(θ⁺)]/E[Σ_k ρ_<k]      ρ_<k = Π_{j<k} π_θ⁺(y_j|y_<j)/π_θ(y_j|y_<j)      δH = R(θ⁺) − R(θ)

The part that weights of 1 give is *sharpening*: distributions change at the same prefixes. The rest is *drift*:
prefixes and lengths become more or less likely. The entropy of whole responses is a sum over positions instead, each
with weights of mean 1. With token weights of one over the length, whole responses are weighted.

Beside it are the change by weights of whole responses, and that by fresh responses of θ and θ⁺.

All of them are changes of a rate. The value and the weight of a prompt are means over its responses, and a rate is a
sum of ratios, one for each column:

    R = Σ_k mean_n(value_nk)/mean_n(weight_nk)

Entropy per token has one column: Σ H over the tokens, and their number. The entropy of a whole response has one column
for each position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.policy.stats.entropy_change import SE_UNKNOWN, EntropyChange, EntropyObjective, too_few, with_error
from sonde.policy.stats.entropy_gradient import Responses, Scores, WeightedSums, token_and_prefix_weights, weighted_sums
from sonde.policy.stats.forecast_point import LEAST_MEAN_SUPPORT, LEAST_SUPPORT, MOST_UNSUPPORTED

LEAST_ESS_FRACTION = 0.5
"""Smallest effective sample size over the number of responses. Below it, they do not represent the responses of θ⁺."""
_UNSEEN_JUMPS = 1.0
"""Responses that count as different beside those that are: if none differs, one could have."""
_UNSEEN_TOKENS = math.sqrt(3.0) * math.log(2.0)
"""Nats: three positions (a rate that is often seen not once in a sample) at which a token enters or leaves a truncated
policy. One token more or less changes an entropy by log 2 at most, if all are as likely."""


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
class MeasuredChange:
    """A change of entropy, measured.

    Attributes:
        delta: the change in nats, a token or a response.
        se: its standard error, from the scatter of the prompts; None with fewer than 2 prompts.
        ess_fraction: effective sample size, (Σω)²/Σω², over the number of responses; 1 if all weights are equal.
    """

    delta: float
    se: float | None
    ess_fraction: float

    @property
    def is_known(self) -> bool:
        """Whether enough responses count. If few of them carry the weight, `delta` is theirs, and `se` is too small."""
        return self.ess_fraction >= LEAST_ESS_FRACTION

    def __str__(self) -> str:
        if not self.is_known:
            return f"not known (effective sample size {self.ess_fraction:.2g} of the responses)"
        return with_error(self.delta, self.se)


def change_by_finite_step(
    before: Scores,
    after: Scores,
    objective: EntropyObjective,
    *,
    reference: Tensor | None = None,
    clip_at: float | None = None,
    tokens_may_leave: bool = False,
) -> FiniteStep:
    """The entropy at θ⁺ minus the entropy at θ, both from the same responses.

    The standard error is the jackknife's over prompts. Its interval takes Student's t with the effective number of
    prompts that carry the weight, or that carry the standard error, if these are fewer. It also grows as support falls:
    the scatter of responses that are there does not show those that are missing.

    Args:
        before: at θ.
        after: at θ⁺.
        objective: which entropy.
        reference: log-probabilities of the policy that sampled the responses, in nats, [responses, tokens]; by default
            θ itself. If it was another policy, its responses represent θ by weights too.
        clip_at: as for `weights_from`.
        tokens_may_leave: whether unlikely tokens are left out of sampling. Then the entropy of a position jumps where a
            token enters or leaves, and the error has room for jumps that no position of this sample shows.
    """
    responses, reference = before.responses, before.log_prob if reference is None else reference
    is_causal = objective.is_causal
    (weights, old), (after_weights, new) = (
        _entropy(of, objective, reference, clip_at, whole=not is_causal) for of in (before, after)
    )
    found, sharpening, terms = rate_change(old, new), None, objective.terms(after)
    if is_causal:
        terms = objective.causal_terms(after)
        same = _sums(weights, terms - objective.causal_terms(before), responses, objective)
        sharpening = same.above(torch.zeros(()))
    carried = support(after_weights.expand_as(responses.mask), terms, responses)
    variance, n = None if found.se is None else found.se**2, responses.n_prompts
    if variance is None:
        lost = f"{SE_UNKNOWN}: after the step, one prompt has all the weight: use a smaller step"
        change = EntropyChange(found.delta, found.per_prompt, sharpening, None, reason=too_few(n) if n < 2 else lost)
    else:
        if tokens_may_leave:
            nats = _UNSEEN_TOKENS * objective.total_weight(responses) / float(responses.length.sum())
            variance += nats**2
        degrees = min(found.degrees_of_freedom, effective_number(found.without_each))
        widened = 1.0 / math.sqrt(carried.ess_fraction)
        change = EntropyChange(found.delta, found.per_prompt, sharpening, variance, 0.0, degrees, widened)
    return FiniteStep(change, carried, found.without_each, found.degrees_of_freedom)


def importance_sampled_change(
    before: Scores,
    after: Scores,
    objective: EntropyObjective,
    *,
    reference: Tensor | None = None,
    clip_at: float | None = None,
) -> MeasuredChange:
    """The same change, where a whole response weighs ω ∝ π_θ⁺(response)/π_θ(response).

    The effective sample size of these weights falls with the length of the responses, whatever the step.
    The arguments are those of `change_by_finite_step`.
    """
    reference = before.log_prob if reference is None else reference
    (_, old), (weights, new) = (_entropy(of, objective, reference, clip_at, whole=True) for of in (before, after))
    change = rate_change(old, new)
    ess = float(weights.sum().square() / weights.square().sum())
    return MeasuredChange(change.delta, change.se, ess / len(weights))


def resampled_change(before: Scores, after: Scores, objective: EntropyObjective) -> MeasuredChange:
    """The entropy of the responses sampled by θ⁺ minus that of the responses sampled by θ, to the same prompts.

    If both are sampled with the same random numbers, most of their scatter is common. The standard error is that of the
    prompts' differences, and small. After a small step, few responses differ, and most of the error is how many could
    have differed. So the standard error also holds one more difference, as large as that of unlike responses.

    Args:
        before: θ's scores of the responses that θ sampled.
        after: θ⁺'s scores of those that θ⁺ sampled.
        objective: which entropy.

    Raises:
        ValueError: if the two sets of responses do not answer the same prompts.
    """
    if not torch.equal(before.responses.prompts, after.responses.prompts):
        raise ValueError(
            "both policies must answer the same prompts, so that they can be compared prompt by prompt: "
            "let the sampler take the same prompts in each call"
        )

    old, new = (_entropy(of, objective, of.log_prob, whole=True)[1] for of in (before, after))
    change = rate_change(old, new)
    se = None if change.se is None else math.hypot(change.se, _unseen_jumps(before, old, objective))
    return MeasuredChange(change.delta, se, 1.0)


def fixed_prefix_change(before: Scores, after: Scores, prefix_weights: Tensor | None = None) -> float:
    """The change of R on the same prefixes, as if the update changed no sampled token; in nats a token.

    To first order it equals the `sharpening` of an `EntropyChange`. The difference between the two shows how far the
    step is from linear.

    Args:
        before: at θ.
        after: at θ⁺.
        prefix_weights: by `prefix_weights`, of responses of another policy, [responses, tokens + 1]; None for 1.
    """
    weights, _ = token_and_prefix_weights(before.responses, prefix_weights)
    return float(weighted_sums(after.entropy - before.entropy, before.responses, weights).ratios())


def _entropy(
    of: Scores, objective: EntropyObjective, reference: Tensor, clip_at: float | None = None, *, whole: bool
) -> tuple[Tensor, WeightedSums]:
    """A policy's entropy from responses that another one sampled, and the weights of each token or whole response."""
    ratio = prefix_log_ratio(of.log_prob, reference, of.responses)
    if whole:
        weights, terms = weights_from(ratio[:, -1:], of.responses, clip_at), objective.terms(of)
    else:
        by_column, terms = objective.kind == "sequence", objective.causal_terms(of)
        weights = weights_from(ratio[:, :-1], of.responses, clip_at, by_column=by_column)
    return weights, _sums(weights, terms, of.responses, objective)


def _sums(weights: Tensor, terms: Tensor, responses: Responses, objective: EntropyObjective) -> WeightedSums:
    """Weighted terms and weights of each prompt: all tokens together, or each position apart for a sum over positions.

    Args:
        weights: of each token, [responses, tokens], or of each whole response, [responses, 1].
        terms: of each token, [responses, tokens].
        responses: which tokens count.
        objective: which entropy.
    """
    value, weight = weights * terms, weights
    if objective.kind == "per_token":  # R: the number of tokens is weighted too
        weight = (weights * responses.mask).sum(1, keepdim=True)
    if weight.shape[1] == 1:
        value = value.sum(1, keepdim=True)
    # By positions, a response that has ended still has its last weight: so each position's weights have mean 1.
    return WeightedSums(responses.per_prompt(value), responses.per_prompt(weight))


def _unseen_jumps(before: Scores, sums: WeightedSums, objective: EntropyObjective) -> float:
    """The effect on the rate of a response that becomes another one to the same prompt, root mean square."""
    responses = before.responses
    rate, mean = float(sums.ratios()), float(sums.weight.mean())
    t = responses.length if objective.kind == "per_token" else torch.ones_like(responses.length)
    above = (objective.terms(before).sum(1) - rate * t) / mean
    # Two responses to one prompt differ by twice the variance within the prompt. With one response to each prompt, any
    # two responses stand for them.
    alone = bool((responses.share == 1.0).all())
    centre = above.mean() if alone else responses.per_prompt(above)[responses.index]
    degrees = len(above) - (1 if alone else responses.n_prompts)
    sq_jump = 2.0 * float((above - centre).square().sum()) / max(degrees, 1)
    # A response's part in the rate is its share of its prompt, over the number of prompts.
    sq_part = float(responses.share.square().mean()) / responses.n_prompts**2
    return math.sqrt(_UNSEEN_JUMPS * sq_jump * sq_part)


@dataclass(frozen=True)
class RateChange:
    """The rate after an update minus the rate before it.

    Attributes:
        delta: the change.
        se: its standard error, by leaving out one prompt after the other (the jackknife); None with fewer than 2
            prompts, or where one prompt has all the weight.
        per_prompt: each prompt's share, [prompts]; their mean is `delta`.
        without_each: the change without each prompt, [prompts]; not finite where this prompt has all the weight.
        n_effective: effective number of prompts after the update, (Σw)²/Σw²; their number if they weigh the same.
    """

    delta: float
    se: float | None
    per_prompt: Tensor
    without_each: Tensor
    n_effective: float

    @property
    def degrees_of_freedom(self) -> float:
        """Of the standard error, for Student's t: one less than the effective number of prompts, and at least 1."""
        return max(self.n_effective - 1.0, 1.0)


def rate_change(before: WeightedSums, after: WeightedSums) -> RateChange:
    """How much a rate changes, if the same prompts, or even the same responses, give it before and after.

    What both have in common cancels in each prompt's difference. The standard error comes from these differences. Its
    degrees of freedom fall with the effective number of prompts: a few large weights make the scatter itself uncertain.
    """
    old, weight = before.ratios(), (after.weight / after.weight.mean(0)).sum(1)
    without_each = after.without_each() - before.without_each()
    variance = jackknife_covariance(without_each, without_each)
    return RateChange(
        float((after.ratios() - old).sum()),
        None if variance is None else math.sqrt(variance),
        # A prompt's share is how far it lies above the old ratio: 0 on average before, the change on average after.
        after.above(old) - before.above(old),
        without_each,
        float(weight.sum().square() / weight.square().sum()),
    )


def effective_number(without_each: Tensor) -> float:
    """How many prompts carry the jackknife's variance, (Σd²)²/Σd⁴: a third of all if they are normal, and at least 1.

    As degrees of freedom they allow for the scatter itself being uncertain where a few prompts make most of it.

    Args:
        without_each: the estimate without each prompt, [prompts].
    """
    squares = (without_each - without_each.mean()).square()
    fourth = float(squares.square().sum())
    return max(float(squares.sum()) ** 2 / fourth, 1.0) if fourth else 1.0


def jackknife_covariance(a: Tensor, b: Tensor) -> float | None:
    """The covariance of two estimates, from both without each prompt; None with fewer than 2, or if any is not finite.

    Args:
        a: the first estimate without each prompt, [prompts].
        b: the second, [prompts].
    """
    n = len(a)
    if n < 2 or not bool((a.isfinite() & b.isfinite()).all()):
        return None
    return float(((a - a.mean()) * (b - b.mean())).sum()) * (n - 1) / n


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
