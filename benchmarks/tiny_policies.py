"""Two tiny policies whose entropy is known exactly, with a reward to learn: for runs of many seeds, in float64."""

from __future__ import annotations

import itertools
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

import sonde
from sonde.policy.stats.entropy_gradient import Responses

GROUP = 8
"""Responses to a prompt."""


class Scores(NamedTuple):
    """A policy's scores of responses: log-probabilities and entropies of the tokens, [responses, tokens]."""

    log_prob: Tensor
    entropy: Tensor
    responses: Responses


class TinyPolicy(Protocol):
    """A policy that can be sampled, scored, and whose entropy is exact."""

    n_prompts: int
    longest: int

    def next_token(self, prompt: Tensor, tokens: Tensor, place: int) -> Tensor:
        """Log-probabilities of the token at a place, behind the tokens before it; [responses, vocabulary]."""

    def scores(self, prompt: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities of the tokens at all places; [responses, places, vocabulary]."""

    def rate(self) -> float:
        """R = E[Σ H]/E[T], exactly; all prompts weigh the same."""


def _randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Recurrent(nn.Module):
    """3 tokens, the last of which ends a response, at most 3 long: all responses can be listed."""

    n_prompts, longest, vocabulary, width = 48, 3, 3, 7

    def __init__(self, seed: int) -> None:
        super().__init__()
        w, v = self.width, self.vocabulary
        self.features: Tensor
        self.register_buffer("features", _randn(10 * seed, self.n_prompts, w))
        self.hidden = nn.Parameter(0.6 * _randn(10 * seed + 1, w, w))
        self.token = nn.Parameter(0.6 * _randn(10 * seed + 2, v, w))
        self.out = nn.Parameter(1.3 * _randn(10 * seed + 3, w, v) / w**0.5)

    def scores(self, prompt: Tensor, tokens: Tensor) -> Tensor:
        state, logits = torch.tanh(self.features[prompt]), []
        for taken in tokens.unbind(1):
            logits.append(state @ self.out)
            state = torch.tanh(state @ self.hidden + self.token[taken] + 0.3 * self.features[prompt])
        return torch.stack(logits, 1).log_softmax(-1)

    def next_token(self, prompt: Tensor, tokens: Tensor, place: int) -> Tensor:
        return self.scores(prompt, tokens)[:, place]

    @torch.no_grad()
    def rate(self) -> float:
        end = self.vocabulary - 1
        listed = [
            y
            for n in range(1, self.longest + 1)
            for y in itertools.product(range(self.vocabulary), repeat=n)
            if end not in y[:-1] and (y[-1] == end or n == self.longest)
        ]
        tokens = torch.tensor([[*y, *[end] * (self.longest - len(y))] for y in listed]).repeat(self.n_prompts, 1)
        length = torch.tensor([len(y) for y in listed]).repeat(self.n_prompts)
        log_p = self.scores(torch.arange(self.n_prompts).repeat_interleave(len(listed)), tokens)
        mask = torch.arange(self.longest) < length[:, None]
        p = (log_p.gather(-1, tokens[..., None])[..., 0] * mask).sum(1).exp()
        h = (-(log_p.exp() * log_p).sum(-1) * mask).sum(1)
        return float((p * h).sum() / (p * length).sum())


class Markov(nn.Module):
    """6 tokens, the last of which ends a response, at most 64 long. The next token depends on the prompt and the last
    token: the probability of each state at each place follows from the place before."""

    n_prompts, longest, vocabulary, width = 200, 64, 6, 8

    def __init__(self, seed: int, *, end_bias: float = -4.0, longest: int = 64) -> None:
        super().__init__()
        w, v = self.width, self.vocabulary
        self.longest = longest
        self.features: Tensor
        self.bias: Tensor
        self.register_buffer("features", _randn(10 * seed, self.n_prompts, w))
        self.register_buffer("bias", torch.tensor([*[0.0] * (v - 1), end_bias], dtype=torch.float64))
        self.last = nn.Parameter(_randn(10 * seed + 1, v + 1, w))  # the last row: nothing sampled yet
        self.mix = nn.Parameter(0.6 * _randn(10 * seed + 2, w, w))
        self.out = nn.Parameter(_randn(10 * seed + 3, w, v) / w**0.5)

    def _after(self, prompt: Tensor) -> Tensor:
        """Log-probabilities after each last token; [prompts, last, next]."""
        state = torch.tanh(self.last + (self.features[prompt] @ self.mix)[:, None])
        return (state @ self.out + self.bias).log_softmax(-1)

    def _previous(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=self.vocabulary)

    def scores(self, prompt: Tensor, tokens: Tensor) -> Tensor:
        index = self._previous(tokens)[..., None].expand(-1, -1, self.vocabulary)
        return self._after(prompt).gather(1, index)

    def next_token(self, prompt: Tensor, tokens: Tensor, place: int) -> Tensor:
        state = torch.tanh(self.last[self._previous(tokens)[:, place]] + self.features[prompt] @ self.mix)
        return (state @ self.out + self.bias).log_softmax(-1)

    @torch.no_grad()
    def rate(self) -> float:
        log_p = self._after(torch.arange(self.n_prompts))
        p, h = log_p.exp(), -(log_p.exp() * log_p).sum(-1)
        reached = torch.zeros_like(h)
        reached[:, -1] = 1.0
        entropy = length = 0.0
        for _ in range(self.longest):
            entropy, length = entropy + float((reached * h).sum()), length + float(reached.sum())
            at = torch.einsum("ml,mln->mn", reached, p)
            reached = torch.zeros_like(h)
            reached[:, : self.vocabulary - 1] = at[:, :-1]  # a response that has ended goes nowhere
        return entropy / length


@torch.no_grad()
def sampled(policy: TinyPolicy, n_prompts: int, generator: torch.Generator, group: int = GROUP) -> sonde.Rollouts:
    """Responses to prompts at random. The reward is the share of the token that the prompt asks for."""
    asked = torch.randint(policy.n_prompts, (n_prompts,), generator=generator)
    prompt = asked.repeat_interleave(group)
    end = policy.vocabulary - 1  # type: ignore[attr-defined]
    tokens = torch.full((len(prompt), policy.longest), end)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    is_over = torch.zeros(len(prompt), dtype=torch.bool)
    u = torch.rand(len(prompt), policy.longest, generator=generator, dtype=torch.float64)
    for place in range(policy.longest):
        up_to = policy.next_token(prompt, tokens, place).exp().cumsum(-1)
        taken = (up_to < u[:, place : place + 1]).sum(-1).clamp(max=end)
        mask[:, place] = ~is_over
        tokens[:, place] = torch.where(is_over, end, taken)
        is_over = is_over | (tokens[:, place] == end)
    wanted = (tokens == (prompt % end)[:, None]) & mask
    reward = (wanted.double().sum(1) / mask.sum(1)).view(-1, group)
    advantage = (reward - reward.mean(1, keepdim=True)).flatten()
    numbers = torch.arange(n_prompts).repeat_interleave(group)
    return sonde.Rollouts({"prompt": prompt, "tokens": tokens}, mask, numbers, advantage=advantage)


def statistics(policy: TinyPolicy, rollouts: sonde.Rollouts) -> tuple[Tensor, Tensor]:
    """The token statistics of sonde's probes."""
    log_p = policy.scores(rollouts.inputs["prompt"], rollouts.inputs["tokens"])
    return log_p.gather(-1, rollouts.inputs["tokens"][..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def learn(policy: TinyPolicy, rollouts: sonde.Rollouts) -> None:
    """The backward of Dr. GRPO's loss."""
    s, _ = statistics(policy, rollouts)
    (-(rollouts.credit() * s).sum() / rollouts.mask.sum()).backward()
