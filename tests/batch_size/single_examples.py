"""Windows whose single examples are read, and the same by one backward for each example in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sonde
from tests.batch_size.loops import Rows, flat_grad, mean_loss, pieces_of
from tests.oracles import window_by_hand


class Scaled(nn.Module):
    """Two layers, and a parameter that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 20), nn.Linear(20, 3)
        self.own = nn.Parameter(torch.full((20,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.own)


def shares(model: nn.Module, x: Tensor, y: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """Each example's term of the loss; without weights they add up to `mean_loss`."""
    own = torch.tensor(weights or [1.0] * len(x), dtype=x.dtype)
    return (model(x) - y).square().sum(-1) * own / own.sum()


def by_hand(
    model: nn.Module,
    pieces: Sequence[tuple[Tensor, Tensor]],
    *,
    weights: Sequence[float] | None = None,
    unit_weights: Sequence[Sequence[float]] | None = None,
    keep: Sequence[bool] | None = None,
) -> tuple[float, float]:
    """tr Σ and |G|² from one backward for each example; `keep` says which elements count."""
    gradients, example_weights = [], []
    weights = weights or [1.0] * len(pieces)
    for k, (x, y) in enumerate(pieces):
        own = unit_weights[k] if unit_weights else [1.0] * len(x)
        for b, v in enumerate(own):
            if v:
                gradients.append(weights[k] * flat_grad(model, shares(model, x, y, own)[b]))
                example_weights.append(weights[k] * v / sum(own))
    kept = slice(None) if keep is None else torch.tensor(keep)
    gradients = [g[kept] for g in gradients]
    return window_by_hand(gradients, example_weights, [1.0] * len(gradients), torch.stack(gradients).sum(0))


def assert_as(reading: sonde.NoiseScaleReading, expected: tuple[float, float]) -> None:
    assert reading.windows == 1, reading.dropped
    assert reading.trace_cov == pytest.approx(expected[0], rel=2e-6)
    assert reading.grad_sq == pytest.approx(expected[1], rel=2e-6, abs=2e-6 * expected[0])


def run(model: nn.Module, probe: Any, *windows: Sequence[Rows], units: Sequence[float] | None = None) -> None:
    """Windows at fixed weights, each of the given pieces."""
    for pieces in windows:
        for k, (x, y) in enumerate(pieces):
            with probe.piece(units=units[k] if units else len(x)):
                mean_loss(model, x, y).backward()
        probe.step()
        model.zero_grad()


def drawn(windows: int, *sizes: int, first: int = 0) -> list[list[Rows]]:
    return [pieces_of(*sizes, seed=first + window) for window in range(windows)]
