"""A policy of long responses with exact entropy: the next token depends on the prompt, the place and the last token.

So the last token's distribution at each place follows from the one before, and nothing is enumerated; float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

N_PROMPTS, N_TOKENS, WIDTH, END, FIRST = 64, 6, 10, 0, 1


class MarkovPolicy:
    """Logits by a small network.

    Args:
        longest: tokens of the longest response; the end comes once in so many tokens, or so.
        moved: how far its parameters are moved along a direction; the same direction for all policies.
    """

    def __init__(self, longest: int, *, moved: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        prompts = 0.8 * randn(N_PROMPTS, WIDTH)
        place = torch.arange(longest, dtype=torch.float64)[:, None] * torch.arange(1, WIDTH + 1) * 6 / longest
        bias = torch.zeros(N_TOKENS, dtype=torch.float64)
        bias[END] = -math.log(longest)
        theta = (0.8 * randn(N_TOKENS, WIDTH), 0.6 * randn(WIDTH, WIDTH), randn(WIDTH, N_TOKENS))
        last, hidden, out = (t + moved * randn(*t.shape) for t in theta)
        x = torch.tanh(prompts[:, None, None] + 0.5 * place.sin()[:, None] + last)
        self.longest = longest
        # [prompts, places, last token, next token] and [prompts, places, last token]
        self._log_p = (torch.tanh(x @ hidden + x) @ out + bias).log_softmax(-1)
        self._entropy = -(self._log_p.exp() * self._log_p).sum(-1)

    def rate(self) -> float:
        """R = E[Σ H]/E[T], exactly; all prompts weigh the same."""
        reached = torch.zeros(N_PROMPTS, N_TOKENS, dtype=torch.float64)  # of the last token, if no end came before
        reached[:, FIRST] = 1.0
        entropy = length = 0.0
        for place, p in enumerate(self._log_p.exp().unbind(1)):
            entropy += float((reached * self._entropy[:, place]).sum())
            length += float(reached.sum())
            reached = (reached[..., None] * p).sum(1)
            reached[:, END] = 0.0
        return entropy / length

    def sample(self, prompt: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A response to each prompt, and its mask; [responses, places] each."""
        last, is_over = torch.full_like(prompt, FIRST), torch.zeros(len(prompt), dtype=torch.bool)
        tokens, mask = [], []
        for up_to in self._log_p.exp().cumsum(-1).unbind(1):
            # By the inverse of the distribution, in float64: fast for many rows.
            u = torch.rand(len(prompt), 1, generator=generator, dtype=torch.float64)
            taken = (up_to[prompt, last] < u).sum(-1).clamp(max=N_TOKENS - 1)
            mask.append(~is_over)
            last = torch.where(is_over, END, taken)
            tokens.append(last)
            is_over = is_over | (last == END)
        return torch.stack(tokens, 1), torch.stack(mask, 1)

    def score(self, prompt: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """s_k and H_k; [responses, places] each."""
        last = torch.cat([torch.full_like(tokens[:, :1], FIRST), tokens[:, :-1]], 1)
        reached = prompt[:, None], torch.arange(self.longest), last
        return self._log_p[(*reached, tokens)], self._entropy[reached]
