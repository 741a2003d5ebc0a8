"""A ResNet with batch normalisation, one backward a step: what the loop says, and the number of its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sonde
from tests.batch_size.loops import attached

N = 32
TEACHER = torch.randn(64, 10, generator=torch.Generator().manual_seed(3))
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()),
            *(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.layers(x))


def resnet() -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*stem, Block(8), Block(8), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10))


def batches(seed: int, n: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        x = torch.randn(N, 1, 8, 8, generator=generator)
        yield x, (x.flatten(1) @ TEACHER + 4 * torch.randn(N, 10, generator=generator)).argmax(1)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, str]:
    """The model after 150 steps, and what the loop has said of its noise scale."""
    model = resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with attached(model, optimizer, unit="images", per_example="auto") as probe:
        for batch in batches(1, 150):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, str(probe.reading())


def test_the_loop_says_the_shortest_way_to_a_number(trained: tuple[nn.Module, str]) -> None:
    assert "not known yet" in trained[1]
    assert "sonde.measure(model, loss, loader, unit='images') on a checkpoint, in train mode" in trained[1]


def test_this_way_gives_the_exact_number(trained: tuple[nn.Module, str]) -> None:
    """N tr Cov(F)/|E F|², over 600 batches, which tell it to some 15 %."""
    model, _ = trained
    parameters = list(model.parameters())
    of_batches = [torch.autograd.grad(loss_of(model, batch), parameters) for batch in batches(2, 600)]
    gradients = torch.stack([torch.cat([g.flatten() for g in each]) for each in of_batches]).double()
    trace_cov = float(gradients.var(0).sum())
    exact = N * trace_cov / (float(gradients.mean(0).square().sum()) - trace_cov / len(gradients))
    measured = sonde.measure(model, loss_of, batches(5, 2000), unit="images", until=0.2)
    assert measured.reading.b_simple is not None
    assert 1 / 1.5 < measured.reading.b_simple / exact < 1.5
