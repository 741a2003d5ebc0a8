"""A policy that is about to take a step, and its gradients prompt by prompt."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor

from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.stats.entropy_change import sequence_coefficients
from sonde.policy.stats.entropy_gradient import Coefficients, per_token_coefficients
from tests.small_policy import STATISTICS, SmallPolicy, drawn, loss, optimizer_of, policy

N_E, N_U = 24, 12


def older(model: SmallPolicy) -> SmallPolicy:
    """Weights of some steps ago: less certain."""
    old = copy.deepcopy(model)
    with torch.no_grad():
        old.out.weight.mul_(0.8)
    return old


def stale(model: SmallPolicy, n: int, seed: int) -> Rollouts:
    """Responses of older weights, with the log-probabilities that they reported."""
    old = older(model)
    made = drawn(old, 0, n, seed=seed)
    with torch.no_grad():
        s, _ = STATISTICS(old, made)
    return dataclasses.replace(made, log_prob=torch.where(made.mask, s, torch.nan))


class Scene:
    """A policy about to take a step."""

    def __init__(self, kind: str = "adamw", lr: float = 1e-3, dtype: torch.dtype = torch.float32) -> None:
        self.model = policy(dtype=dtype)
        self.optimizer = optimizer_of(self.model, kind, lr)
        self.E = drawn(self.model, 0, N_E, seed=1)
        self.U = drawn(self.model, 200, N_U, seed=2)
        loss(self.model, self.U).backward()

    def probe(
        self, *, token_statistics: Any = None, sampler: Any = None, beside: Any = None, **options: Any
    ) -> EntropyChangeProbe:
        return EntropyChangeProbe(
            self.model,
            self.optimizer,
            EntropyChangeOptions(**options),
            token_statistics=token_statistics,
            sampler=sampler,
            beside=beside,
        )


def held(scene: Scene) -> list[Any]:
    """The training state, copied."""
    state = copy.deepcopy(scene.optimizer.state_dict())
    tensors = [p.detach().clone() for p in scene.model.parameters()]
    grads = [p.grad for p in scene.model.parameters()]
    copies = [None if g is None else g.clone() for g in grads]
    modes = [m.training for m in scene.model.modules()]
    return [tensors, grads, copies, state, modes, torch.get_rng_state()]


def assert_untouched(scene: Scene, before: list[Any]) -> None:
    tensors, grads, copies, state, modes, rng = before
    for p, old, grad, copied in zip(scene.model.parameters(), tensors, grads, copies, strict=True):
        assert torch.equal(p, old)
        assert p.grad is grad
        assert grad is None or torch.equal(grad, copied)
    now = scene.optimizer.state_dict()
    assert now["param_groups"] == state["param_groups"]
    for key, values in state["state"].items():
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(now["state"][key][name]), torch.as_tensor(value))
    assert [m.training for m in scene.model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), rng)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in scene.model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in scene.model.parameters())  # type: ignore[attr-defined]


def coefficients(objective: str, weights: str, scene: Scene) -> Coefficients:
    with torch.no_grad():
        s, h = STATISTICS(scene.model, scene.E)
    responses = scene.E.responses()
    if objective == "per_token":
        return per_token_coefficients(h, responses)
    return sequence_coefficients(s, h, responses, weights)  # type: ignore[arg-type]


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
