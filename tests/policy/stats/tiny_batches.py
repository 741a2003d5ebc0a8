"""Batches of responses that the tiny policy samples, as a trainer draws them."""

from __future__ import annotations

import torch
from torch import Tensor

from sonde.policy.stats.entropy_gradient import Responses
from tests import tiny_policy as tiny

THETA = tiny.parameters()
S, H = tiny.tokens(THETA)
P = tiny.probabilities(THETA)
J = tiny.jacobians(THETA)
DIRECTION = torch.randn(tiny.DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
D_S, D_H = J.log_prob @ DIRECTION, J.entropy @ DIRECTION


def sampled(n_prompts: int, group: int, generator: torch.Generator) -> tuple[Responses, Tensor, Tensor]:
    """A batch as a trainer draws it: prompts from all there are, a group of responses to each."""
    prompts = torch.randint(tiny.N_PROMPTS, (n_prompts,), generator=generator)
    picked = torch.multinomial(P[prompts], group, replacement=True, generator=generator).flatten()
    numbers = torch.arange(n_prompts).repeat_interleave(group)
    return Responses(tiny.MASK[picked], numbers), prompts.repeat_interleave(group), picked
