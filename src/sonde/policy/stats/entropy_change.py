"""How much an update changes a policy's entropy, to first order, and the standard error of that change.

Along a given update Δθ, the change is a mean over evaluation prompts: each prompt contributes its own derivative along
Δθ, and the standard error is that of the mean. Along the mean gradient of update prompts, both batches scatter.
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
    per_token_coefficients,
    token_and_prefix_weights,
    weighted_sums,
)
from sonde.policy.stats.sequence_entropy import (
    DependsOn,
    SequenceWeights,
    depends_on,
    sequence_coefficients,
    token_weights,
)
from sonde.stats.intervals import LEVEL, student_t_quantile

Objective = Literal["per_token", "sequence"]

SE_UNKNOWN = "its standard error is not known"
_ROUNDING = 0.02
"""Largest relative difference between two means of the same products. Central differences keep 3 digits, sums in bf16
fewer."""


@dataclass(frozen=True)
class EntropyChange:
    """The change of entropy along an update, to first order.

    Attributes:
        delta: the change in nats (a token, for the per-token objective).
        se: its standard error; None if unknown.
        low: lower end of its confidence interval, by Student's t; None if unknown.
        high: upper end of the interval; None if unknown.
        reason: why a number is unknown or doubtful; empty otherwise.
        per_prompt: s_n of each evaluation prompt, [prompts], in the order of the prompts' numbers. Their mean is
            `delta`.
        sharpening_per_prompt: the part of s_n from distributions that change at the same prefixes, [prompts]; None if
            this part is not measured.
        v_x: variance of `delta` from the evaluation prompts; None if unknown.
        v_y: variance of `delta` from the update prompts; 0 for a given update, None if unknown.
    """

    delta: float
    se: float | None
    low: float | None
    high: float | None
    reason: str
    per_prompt: Tensor
    sharpening_per_prompt: Tensor | None
    v_x: float | None
    v_y: float | None = 0.0

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
        weights: w_k of "sequence": see `sequence_entropy.py`.
    """

    kind: Objective
    weights: SequenceWeights = "one"

    def total_weight(self, responses: Responses) -> float:
        """Nats of this entropy for a nat at every token: the mean of Σ w_k over responses; 1 for "per_token"."""
        if self.kind == "per_token":
            return 1.0
        return float(responses.per_prompt(token_weights(self.weights, responses).sum(1)).mean())

    def terms(self, log_prob: Tensor, entropy: Tensor, responses: Responses) -> Tensor:
        """H_k, or −w_k s_k: the expectation of their sum over a response is its entropy; [responses, tokens]."""
        if self.kind == "per_token":
            return responses.tokens("entropy", entropy)
        return -token_weights(self.weights, responses) * responses.tokens("log_prob", log_prob)

    def causal_terms(self, entropy: Tensor, responses: Responses) -> Tensor:
        """H_k, or w_k H_k, which has less scatter than −w_k s_k; [responses, tokens].

        Their sum has the same expectation as `terms` only if w_k depends on nothing that was sampled.
        """
        entropy = responses.tokens("entropy", entropy)
        return entropy if self.kind == "per_token" else token_weights(self.weights, responses) * entropy

    def depends_on(self, responses: Responses) -> DependsOn:
        """What the token weights depend on."""
        return "nothing" if self.kind == "per_token" else depends_on(self.weights, responses)

    def coefficients(
        self, log_prob: Tensor, entropy: Tensor, responses: Responses, prefix_weights: Tensor | None = None
    ) -> Coefficients:
        """The weights of the tokens' gradients in the gradient of the entropy.

        Args:
            log_prob: s_k in nats, [responses, tokens].
            entropy: H_k in nats, [responses, tokens].
            responses: which tokens count.
            prefix_weights: by `prefix_weights`, for "per_token" alone, if another policy sampled the responses.
        """
        if self.kind == "per_token":
            return per_token_coefficients(entropy, responses, prefix_weights=prefix_weights)
        assert prefix_weights is None
        return sequence_coefficients(log_prob, entropy, responses, self.weights)

    def change(
        self,
        log_prob: Tensor,
        entropy: Tensor,
        responses: Responses,
        along: Along,
        *,
        prefix_weights: Tensor | None = None,
    ) -> EntropyChange:
        """The change along a given update to first order, from every token's scores and derivatives along it."""
        if self.kind == "per_token":
            return change_per_token(entropy, responses, along, prefix_weights=prefix_weights)
        assert prefix_weights is None
        return change_of_sequences(self.coefficients(log_prob, entropy, responses), along)


def change_per_token(
    entropy: Tensor,
    responses: Responses,
    along: Along,
    *,
    prefix_weights: Tensor | None = None,
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
    h, t = weighted_sums(entropy, responses, weights)
    length = float(t.mean())
    rate = float(h.mean()) / length
    coefficients = per_token_coefficients(entropy, responses, prefix_weights=prefix_weights)
    # d̄, the derivative of the mean length: token k's log-probability moves the likelihood of the tokens after it.
    after = torch.where(responses.mask, responses.after(weights), 0.0)
    of_length = Coefficients(torch.zeros_like(after), responses.share[:, None] * after)
    shares, sharpening, d_length = along([coefficients, coefficients.entropy_alone(), of_length])
    delta = float(shares.mean())
    influence = shares - delta * t / length - float(d_length.mean()) / length * (h - rate * t) / length
    return _change(delta, influence, shares, sharpening)


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
    return _change(delta, shares - delta, shares, sharpening)


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
    x, y = x_along_y.double(), y_along_x.double()
    delta = float(x.mean())
    scaled_sharpening = None if sharpening is None else step_size * sharpening.double()
    if min(len(x), len(y)) < 2:
        reason = (
            f"{SE_UNKNOWN}: it needs at least 2 prompts to evaluate and 2 to update on, got {len(x)} and {len(y)}: "
            "pass more prompts"
        )
        return EntropyChange(step_size * delta, None, None, None, reason, step_size * x, scaled_sharpening, None, None)
    doubt = ""
    if not math.isclose(delta, float(y.mean()), rel_tol=_ROUNDING, abs_tol=_ROUNDING * float(x.std())):
        doubt = (
            f"the mean of X_n·Ȳ and the mean of Y_p·X̄ should both be X̄·Ȳ, got {delta:g} and {float(y.mean()):g}: "
            "derivatives or sums are lost in rounding"
        )
    v_x, v_y = _variance_of_mean(x, x), _variance_of_mean(*(half.double() for half in y_along_halves))
    return _with_interval(
        step_size * delta,
        min(len(x), len(y)),
        per_prompt=step_size * x,
        sharpening=scaled_sharpening,
        v_x=step_size**2 * v_x,
        v_y=step_size**2 * v_y,
        doubt=doubt,
    )


def _variance_of_mean(a: Tensor, b: Tensor) -> float:
    """Unbiased covariance of two means over the same samples."""
    n = len(a)
    return float(((a - a.mean()) * (b - b.mean())).sum()) / (n * (n - 1))


def _change(delta: float, influence: Tensor, shares: Tensor, sharpening: Tensor | None) -> EntropyChange:
    n = len(influence)
    if n < 2:
        reason = f"{SE_UNKNOWN}: it needs at least 2 evaluation prompts, got {n}: pass more prompts"
        return EntropyChange(delta, None, None, None, reason, shares, sharpening, None)
    v_x = float(influence.square().sum()) / (n * (n - 1))
    return _with_interval(delta, n, per_prompt=shares, sharpening=sharpening, v_x=v_x)


def _with_interval(
    delta: float,
    n: int,
    *,
    per_prompt: Tensor,
    sharpening: Tensor | None,
    v_x: float,
    v_y: float = 0.0,
    doubt: str = "",
) -> EntropyChange:
    se = low = high = None
    reason = f"{SE_UNKNOWN}: the estimates of the variances cancel: use more prompts"
    if v_x + v_y >= 0.0:
        se, reason = math.sqrt(v_x + v_y), doubt
        half = student_t_quantile(0.5 + LEVEL / 2, n - 1) * se
        low, high = delta - half, delta + half
    return EntropyChange(delta, se, low, high, reason, per_prompt, sharpening, v_x, v_y)
