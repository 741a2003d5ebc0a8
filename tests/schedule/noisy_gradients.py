"""A model whose B_simple is known, whatever its weights: the gradient of a row is the row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sonde

DIMS, ROWS = 32, 4
"""Of a row, and rows of a micro-batch."""
B_SIMPLE = 40.0
MEAN = (1 / B_SIMPLE) ** 0.5
"""Of each element of a row, of variance 1: tr Σ = DIMS and |G|² = DIMS / B_SIMPLE."""


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DIMS))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def attached(model: nn.Module, optimizer: Any, **options: Any) -> sonde.NoiseScaleProbe:
    settings: dict[str, Any] = {"unit": "rows", "verbose": False, "groups": None, "every": 1, "per_example": "never"}
    return sonde.attach(model, optimizer, **(settings | options))


def micro_batches(window: int, n: int, *, rank: int = 0, n_ranks: int = 1) -> list[Tensor]:
    """Of one rank: other rows for another window and another rank."""
    generator = torch.Generator().manual_seed(1000 * window + rank)
    return [MEAN + torch.randn(ROWS, DIMS, generator=generator) for _ in range(n)]


def train(
    model: nn.Module,
    optimizer: Any,
    schedule: sonde.BatchSchedule,
    windows: range,
    after: Callable[[int, list[Tensor]], object] = lambda window, pieces: None,
    given: Callable[[int, int], int] = lambda window, said: said,
) -> list[int]:
    """The loop of the docs, or one that takes another number than the schedule says in some windows.

    Returns:
        The micro-batches of each window.
    """
    counts = []
    for window in windows:
        pieces = micro_batches(window, given(window, schedule.micro_batches))
        for x in pieces:
            (model(x).mean() / len(pieces)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after(window, pieces)
        counts.append(len(pieces))
    return counts
