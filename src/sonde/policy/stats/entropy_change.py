"""How much an update changes a policy's entropy, to first order, and the standard error of that change.

Along a given update Δθ, the change is a mean over evaluation prompts: each prompt contributes its own derivative along
Δθ, and the standard error is that of the mean. Along the mean gradient of update prompts, both batches scatter.

The entropy is R, of a token, or that of whole responses, H_w = E[−Σ_k w_k s_k]:

    w_k = 1             H_w = E[Σ_k H_k], and ∇H_w = E[Σ_k ∇H_k + Σ_k (Σ_{j>k} H_j − b_k)·∇s_k]
    w_k = 1/length      w_k depends on what was sampled, so s_k stays:
                        ∇H_w = −E[(S_w − S_w of the other responses)·∇S] − E[∇S_w],  S_w = Σ_k w_k s_k, S = Σ_k s_k

Without the term E[∇S_w], the gradient of an enumerable policy is 10–18 % wrong for one over the length
(`tests/policy/stats/test_sequence_entropy.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sonde.policy.stats.entropy_gradient import (
    Along,
    Coefficients,
    Responses,
    Scores,
    per_token_coefficients,
    standard_error,
    token_and_prefix_weights,
    weighted_sums,
)
from sonde.stats.intervals import LEVEL, student_t_quantile

Objective = Literal["per_token", "sequence"]
SequenceWeights = Literal["one", "length"]
"""w_k: 1, or one over the response's length."""

SE_UNKNOWN = "its standard error is not known"
_ROUNDING = 0.02
"""Largest relative difference between two means of the same products. Central differences keep 3 digits, sums in bf16
fewer."""


def with_error(value: float | None, se: float | None) -> str:
    """A change and its standard error, in words."""
    if value is None:
        return "unknown"
    return f"{value:+.2e} ± {'unknown' if se is None else f'{se:.1e}'}"


@dataclass(frozen=True)
class EntropyChange:
    """The change of entropy along an update: to first order, or by a finite step.

    Attributes:
        delta: the change in nats (a token, for the per-token objective).
        per_prompt: s_n of each evaluation prompt, [prompts], in the order of the prompts' numbers. Their mean is
            `delta`.
        sharpening_per_prompt: the part of s_n from distributions that change at the same prefixes, [prompts]; None if
            this part is not measured.
        v_x: variance of `delta` from the evaluation prompts; None if unknown.
        v_y: variance of `delta` from the update prompts; 0 for a given update, None if unknown.
        degrees: of freedom of the standard error, for Student's t.
        widened: factor of the interval beyond that.
        reason: why a number is unknown or doubtful; empty otherwise.
    """

    delta: float
    per_prompt: Tensor
    sharpening_per_prompt: Tensor | None
    v_x: float | None
    v_y: float | None = 0.0
    degrees: float = 1.0
    widened: float = 1.0
    reason: str = ""

    @property
    def se(self) -> float | None:
        """The standard error of `delta`; None if unknown."""
        if self.v_x is None or self.v_y is None or self.v_x + self.v_y < 0.0:
            return None
        return math.sqrt(self.v_x + self.v_y)

    @property
    def interval(self) -> tuple[float, float] | tuple[None, None]:
        """Both ends of the confidence interval of `delta`, by Student's t; None if unknown."""
        if self.se is None:
            return None, None
        half = student_t_quantile(0.5 + LEVEL / 2, self.degrees) * self.se * self.widened
        return self.delta - half, self.delta + half

    @property
    def low(self) -> float | None:
        """Lower end of the interval."""
        return self.interval[0]

    @property
    def high(self) -> float | None:
        """Upper end of the interval."""
        return self.interval[1]

    @property
    def sharpening(self) -> float | None:
        """The part of `delta` from distributions that change at the same prefixes; None if not measured."""
        return None if self.sharpening_per_prompt is None else float(self.sharpening_per_prompt.mean())

    @property
    def drift(self) -> float | None:
        """The part of `delta` from prefixes and lengths that become more or less likely; None if not measured."""
        sharpening = self.sharpening
        return None if sharpening is None else self.delta - sharpening


@dataclass(frozen=True)
class EntropyObjective:
    """Which entropy is meant, with its terms, its gradient and its change.

    Attributes:
        kind: "per_token" for R = E[Σ H]/E[T]; "sequence" for H_w = E[−Σ w s].
        weights: w_k of "sequence": see `token_weights`.
    """

    kind: Objective
    weights: SequenceWeights = "one"

    def total_weight(self, responses: Responses) -> float:
        """Nats of this entropy for a nat at every token: the mean of Σ w_k over responses; 1 for "per_token"."""
        if self.kind == "per_token":
            return 1.0
        return float(responses.per_prompt(token_weights(self.weights, responses).sum(1)).mean())

    def terms(self, scores: Scores) -> Tensor:
        """H_k, or −w_k s_k: the expectation of their sum over a response is its entropy; [responses, tokens]."""
        responses = scores.responses
        if self.kind == "per_token":
            return responses.tokens("entropy", scores.entropy)
        return -token_weights(self.weights, responses) * responses.tokens("log_prob", scores.log_prob)

    def causal_terms(self, scores: Scores) -> Tensor:
        """H_k, which has less scatter than −s_k; [responses, tokens]. Only for an entropy that `is_causal`."""
        return scores.responses.tokens("entropy", scores.entropy)

    @property
    def is_causal(self) -> bool:
        """Whether token weights depend on nothing that was sampled, so that `causal_terms` have the same mean."""
        return self.kind == "per_token" or self.weights == "one"

    def coefficients(self, scores: Scores, prefix_weights: Tensor | None = None) -> Coefficients:
        """The weights of the tokens' gradients in the gradient of the entropy.

        Args:
            scores: of the evaluation responses.
            prefix_weights: by `prefix_weights`, for "per_token" alone, if another policy sampled the responses.
        """
        if self.kind == "per_token":
            return per_token_coefficients(scores.entropy, scores.responses, prefix_weights=prefix_weights)
        assert prefix_weights is None
        return sequence_coefficients(scores.log_prob, scores.entropy, scores.responses, self.weights)

    def change(self, scores: Scores, along: Along, prefix_weights: Tensor | None = None) -> EntropyChange:
        """The change along a given update to first order, from every token's scores and derivatives along it."""
        if self.kind == "per_token":
            return change_per_token(scores.entropy, scores.responses, along, prefix_weights=prefix_weights)
        return change_of_sequences(self.coefficients(scores, prefix_weights), along)


def change_per_token(
    entropy: Tensor, responses: Responses, along: Along, *, prefix_weights: Tensor | None = None
) -> EntropyChange:
    """δR along a given update to first order.

    R is a ratio of two means, both estimated from these prompts, and so is δR. The standard error of δR is that of the
    mean of the prompts' influences on it,

        ψ_n = [(a_n − R·d_n) − δR·t_n − (d̄/t̄)(h_n − R·t_n)]/t̄,

    where h_n and t_n are the prompt's entropy and length, both weighted if another policy sampled the responses, and
    a_n and d_n their derivatives.

    Args:
        entropy: H_k in nats, [responses, tokens].
        responses: which tokens count.
        along: derivatives along the update.
        prefix_weights: by `prefix_weights`, of responses of another policy, [responses, tokens + 1]; None for 1.
    """
    weights, _ = token_and_prefix_weights(responses, prefix_weights)
    sums = weighted_sums(entropy, responses, weights)
    length = float(sums.weight.mean())
    coefficients = per_token_coefficients(entropy, responses, prefix_weights=prefix_weights)
    # d̄, the derivative of the mean length: token k's log-probability moves the likelihood of the tokens after it.
    after = torch.where(responses.mask, responses.after(weights), 0.0)
    of_length = Coefficients(torch.zeros_like(after), responses.share[:, None] * after)
    shares, sharpening, d_length = along([coefficients, coefficients.entropy_alone(), of_length])
    delta = float(shares.mean())
    on_rate, on_length = sums.above(sums.ratios()), sums.weight[:, 0] / length
    influence = shares - delta * on_length - float(d_length.mean()) / length * on_rate
    return _by_influence(delta, shares, sharpening, influence)


def change_of_sequences(coefficients: Coefficients, along: Along) -> EntropyChange:
    """δH_w along a given update to first order.

    Args:
        coefficients: of ∇H_w, by `sequence_coefficients`.
        along: derivatives along the update.
    """
    if bool(coefficients.on_entropy.any()):
        shares, sharpening = along([coefficients, coefficients.entropy_alone()])
    else:
        [shares], sharpening = along([coefficients]), None
    delta = float(shares.mean())
    return _by_influence(delta, shares, sharpening, shares - delta)


def change_by_gradients(
    x_along_y: Tensor,
    y_along_halves: tuple[Tensor, Tensor],
    y_along_x: Tensor,
    step_size: float,
    *,
    sharpening: Tensor | None = None,
) -> EntropyChange:
    """δH = η X̄·Ȳ for an update along the mean of the update prompts' own preconditioned gradients Y_p.

    The scatter of each batch gives a variance of X̄·Ȳ. Both variances contain tr(Σ_X Σ_Y)/(B_E·B_U), so their sum would
    count this term twice. The second variance leaves it out: the means of the two halves of the evaluation prompts
    replace X̄.

    Args:
        x_along_y: X_n·Ȳ, [evaluation prompts].
        y_along_halves: Y_p·X̄₁ and Y_p·X̄₂, where X̄₁ and X̄₂ are the means over halves of the evaluation prompts.
        y_along_x: Y_p·X̄, [update prompts].
        step_size: η.
        sharpening: the part of X_n·Ȳ from distributions that change at the same prefixes, if known.
    """
    x, y, n = x_along_y.double(), y_along_x.double(), min(len(x_along_y), len(y_along_x))
    mean, v_x, v_y, reason = float(x.mean()), None, None, ""
    if n < 2:
        reason = (
            f"{SE_UNKNOWN}: it needs at least 2 prompts to evaluate and 2 to update on, got {len(x)} and {len(y)}: "
            "pass more prompts"
        )
    else:
        v_x = step_size**2 * _variance_of_mean(x, x)
        v_y = step_size**2 * _variance_of_mean(*(half.double() for half in y_along_halves))
        if not math.isclose(mean, float(y.mean()), rel_tol=_ROUNDING, abs_tol=_ROUNDING * float(x.std())):
            reason = (
                f"the mean of X_n·Ȳ and the mean of Y_p·X̄ should both be X̄·Ȳ, got {mean:g} and {float(y.mean()):g}: "
                "derivatives or sums are lost in rounding"
            )
        if v_x + v_y < 0.0:
            reason = f"{SE_UNKNOWN}: the estimates of the variances cancel: use more prompts"
    sharpening = None if sharpening is None else step_size * sharpening.double()
    return EntropyChange(step_size * mean, step_size * x, sharpening, v_x, v_y, n - 1, reason=reason)


def _variance_of_mean(a: Tensor, b: Tensor) -> float:
    """Unbiased covariance of two means over the same samples."""
    n = len(a)
    return float(((a - a.mean()) * (b - b.mean())).sum()) / (n * (n - 1))


def _by_influence(delta: float, shares: Tensor, sharpening: Tensor | None, influence: Tensor) -> EntropyChange:
    """A change whose standard error is that of the mean of the prompts' influences on it."""
    n, se = len(influence), standard_error(influence)
    if se is None:
        return EntropyChange(delta, shares, sharpening, None, reason=too_few(n))
    return EntropyChange(delta, shares, sharpening, se * se, degrees=n - 1)


def too_few(n: int) -> str:
    """Why there is no standard error."""
    return f"{SE_UNKNOWN}: it needs at least 2 evaluation prompts, got {n}: pass more prompts"


def token_weights(weights: SequenceWeights, responses: Responses) -> Tensor:
    """w_k of every token, fp64, 0 outside the mask; [responses, tokens]."""
    return responses.mask.double() if weights == "one" else responses.mask / responses.length[:, None]


def sequence_coefficients(
    log_prob: Tensor, entropy: Tensor, responses: Responses, weights: SequenceWeights = "one"
) -> Coefficients:
    """Coefficients of ∇H_w, by the equation for its weights.

    Args:
        log_prob: s_k in nats, [responses, tokens].
        entropy: H_k in nats, [responses, tokens].
        responses: which tokens count. One over the length needs at least 2 responses to every prompt.
        weights: w_k.

    Raises:
        ValueError: for one response to a prompt, where 2 are needed.
    """
    share = responses.share[:, None]
    if weights == "one":
        to_go = torch.where(responses.mask, responses.after(responses.tokens("entropy", entropy)), 0.0)
        to_go = to_go - responses.mean_at_position_of_other_prompts(to_go)
        return Coefficients(on_entropy=share * responses.mask, on_log_prob=share * to_go)
    w, log_prob = token_weights(weights, responses), responses.tokens("log_prob", log_prob)
    weighted = (w * log_prob).sum(1)
    credit = weighted - responses.leave_one_out(weighted)
    # Minus: entropy falls if likely responses become more likely. The plus sign of some implementations gives the
    # opposite direction.
    on_log_prob = -credit[:, None] * responses.mask - w
    return Coefficients(torch.zeros_like(log_prob), share * on_log_prob)
