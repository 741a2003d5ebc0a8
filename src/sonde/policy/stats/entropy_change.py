"""How much an update changes a policy's entropy, to first order, and how sure that is.

Along a given update Δθ the change is a mean over evaluation prompts of each prompt's own derivative along it, and its
standard error that of the mean. Along the mean gradient of update prompts both batches scatter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.policy.stats.entropy_gradient import Coefficients, Responses, entropy_rate, per_token_coefficients
from sonde.stats.intervals import student_t_quantile

_ROUNDING = 0.02
"""By which means of the same products may differ: central differences keep 3 digits, sums in bf16 fewer."""


@dataclass(frozen=True)
class EntropyChange:
    """The change of entropy along an update, to first order.

    Attributes:
        delta: in nats (a token, for the per-token objective); NaN where unknown.
        se: its standard error; NaN where unknown.
        low: lower end of its confidence interval, by Student's t.
        high: upper end.
        reason: why something is unknown; empty when nothing is.
        per_prompt: each evaluation prompt's s_n, whose mean is `delta`; [prompts], in the order of their numbers.
        sharpening_per_prompt: what of it is from distributions that change where they are; NaN where that is not told.
        v_x: variance of `delta` from the evaluation prompts.
        v_y: variance from the prompts of the update; 0 where the update is given.
        double_count: what v_x + v_y counts twice; NaN where it is not known, as v_y leaves it out.
    """

    delta: float
    se: float
    low: float
    high: float
    reason: str
    per_prompt: Tensor
    sharpening_per_prompt: Tensor
    v_x: float
    v_y: float = 0.0
    double_count: float = 0.0

    @property
    def sharpening(self) -> float:
        """The part of `delta` from distributions that change where they are."""
        return float(self.sharpening_per_prompt.mean())

    @property
    def drift(self) -> float:
        """The part from other prefixes, and lengths, becoming likelier."""
        return self.delta - self.sharpening


def change_per_token(
    entropy: Tensor, d_entropy: Tensor, d_log_prob: Tensor, responses: Responses, *, level: float = 0.95
) -> EntropyChange:
    """δR along a given update, from every token's derivative along it.

    R is a ratio of two means, each estimated from these prompts, and so is δR: its standard error is that of the mean
    of the prompts' influences on it,

        ψ_n = [(a_n − R·d_n) − δR·t_n − (d̄/t̄)(h_n − R·t_n)]/t̄,

    with h_n and t_n the prompt's entropy and length, a_n and d_n their derivatives.

    Args:
        entropy: H_k in nats, [responses, tokens].
        d_entropy: D_Δ H_k, likewise.
        d_log_prob: D_Δ s_k, likewise.
        responses: which tokens count.
        level: confidence level.
    """
    entropy, d_entropy, d_log_prob = (
        responses.tokens(name, values)
        for name, values in (("entropy", entropy), ("d_entropy", d_entropy), ("d_log_prob", d_log_prob))
    )
    rate, length = entropy_rate(entropy, responses)
    coefficients = per_token_coefficients(entropy, responses)
    shares = coefficients.per_prompt(responses, d_entropy, d_log_prob)
    delta = float(shares.mean())
    after = torch.where(responses.mask, responses.after(responses.mask.double()), 0.0)
    d_length = float(responses.per_prompt((after * d_log_prob).sum(1)).mean())
    h, t = responses.per_prompt(entropy.sum(1)), responses.per_prompt(responses.length)
    influence = shares - delta * t / length - d_length / length * (h - rate * t) / length
    sharpening = coefficients.per_prompt(responses, d_entropy, torch.zeros_like(d_log_prob))
    return _change(delta, influence, shares, sharpening, level)


def change_of_sequences(
    coefficients: Coefficients, d_log_prob: Tensor, responses: Responses, *, level: float = 0.95
) -> EntropyChange:
    """δH_w along a given update, from every token's derivative along it.

    Args:
        coefficients: of ∇H_w, by `sequence_coefficients`.
        d_log_prob: D_Δ s_k, [responses, tokens].
        responses: which tokens count.
        level: confidence level.
    """
    shares = coefficients.per_prompt(responses, torch.zeros_like(d_log_prob), d_log_prob)
    delta = float(shares.mean())
    return _change(delta, shares - delta, shares, torch.full_like(shares, math.nan), level)


def change_by_gradients(
    x_along_y: Tensor,
    y_along_x: Tensor,
    step_size: float,
    *,
    products: Tensor | None = None,
    y_along_halves: tuple[Tensor, Tensor] | None = None,
    sharpening: Tensor | None = None,
    level: float = 0.95,
) -> EntropyChange:
    """δH = η X̄·Ȳ for an update along the mean of the update prompts' own preconditioned gradients Y_p.

    The variances of X̄·Ȳ that each batch's scatter shows both hold tr(Σ_X Σ_Y)/(B_E·B_U), which then counts twice. It is
    taken out exactly, where every product X_n·Y_p is known, or left out of the second variance, where the means of the
    two halves of the evaluation prompts take the place of X̄.

    Args:
        x_along_y: X_n·Ȳ, [evaluation prompts].
        y_along_x: Y_p·X̄, [update prompts].
        step_size: η.
        products: X_n·Y_p, [evaluation prompts, update prompts].
        y_along_halves: Y_p·X̄₁ and Y_p·X̄₂, X̄₁ and X̄₂ being means over halves of the evaluation prompts.
        sharpening: what of X_n·Ȳ is from distributions that change where they are, where that is known.
        level: confidence level.

    Raises:
        ValueError: when neither or both of `products` and `y_along_halves` are given.
    """
    if (products is None) == (y_along_halves is None):
        raise ValueError("pass one of products= and y_along_halves=: without, noise common to both is counted twice")
    x, y = x_along_y.double(), y_along_x.double()
    delta = float(x.mean())
    of_sharpening = torch.full_like(x, math.nan) if sharpening is None else step_size * sharpening.double()
    doubt = ""
    of_rounding = _ROUNDING * float(x.std() if len(x) > 1 else 0.0)
    if not math.isclose(delta, float(y.mean()), rel_tol=_ROUNDING, abs_tol=of_rounding):
        doubt = (
            f"the means of X_n·Ȳ and of Y_p·X̄ are both X̄·Ȳ, got {delta:g} and {float(y.mean()):g}: derivatives or sums "
            "are lost in rounding"
        )
    if min(len(x), len(y)) < 2:
        nan, n = math.nan, f"{len(x)} and {len(y)}"
        reason = f"the standard error needs at least 2 prompts to evaluate and 2 to update on, got {n}"
        return EntropyChange(nan, nan, nan, nan, reason, step_size * x, of_sharpening, nan, nan, nan)
    v_x = _variance_of_mean(x, x)
    if products is not None:
        g = products.double()
        centred = g - g.mean(0) - g.mean(1, keepdim=True) + g.mean()
        v_y = _variance_of_mean(y, y)
        twice = float(centred.square().sum()) / (len(x) * (len(x) - 1) * len(y) * (len(y) - 1))
    else:
        assert y_along_halves is not None
        v_y, twice = _variance_of_mean(y_along_halves[0].double(), y_along_halves[1].double()), 0.0
    scale = step_size**2
    return _with_interval(
        step_size * delta,
        scale * (v_x + v_y - twice),
        min(len(x), len(y)),
        level,
        per_prompt=step_size * x,
        sharpening=of_sharpening,
        v_x=scale * v_x,
        v_y=scale * v_y,
        double_count=scale * twice if products is not None else math.nan,
        doubt=doubt,
    )


def _variance_of_mean(a: Tensor, b: Tensor) -> float:
    """Unbiased covariance of two means over the same samples."""
    n = len(a)
    return float(((a - a.mean()) * (b - b.mean())).sum()) / (n * (n - 1))


def _change(delta: float, influence: Tensor, shares: Tensor, sharpening: Tensor, level: float) -> EntropyChange:
    n = len(influence)
    if n < 2:
        nan = math.nan
        reason = f"the standard error needs at least 2 evaluation prompts, got {n}"
        return EntropyChange(nan, nan, nan, nan, reason, shares, sharpening, nan)
    v_x = float(influence.square().sum()) / (n * (n - 1))
    return _with_interval(delta, v_x, n, level, per_prompt=shares, sharpening=sharpening, v_x=v_x)


def _with_interval(
    delta: float,
    variance: float,
    n: int,
    level: float,
    *,
    per_prompt: Tensor,
    sharpening: Tensor,
    v_x: float,
    v_y: float = 0.0,
    double_count: float = 0.0,
    doubt: str = "",
) -> EntropyChange:
    se, reason = math.nan, "the variances' estimates cancel: use more prompts"
    if variance >= 0.0:
        se, reason = math.sqrt(variance), doubt
    half = student_t_quantile(0.5 + level / 2, n - 1) * se
    return EntropyChange(
        delta,
        se,
        delta - half,
        delta + half,
        reason,
        per_prompt,
        sharpening,
        v_x,
        v_y,
        double_count,
    )
