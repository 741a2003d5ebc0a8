"""The entropy of a policy's responses, and the weight of each token in the gradient of this entropy.

The unit is the prompt with its group of responses. Token k of a response has a log-probability s_k, and the entropy H_k
of the whole distribution that it was sampled from. There are two objectives:

    per token    R = E[Σ_k H_k]/E[T]           ∇R = (1/E[T])·E[Σ_k ∇H_k + Σ_k (Σ_{j>k}(H_j − R) − b_k)·∇s_k]
    sequence     H_w = E[−Σ_k w_k s_k]         ∇H_w: see `entropy_change.py`

b_k is a baseline that does not depend on the tokens from k on. The expectation runs over prompts and, within each
prompt, over its responses: all prompts weigh the same.

Responses of another policy represent this one by the weights of their prefixes, ρ_<k. Then each H_k counts ρ_<k times,
and so does each token in E[T]; b_k counts ρ_≤k times, since token k itself is weighted too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Responses:
    """Which tokens were sampled, and which prompt each response answers.

    Args:
        mask: whether the policy sampled a token; False for the prompt and padding; [responses, tokens].
        prompt: each response's prompt, as a number; [responses].

    Raises:
        ValueError: if shapes disagree or a response has no token.
    """

    def __init__(self, mask: Tensor, prompt: Tensor) -> None:
        if mask.dim() != 2 or prompt.shape != mask.shape[:1] or not len(prompt):
            raise ValueError(
                f"mask must be [responses, tokens] and prompt [responses], with at least one response, "
                f"got {tuple(mask.shape)} and {tuple(prompt.shape)}"
            )
        self.mask = mask.bool()
        if bool((empty := ~self.mask.any(1)).any()):
            raise ValueError(f"response {int(empty.nonzero()[0])} has no token: leave it out, or correct its mask")
        self.length = self.mask.sum(1).double()
        """Number of tokens of each response, [responses]."""
        self.prompts, self.index, n = torch.unique(prompt, return_inverse=True, return_counts=True)
        """The prompts' numbers, in order; [prompts]. `index` is the position of each response's prompt; [responses]."""
        self.n_prompts = len(n)
        self.share = (1.0 / n.double())[self.index]
        """One over the number of responses to the same prompt, [responses]."""

    def tokens(self, name: str, values: Tensor) -> Tensor:
        """Values per token in fp64, 0 outside the mask; [responses, tokens].

        Raises:
            ValueError: if they do not have the mask's shape, or the value of a sampled token is not finite.
        """
        if values.shape != self.mask.shape:
            raise ValueError(f"{name} must have the mask's shape {tuple(self.mask.shape)}, got {tuple(values.shape)}")
        values = torch.where(self.mask, values.double(), 0.0)
        if not bool(values.isfinite().all()):
            raise ValueError(f"{name} must be finite wherever a token was sampled")
        return values

    def per_prompt(self, per_response: Tensor) -> Tensor:
        """The mean over each prompt's responses, in the order of the prompts' numbers.

        Args:
            per_response: [responses] or [responses, columns].

        Returns:
            fp64, [prompts] or [prompts, columns].
        """
        total = torch.zeros(self.n_prompts, *per_response.shape[1:], dtype=torch.float64)
        share = self.share.view(-1, *[1] * (per_response.dim() - 1))
        return total.index_add_(0, self.index, per_response * share)

    def halves(self) -> list[Tensor]:
        """Masks of the responses to every second prompt and to the others, [responses] each; one for one prompt."""
        is_even = self.index % 2 == 0
        return [half for half in (is_even, ~is_even) if bool(half.any())]

    def leave_one_out(self, per_response: Tensor) -> Tensor:
        """The mean over the *other* responses to the same prompt, [responses].

        Raises:
            ValueError: if a prompt has only one response.
        """
        if bool((self.share == 1.0).any()):
            raise ValueError(
                "leave-one-out needs at least 2 responses to every prompt: sample more, or leave prompts with one out"
            )
        # Of n responses with mean m, the others' mean is m + (m − x)/(n − 1).
        mean = self.per_prompt(per_response)[self.index]
        others: Tensor = mean + (mean - per_response) * self.share / (1.0 - self.share)
        return others

    def after(self, per_token: Tensor) -> Tensor:
        """Σ_{j>k} of values that are 0 outside the mask, [responses, tokens]."""
        up_to_here = per_token.cumsum(1)
        return up_to_here[:, -1:] - up_to_here

    def mean_at_position_of_other_prompts(self, per_token: Tensor) -> Tensor:
        """For each token, the mean at its position in the response over the responses to other prompts.

        It is 0 if no other prompt has a response as long. It depends on no token of the same prompt, so it can serve as
        a baseline.
        """
        position = self.mask.long().cumsum(1)[self.mask] - 1
        prompt = self.index[:, None].expand_as(self.mask)[self.mask]
        values, ones = per_token[self.mask], torch.ones_like(per_token[self.mask])
        shape, at = (self.n_prompts, self.mask.shape[1]), (prompt, position)
        total = torch.zeros(shape, dtype=torch.float64).index_put_(at, values, accumulate=True)
        count = torch.zeros(shape, dtype=torch.float64).index_put_(at, ones, accumulate=True)
        # Sums over all prompts minus those of the own prompt.
        others = (total.sum(0) - total) / (count.sum(0) - count).clamp(min=1.0)
        baseline = torch.zeros_like(per_token)
        baseline[self.mask] = others[at]
        return baseline


@dataclass(frozen=True)
class WeightedSums:
    """A number about a policy as a function of the prompts' weights: a sum of ratios of two sums, one for each column.

    Attributes:
        value: weighted values, fp64, [prompts, columns].
        weight: the weights, fp64, at least 0, [prompts, columns]. A common factor of a column's values and weights
            changes nothing.
    """

    value: Tensor
    weight: Tensor

    def ratios(self) -> Tensor:
        """The ratio of each column, [columns]; the number is their sum."""
        return self.value.sum(0) / self.weight.sum(0)

    def without_each(self) -> Tensor:
        """The number without each prompt, for the jackknife; [prompts]."""
        others = (self.value.sum(0) - self.value) / (self.weight.sum(0) - self.weight)
        return others.sum(1)

    def above(self, ratios: Tensor) -> Tensor:
        """How far each prompt lies above given ratios, [prompts]; above its own, its influence on the number."""
        return ((self.value - ratios * self.weight) / self.weight.mean(0)).sum(1)


class Scores(Protocol):
    """A policy's scores of responses."""

    @property
    def log_prob(self) -> Tensor:
        """s_k in nats, [responses, tokens]."""

    @property
    def entropy(self) -> Tensor:
        """H_k in nats, [responses, tokens]."""

    @property
    def responses(self) -> Responses:
        """Which tokens count."""


@dataclass(frozen=True)
class Coefficients:
    """X_n = Σ over prompt n's tokens of on_entropy·∇H + on_log_prob·∇s, whose mean over prompts estimates the gradient.

    Attributes:
        on_entropy: constants, [responses, tokens].
        on_log_prob: constants, [responses, tokens].
    """

    on_entropy: Tensor
    on_log_prob: Tensor

    def entropy_alone(self) -> Coefficients:
        """The part from distributions that change at the same prefixes."""
        return Coefficients(self.on_entropy, torch.zeros_like(self.on_log_prob))


Along = Callable[[Sequence[Coefficients]], list[Tensor]]
"""For each of several coefficients, X_n·Δ along a direction Δ in parameter space: the derivative of every prompt's
Σ on_entropy·H + on_log_prob·s; [prompts] each."""


def along_tokens(d_entropy: Tensor, d_log_prob: Tensor, responses: Responses) -> Along:
    """X_n·Δ from the derivatives of each token along Δ.

    Args:
        d_entropy: D_Δ H_k, [responses, tokens].
        d_log_prob: D_Δ s_k, [responses, tokens].
        responses: which tokens count.
    """
    d_entropy, d_log_prob = responses.tokens("d_entropy", d_entropy), responses.tokens("d_log_prob", d_log_prob)

    def along(coefficients: Sequence[Coefficients]) -> list[Tensor]:
        sums = ((c.on_entropy * d_entropy + c.on_log_prob * d_log_prob).sum(1) for c in coefficients)
        # The coefficients contain each response's share already, and per_prompt() multiplies by it again.
        return [responses.per_prompt(per_response / responses.share) for per_response in sums]

    return along


def weighted_entropy_rate(
    entropy: Tensor, responses: Responses, prefix_weights: Tensor | None
) -> tuple[float, float | None]:
    """R in nats a token with its standard error, also from responses of another policy.

    Args:
        entropy: H_k in nats, [responses, tokens].
        responses: which tokens count.
        prefix_weights: by `prefix_weights`, of responses of another policy, [responses, tokens + 1]; None for 1.
    """
    weights, _ = token_and_prefix_weights(responses, prefix_weights)
    sums = weighted_sums(entropy, responses, weights)
    return float(sums.ratios()), standard_error(sums.above(sums.ratios()))


def standard_error(per_prompt: Tensor) -> float | None:
    """Standard error of a mean over prompts whose terms have mean 0, [prompts]; None with fewer than 2 prompts."""
    n = len(per_prompt)
    return float((per_prompt.square().sum() / (n * (n - 1))).sqrt()) if n > 1 else None


def per_token_coefficients(
    entropy: Tensor,
    responses: Responses,
    *,
    rate: float | None = None,
    mean_length: float | None = None,
    has_baseline: bool = True,
    prefix_weights: Tensor | None = None,
) -> Coefficients:
    """Coefficients of ∇R.

    Args:
        entropy: H_k in nats, [responses, tokens].
        responses: which tokens count.
        rate: R; by default estimated from these responses.
        mean_length: E[T]; by default estimated from these responses.
        has_baseline: subtract from each token's reward-to-go the mean at its position over the other prompts.
        prefix_weights: by `prefix_weights`, of responses of another policy, [responses, tokens + 1]; None for 1.
    """
    before, through = token_and_prefix_weights(responses, prefix_weights)
    sums = weighted_sums(entropy, responses, before)
    rate = float(sums.ratios()) if rate is None else rate
    mean_length = float(sums.weight.mean()) if mean_length is None else mean_length
    # Σ_{j>k}(H_j − R): the entropy, relative to R, of the tokens that follow the sampled one.
    above = before * (responses.tokens("entropy", entropy) - rate)
    to_go = torch.where(responses.mask, responses.after(above), 0.0)
    if has_baseline:
        weight = responses.mean_at_position_of_other_prompts(through)
        mean = responses.mean_at_position_of_other_prompts(to_go)
        to_go = to_go - through * torch.where(weight > 0, mean / weight, 0.0)
    share = responses.share[:, None] / mean_length
    return Coefficients(on_entropy=share * before, on_log_prob=share * to_go)


def token_and_prefix_weights(responses: Responses, prefix_weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """ρ_<k, by which token k counts, and ρ_≤k, with token k; both 0 outside the mask, [responses, tokens]."""
    if prefix_weights is None:
        ones = responses.mask.double()
        return ones, ones
    before, through = prefix_weights[:, :-1], prefix_weights[:, 1:]
    return torch.where(responses.mask, before, 0.0), torch.where(responses.mask, through, 0.0)


def weighted_sums(entropy: Tensor, responses: Responses, weights: Tensor) -> WeightedSums:
    """Each prompt's Σ ρ H and Σ ρ, whose ratio is R; in one column.

    Args:
        entropy: H_k in nats, [responses, tokens].
        responses: which tokens count.
        weights: ρ of each token, 0 outside the mask, [responses, tokens].
    """
    value = (weights * responses.tokens("entropy", entropy)).sum(1, keepdim=True)
    return WeightedSums(responses.per_prompt(value), responses.per_prompt(weights.sum(1, keepdim=True)))


def on_same_prefixes_coefficients(responses: Responses) -> Coefficients:
    """Coefficients of R with its prefixes held fixed: Σ H/E[T]."""
    length = float(responses.per_prompt(responses.length).mean())
    on_entropy = responses.mask * responses.share[:, None] / length
    return Coefficients(on_entropy, torch.zeros_like(on_entropy))


def covariance(log_prob: Tensor, advantage: Tensor, responses: Responses) -> float:
    """Cov(s, A) over all sampled tokens; every token weighs the same.

    If logits were independent parameters, a natural policy gradient step of size η would change the entropy by −η·Cov
    to first order. A network shares its parameters, so the covariance is a symptom to watch, not a forecast.

    Args:
        log_prob: s_k in nats, [responses, tokens].
        advantage: [responses] or [responses, tokens].
        responses: which tokens count.

    Reference:
        Cui et al. 2025, arXiv:2505.22617.
    """
    if advantage.dim() == 1:
        advantage = advantage[:, None].expand_as(responses.mask)
    s, a = (responses.tokens(n, v)[responses.mask] for n, v in (("log_prob", log_prob), ("advantage", advantage)))
    return float(((s - s.mean()) * (a - a.mean())).mean())


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
