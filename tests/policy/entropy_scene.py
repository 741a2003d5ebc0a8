"""A policy that is about to take a step, and its gradients prompt by prompt."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.stats.entropy_gradient import Coefficients, per_token_coefficients, sequence_coefficients
from tests.small_policy import STATISTICS, drawn, loss, optimizer_of, policy

N_E, N_U = 24, 12


class Scene:
    """A policy about to take a step."""

    def __init__(self, kind: str = "adamw", lr: float = 1e-3, dtype: torch.dtype = torch.float32) -> None:
        self.model = policy(dtype=dtype)
        self.optimizer = optimizer_of(self.model, kind, lr)
        self.E = drawn(self.model, 0, N_E, seed=1)
        self.U = drawn(self.model, 200, N_U, seed=2)
        loss(self.model, self.U).backward()

    def probe(self, *, token_statistics: Any = None, sampler: Any = None, **options: Any) -> EntropyChangeProbe:
        return EntropyChangeProbe(
            self.model,
            self.optimizer,
            EntropyChangeOptions(**options),
            token_statistics=token_statistics,
            sampler=sampler,
        )


def coefficients(objective: str, weights: str, scene: Scene) -> Coefficients:
    with torch.no_grad():
        s, h = STATISTICS(scene.model, scene.E)
    responses = scene.E.responses()
    if objective == "per_token":
        return per_token_coefficients(h, responses)
    w = responses.mask.double() / (responses.length[:, None] if weights == "length" else 1.0)
    return sequence_coefficients(s, responses, weights=w, is_causal=weights == "one")


def gradient_per_prompt(scene: Scene, rollouts: Rollouts, c: Coefficients) -> Tensor:
    """Gradients by one backward for every prompt; [prompts, parameters], fp64."""
    model = copy.deepcopy(scene.model).double()
    gradients = []
    for prompt in rollouts.prompt.unique():
        own = (rollouts.prompt == prompt).nonzero()[:, 0]
        s, h = STATISTICS(model, rollouts.rows(own))
        total = (c.on_log_prob[own] * s + c.on_entropy[own] * h).sum()
        grads = torch.autograd.grad(total, list(model.parameters()))
        gradients.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(gradients)
