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

    def log_probs(self, theta: tuple[Tensor, ...]) -> Tensor:
        """Of each next token, given the prompt, the place and the last token; [prompts, places, tokens, tokens]."""
        embedding, hidden, out = theta
        x = torch.tanh(self._prompts[:, None, None] + self._places[:, None] + embedding)
        logits = torch.tanh(x @ hidden + x) @ out + self._bias
        return logits.log_softmax(-1)

    def rate(self, theta: tuple[Tensor, ...]) -> float:
        """R = E[Σ H]/E[T], exactly; all prompts weigh the same."""
        reached = torch.zeros(N_PROMPTS, N_TOKENS, dtype=torch.float64)  # of the last token, if no end came before
        reached[:, 1] = 1.0
        entropy = length = 0.0
        for log_p in self.log_probs(theta).unbind(1):
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
        for up_to in self.log_probs(self.theta).exp().cumsum(-1).unbind(1):
            # By the inverse of the distribution, in float64: fast for many rows.
            u = torch.rand(len(prompt), 1, generator=generator, dtype=torch.float64)
            taken = (up_to[prompt, last] < u).sum(-1).clamp(max=N_TOKENS - 1)
            mask.append(~is_over)
            last = torch.where(is_over, END, taken)
            tokens.append(last)
            is_over = is_over | (last == END)
        return torch.stack(tokens, 1), torch.stack(mask, 1)

    def score(self, theta: tuple[Tensor, ...], prompt: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """s_k and H_k; [responses, places] each."""
        log_p = self.log_probs(theta)
        last = torch.cat([torch.ones_like(tokens[:, :1]), tokens[:, :-1]], 1)
        reached = prompt[:, None], torch.arange(self.longest), last
        return log_p[(*reached, tokens)], -(log_p.exp() * log_p).sum(-1)[reached]
