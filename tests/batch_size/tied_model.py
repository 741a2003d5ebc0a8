"""A byte model that may share its embedding with its head, and its losses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Tied(nn.Module):
    """A byte model whose output head is its embedding."""

    def __init__(self, *, sparse: bool = False, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16, sparse=sparse)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 40, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


def token_losses(model: nn.Module, sizes: list[int]) -> list[Callable[[], Tensor]]:
    generator = torch.Generator().manual_seed(0)
    losses = []
    for n in sizes:
        tokens = torch.randint(40, (n, 9), generator=generator)
        losses.append(lambda t=tokens: nn.functional.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()))
    return losses
