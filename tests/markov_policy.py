"""A policy of long responses with exact entropy: the next token depends on the prompt, the place and the last token.

So the last token's distribution at each place follows from the one before, and nothing is enumerated; float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

N_PROMPTS, N_TOKENS, WIDTH, END = 64, 6, 10, 0


class MarkovPolicy:
    """Logits by a small network.

    Args:
        longest: tokens of the longest response; the end comes once in so many tokens, or so.
    """

    def __init__(self, longest: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.longest = longest
        self._prompts = 0.8 * randn(N_PROMPTS, WIDTH)
        place = torch.arange(longest, dtype=torch.float64)[:, None] * torch.arange(1, WIDTH + 1) * 6 / longest
        self._places = 0.5 * place.sin()
        self._bias = torch.zeros(N_TOKENS, dtype=torch.float64)
        self._bias[END] = -math.log(longest)
        self.theta = (0.8 * randn(N_TOKENS, WIDTH), 0.6 * randn(WIDTH, WIDTH), randn(WIDTH, N_TOKENS))
        self.direction = tuple(randn(*t.shape) for t in self.theta)

    def after(self, scale: float) -> tuple[Tensor, ...]:
        """Parameters moved by a multiple of a direction."""
        return tuple(t + scale * d for t, d in zip(self.theta, self.direction, strict=True))

    def log_probs(self, theta: tuple[Tensor, ...], prompt: Tensor, place: Tensor, last: Tensor) -> Tensor:
        """Of each next token; [..., tokens]."""
        embedding, hidden, out = theta
        x = torch.tanh(self._prompts[prompt] + self._places[place] + embedding[last])
        logits = torch.tanh(x @ hidden + x) @ out + self._bias
        return logits.log_softmax(-1)

    def rate(self, theta: tuple[Tensor, ...]) -> float:
        """R = E[Σ H]/E[T], exactly; all prompts weigh the same."""
        prompt = torch.arange(N_PROMPTS)[:, None].expand(-1, N_TOKENS)
        last = torch.arange(N_TOKENS).expand(N_PROMPTS, -1)
        reached = torch.zeros(N_PROMPTS, N_TOKENS, dtype=torch.float64)  # of the last token, if no end came before
        reached[:, 1] = 1.0
        entropy = length = 0.0
        for k in range(self.longest):
            log_p = self.log_probs(theta, prompt, torch.tensor(k), last)
            p = log_p.exp()
            entropy += float((reached * -(p * log_p).sum(-1)).sum())
            length += float(reached.sum())
            reached = (reached[..., None] * p).sum(1)
            reached[:, END] = 0.0
        return entropy / length

    def sample(self, prompt: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A response to each prompt, and its mask; [responses, places] each."""
        last, is_over = torch.ones_like(prompt), torch.zeros(len(prompt), dtype=torch.bool)
        tokens, mask = [], []
        for k in range(self.longest):
            p = self.log_probs(self.theta, prompt, torch.tensor(k), last).exp()
            # By the inverse of the distribution, in float64: fast for many rows.
            u = torch.rand(len(prompt), 1, generator=generator, dtype=torch.float64)
            taken = (p.cumsum(-1) < u).sum(-1).clamp(max=N_TOKENS - 1)
            mask.append(~is_over)
            last = torch.where(is_over, END, taken)
            tokens.append(last)
            is_over = is_over | (last == END)
        return torch.stack(tokens, 1), torch.stack(mask, 1)

    def score(self, theta: tuple[Tensor, ...], prompt: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """s_k and H_k; [responses, places] each."""
        before = torch.cat([torch.ones_like(tokens[:, :1]), tokens[:, :-1]], 1)
        places = torch.arange(self.longest).expand_as(tokens)
        log_p = self.log_probs(theta, prompt[:, None].expand_as(tokens), places, before)
        return log_p.gather(-1, tokens[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
