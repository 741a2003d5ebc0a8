"""Batches of responses that the tiny policy samples, as a trainer draws them."""

from __future__ import annotations

import math

import torch
from benchmarks.tiny_policies import Scores
from torch import Tensor

from sonde.policy.stats.entropy_gradient import Responses
from tests import tiny_policy as tiny

THETA = tiny.parameters()
S, H = tiny.tokens(THETA)
P = tiny.probabilities(THETA)
J = tiny.jacobians(THETA)
DIRECTION = torch.randn(tiny.DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
D_S, D_H = J.log_prob @ DIRECTION, J.entropy @ DIRECTION


def scores_at(theta: Tensor, at: tuple[Tensor, Tensor], responses: Responses) -> Scores:
    """Scores of these responses to these prompts by the policy with these parameters."""
    s, h = tiny.tokens(theta)
    return Scores(s[at], h[at], responses)


def uniform_log_prob() -> Tensor:
    """Log-probabilities of a policy that samples all 15 responses equally often; [responses, position]."""
    s = torch.zeros(len(tiny.RESPONSES), tiny.LONGEST, dtype=torch.float64)
    for i, y in enumerate(tiny.RESPONSES):
        for k in range(len(y)):
            here = sum(r[: k + 1] == y[: k + 1] for r in tiny.RESPONSES)
            before = sum(r[:k] == y[:k] for r in tiny.RESPONSES)
            s[i, k] = math.log(here / before)
    return s


def sampled(
    n_prompts: int, group: int, generator: torch.Generator, policy: Tensor = P
) -> tuple[Responses, Tensor, Tensor]:
    """A batch as a trainer draws it: prompts from all there are, a group of responses to each.

    Args:
        n_prompts: number of prompts.
        group: responses to each.
        generator: of the random numbers.
        policy: probability of each response given its prompt, [prompts, responses].
    """
    prompts = torch.randint(tiny.N_PROMPTS, (n_prompts,), generator=generator)
    picked = torch.multinomial(policy[prompts], group, replacement=True, generator=generator).flatten()
    numbers = torch.arange(n_prompts).repeat_interleave(group)
    return Responses(tiny.MASK[picked], numbers), prompts.repeat_interleave(group), picked
