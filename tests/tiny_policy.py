"""A policy small enough to enumerate: 3 tokens, one of them ends the response, at most 3 tokens long; float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

N_TOKENS, LONGEST, END = 3, 3, 0
N_PROMPTS = 5
RESPONSES = [
    y
    for n in range(1, LONGEST + 1)
    for y in itertools.product(range(N_TOKENS), repeat=n)
    if END not in y[:-1] and (y[-1] == END or n == LONGEST)
]
"""All 15 possible responses."""
MASK = torch.tensor([[k < len(y) for k in range(LONGEST)] for y in RESPONSES])
LENGTH = MASK.sum(1).double()
DIM = 16


def parameters(seed: int = 0, scale: float = 0.7) -> Tensor:
    return scale * torch.randn(DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _features() -> Tensor:
    """Features of every prompt, prefix and token; [prompts, responses, position, token, parameters]."""
    generator = torch.Generator().manual_seed(1)
    made: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    rows = torch.zeros(N_PROMPTS, len(RESPONSES), LONGEST, N_TOKENS, DIM, dtype=torch.float64)
    for p, (i, y) in itertools.product(range(N_PROMPTS), enumerate(RESPONSES)):
        for k in range(len(y)):
            if (p, y[:k]) not in made:
                made[p, y[:k]] = torch.randn(N_TOKENS, DIM, generator=generator, dtype=torch.float64) / DIM**0.5
            rows[p, i, k] = made[p, y[:k]]
    return rows


FEATURES = _features()
_TAKEN = torch.tensor([[*y, *[0] * (LONGEST - len(y))] for y in RESPONSES])


def tokens(theta: Tensor) -> tuple[Tensor, Tensor]:
    """s_k and H_k of every response to every prompt, 0 past its end; [prompts, responses, position] each."""
    log_p = (torch.sin(3.0 * FEATURES @ theta) + FEATURES @ theta).log_softmax(-1)
    s = log_p.gather(-1, _TAKEN.expand(N_PROMPTS, -1, -1)[..., None])[..., 0]
    h = -(log_p.exp() * log_p).sum(-1)
    return torch.where(MASK, s, 0.0), torch.where(MASK, h, 0.0)


def probabilities(theta: Tensor) -> Tensor:
    """Probability of each response given its prompt, [prompts, responses]."""
    return tokens(theta)[0].sum(-1).exp()


def rate(theta: Tensor) -> Tensor:
    """R = E[Σ H]/E[T], exactly; all prompts weigh the same."""
    p, h = probabilities(theta), tokens(theta)[1].sum(-1)
    return (p * h).sum() / (p * LENGTH).sum()


def mean_length(theta: Tensor) -> float:
    return float((probabilities(theta) * LENGTH).sum() / N_PROMPTS)


def weighted_entropy(theta: Tensor, weights: Tensor) -> Tensor:
    """H_w = E[−Σ w_k s_k], exactly; weights: [responses, position]."""
    p, s = probabilities(theta), tokens(theta)[0]
    return -(p * (weights * s).sum(-1)).sum() / N_PROMPTS


def gradient(function: object, theta: Tensor) -> Tensor:
    theta = theta.clone().requires_grad_()
    (g,) = torch.autograd.grad(function(theta), theta)  # type: ignore[operator]
    return g  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Jacobians:
    """∇s_k and ∇H_k of every response to every prompt; [prompts, responses, position, parameters]."""

    log_prob: Tensor
    entropy: Tensor


def jacobians(theta: Tensor) -> Jacobians:
    return Jacobians(*torch.autograd.functional.jacobian(tokens, theta))
