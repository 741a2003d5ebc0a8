"""A small regression that measurements are tested on, and what a measurement of it must give, from whole gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sonde.batch_size.stats.averages import window_lengths
from tests.batch_size.loops import flat_grad
from tests.oracles import window_by_hand

Batch = tuple[Tensor, Tensor]


def model_of(seed: int = 0) -> nn.Sequential:
    """A network that has learnt a little."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(40):
        loss(model, draw(64, generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def draw(n: int, generator: torch.Generator) -> Batch:
    x = torch.randn(n, 8, generator=generator)
    return x, x[:, :2] + 0.5 * torch.randn(n, 2, generator=generator)


def loss(model: Any, batch: Batch) -> Tensor:
    return example_loss(model(batch[0]), batch[1])


def example_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum(-1).mean()


def batches(sizes: Sequence[int], seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [draw(n, generator) for n in sizes]


def endless(data: Batch, size: int, seed: int) -> Iterator[Batch]:
    """Batches drawn with replacement from a finite data set."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(0, len(data[0]), (size,), generator=generator)
        yield data[0][rows], data[1][rows]


def by_hand(
    model: nn.Module, of_ranks: Sequence[Sequence[Batch]], groups: Sequence[slice] = (slice(None),)
) -> list[tuple[float, float]]:
    """tr Σ and |G|² of each group, averaged over windows, from the whole gradient of every batch on every rank.

    Args:
        model: plain.
        of_ranks: the batches of each rank.
        groups: where each group lies in the flat gradient.
    """
    left = [list(own) for own in of_ranks]
    units: list[float] = []
    estimates: list[list[tuple[float, float]]] = []
    for length in window_lengths(len(of_ranks)):
        taken = [own[:length] for own in left]
        left = [own[length:] for own in left]
        pieces = list(itertools.chain.from_iterable(taken))
        if len(pieces) < 2:
            break
        sizes = [float(len(x)) for x, _ in pieces]
        gradients = [flat_grad(model, loss(model, piece)) * n for piece, n in zip(pieces, sizes, strict=True)]
        mean = torch.stack(gradients).sum(0) / sum(sizes)
        estimates.append([window_by_hand([g[group] for g in gradients], sizes, sizes, mean[group]) for group in groups])
        units.append(sum(sizes))
    return [
        tuple(sum(n * e[i][k] for n, e in zip(units, estimates, strict=True)) / sum(units) for k in (0, 1))  # type: ignore[misc]
        for i in range(len(groups))
    ]
