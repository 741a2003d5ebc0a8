"""A policy as a module, small enough for a backward per prompt, and its rollouts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.token_statistics import CausalLMStatistics

N_TOKENS, END, LONGEST = 7, 0, 6
"""Tokens of the vocabulary; the token that ends a response; most tokens in a response."""
STATISTICS = CausalLMStatistics()


class SmallPolicy(nn.Module):
    """Logits of the next token, from the last token and the mean of all tokens so far."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.token = nn.Embedding(N_TOKENS, 12)
        self.position = nn.Embedding(16, 12)
        self.hidden = nn.Linear(24, 24)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(24, N_TOKENS)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[responses, length] → [responses, length, tokens]."""
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = self.token(input_ids) + self.position(position)
        past = last.cumsum(1) / (position[:, None] + 1)
        logits: Tensor = self.out(self.dropout(torch.tanh(self.hidden(torch.cat([last, past], -1)))))
        return logits


def policy(seed: int = 0, dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> SmallPolicy:
    """A policy that is far from uniform."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SmallPolicy(dropout)
        with torch.no_grad():
            model.out.weight.mul_(3.0)
    return model.to(dtype)


@torch.no_grad()
def sample(model: nn.Module, prompts: list[int], n_each: int = 4, longest: int = LONGEST) -> Rollouts:
    """Responses by torch's global random numbers, at temperature 1. The reward is the number of 2s."""
    number = torch.tensor(prompts).repeat_interleave(n_each)
    ids = torch.stack([1 + number % 5, 1 + number // 5 % 5], 1)
    is_over = torch.zeros(len(ids), dtype=torch.bool)
    mask = []
    for _ in range(longest):
        mask.append(~is_over)
        taken = torch.multinomial(model(ids)[:, -1].softmax(-1), 1)[:, 0]
        taken = torch.where(is_over, END, taken)
        ids = torch.cat([ids, taken[:, None]], 1)
        is_over = is_over | (taken == END)
    chosen = torch.stack(mask, 1)
    reward = ((ids[:, 2:] == 2) & chosen).sum(1).float()
    advantage = (reward.view(-1, n_each) - reward.view(-1, n_each).mean(1, keepdim=True)).flatten()
    texts = {n: f"prompt {n}" for n in prompts}
    return Rollouts({"input_ids": ids}, chosen, number, advantage, texts=texts)


def drawn(model: nn.Module, first: int, n_prompts: int, *, seed: int, n_each: int = 4) -> Rollouts:
    """Responses to prompts from `first` on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return sample(model, list(range(first, first + n_prompts)), n_each)


def rollouts(**changes: Any) -> Rollouts:
    """Responses to 4 prompts, with whatever a test changes in them."""
    made = drawn(policy(), 0, 4, seed=1)
    fields = {"inputs": made.inputs, "mask": made.mask, "prompt": made.prompt, "advantage": made.advantage}
    return Rollouts(**(fields | changes))


def loss(model: nn.Module, rollouts: Rollouts) -> Tensor:
    """The loss of the policy gradient, a mean over responses."""
    s, _ = STATISTICS(model, rollouts)
    return -(rollouts.credit().to(s) * s).sum() / len(rollouts)


def optimizer_of(model: nn.Module, kind: str = "adamw", lr: float = 1e-3) -> torch.optim.Optimizer:
    """An optimizer with state: it has taken a few steps on other prompts."""
    made: dict[str, Any] = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=lr, weight_decay=0.1),
        "sgd": lambda p: torch.optim.SGD(p, lr=lr),
        "momentum": lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=lr),
    }
    optimizer: torch.optim.Optimizer = made[kind](model.parameters())
    for k in range(3):
        optimizer.zero_grad()
        loss(model, drawn(model, 1000 + 8 * k, 8, seed=100 + k)).backward()
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def real_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """θ⁺ − θ by name, as the optimizer takes it on a copy; gradients are in `.grad`."""
    twin = copy.deepcopy(model)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    state = copy.deepcopy(optimizer.state_dict())
    other = type(optimizer)(twin.parameters(), **{k: v for k, v in optimizer.defaults.items() if k == "lr"})
    other.load_state_dict(state)
    other.step()
    return {
        name: q.detach() - p.detach() for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True)
    }
