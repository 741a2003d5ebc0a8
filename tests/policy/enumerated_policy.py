"""A policy as a module of which all responses can be enumerated: 3 tokens, one ends a response, at most 3; float64."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from sonde.policy.scoring.rollouts import Rollouts
from tests.tiny_policy import END, LENGTH, LONGEST, MASK, N_TOKENS, RESPONSES

TAKEN = torch.tensor([[*y, *[END] * (LONGEST - len(y))] for y in RESPONSES])
_WIDTH = 7


class EnumeratedPolicy(nn.Module):
    """A recurrent cell that begins with features of the prompt."""

    def __init__(self, n_prompts: int = 300, seed: int = 17) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.n_prompts = n_prompts
        self.register_buffer("features", normal(n_prompts, _WIDTH))
        self.again = nn.Parameter(0.6 * normal(_WIDTH, _WIDTH))
        self.token = nn.Parameter(0.6 * normal(N_TOKENS, _WIDTH))
        self.out = nn.Parameter(1.3 * normal(_WIDTH, N_TOKENS) / _WIDTH**0.5)
        self.bias = nn.Parameter(0.2 * normal(N_TOKENS))

    def forward(self, prompt: Tensor, tokens: Tensor) -> Tensor:
        """log π of each next token, [responses, positions, tokens]."""
        features = self.features[prompt]  # type: ignore[index]
        hidden, logits = torch.tanh(features), []
        for k in range(tokens.shape[1]):
            logits.append(hidden @ self.out + self.bias)
            hidden = torch.tanh(hidden @ self.again + self.token[tokens[:, k]] + 0.3 * features)
        return torch.stack(logits, 1).log_softmax(-1)


def scores(model: nn.Module, rollouts: Rollouts, /) -> tuple[Tensor, Tensor]:
    """s and H of each token, as `TokenStatistics`."""
    return _scores(model, rollouts.inputs["prompt"], rollouts.inputs["tokens"])


def _scores(model: nn.Module, prompt: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    log_p = model(prompt, tokens)
    return log_p.gather(-1, tokens[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


@torch.no_grad()
def rate(model: EnumeratedPolicy) -> float:
    """R = E[Σ H]/E[T] over all prompts and responses, exactly."""
    n, m = model.n_prompts, len(RESPONSES)
    s, h = _scores(model, torch.arange(n).repeat_interleave(m), TAKEN.repeat(n, 1))
    mask = MASK.repeat(n, 1)
    p = torch.where(mask, s, 0.0).sum(1).exp()
    return float((p * torch.where(mask, h, 0.0).sum(1)).sum() / (p * LENGTH.repeat(n)).sum())


@torch.no_grad()
def responses(
    model: EnumeratedPolicy, n_prompts: int, generator: torch.Generator, *, n_each: int = 8, first: int = 0
) -> Rollouts:
    """Responses to prompts drawn at random, with the number of 1s as a reward."""
    prompt = torch.randint(model.n_prompts, (n_prompts,), generator=generator).repeat_interleave(n_each)
    tokens = torch.full((len(prompt), LONGEST), END)
    mask, is_over = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros(len(prompt), dtype=torch.bool)
    for k in range(LONGEST):
        drawn = torch.multinomial(model(prompt, tokens)[:, k].exp(), 1, generator=generator)[:, 0]
        mask[:, k] = ~is_over
        tokens[:, k] = torch.where(is_over, END, drawn)
        is_over = is_over | (tokens[:, k] == END)
    reward = ((tokens == 1) & mask).double().sum(1).view(-1, n_each)
    advantage = (reward - reward.mean(1, keepdim=True)).flatten()
    number = first + torch.arange(n_prompts).repeat_interleave(n_each)
    return Rollouts({"prompt": prompt, "tokens": tokens}, mask, number, advantage)


def after_step(model: EnumeratedPolicy, optimizer: torch.optim.Optimizer) -> EnumeratedPolicy:
    """The policy after a real step of a copy of the optimizer, with the gradients in `.grad`."""
    twin = copy.deepcopy(model)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    other = type(optimizer)(twin.parameters(), lr=optimizer.defaults["lr"])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.step()
    return twin
