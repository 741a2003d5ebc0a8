"""Losses that compare the rows of a batch: refused where rows are read one by one, and right where pieces are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sonde
from tests.batch_size.loops import attached

DIRECTIONS = torch.randn(10, 4, generator=torch.Generator().manual_seed(3))
Loss = Callable[[nn.Module, torch.Generator], Tensor]
ROWS = 32


def drawn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def views(model: nn.Module, generator: torch.Generator) -> Tensor:
    """Of 16 samples, one half of the batch each, normalised."""
    sample = drawn(generator, 16, 10)
    rows = torch.cat([sample + 0.5 * drawn(generator, 16, 10) for _ in range(2)])
    return functional.normalize(model(rows), dim=1)


def in_batch_negatives(model: nn.Module, generator: torch.Generator) -> Tensor:
    queries, keys = views(model, generator).chunk(2)
    return functional.cross_entropy(10 * queries @ keys.T, torch.arange(16))


def simclr(model: nn.Module, generator: torch.Generator) -> Tensor:
    rows = views(model, generator)
    products = (5 * rows @ rows.T).masked_fill(torch.eye(ROWS, dtype=torch.bool), -torch.inf)
    return functional.cross_entropy(products, torch.arange(ROWS).roll(16))


def barlow_twins(model: nn.Module, generator: torch.Generator) -> Tensor:
    first, second = ((v - v.mean(0)) / v.std(0) for v in views(model, generator).chunk(2))
    off = first.T @ second / 16 - torch.eye(4)
    return off.diagonal().square().sum() + 0.01 * off.square().sum()


def preference(model: nn.Module, generator: torch.Generator, *, neighbours: bool) -> Tensor:
    """Chosen and rejected in one forward, as neighbours or in halves."""
    prompts = drawn(generator, 16, 10)
    first, second = (prompts + 0.5 * drawn(generator, 16, 10) for _ in range(2))
    is_worse = ((first - second) @ DIRECTIONS[:, 0] + drawn(generator, 16) < 0)[:, None]
    chosen, rejected = torch.where(is_worse, second, first), torch.where(is_worse, first, second)
    if neighbours:
        scores = model(torch.stack([chosen, rejected], 1).flatten(0, 1))[:, 0].view(16, 2)
    else:
        scores = model(torch.cat([chosen, rejected]))[:, 0].view(2, 16).T
    return -functional.logsigmoid(scores[:, 0] - scores[:, 1]).mean()


def each_alone(model: nn.Module, generator: torch.Generator) -> Tensor:
    """The control: rows of a batch in no relation."""
    x = drawn(generator, ROWS, 10)
    labels = (x @ DIRECTIONS + 2 * drawn(generator, ROWS, 4)).argmax(1)
    return functional.cross_entropy(model(x), labels)


LOSSES: dict[str, Loss] = {
    "in-batch negatives": in_batch_negatives,
    "SimCLR": simclr,
    "Barlow twins": barlow_twins,
    "pairs as neighbours": lambda *given: preference(*given, neighbours=True),
    "pairs in halves": lambda *given: preference(*given, neighbours=False),
}


def trained(loss: Loss, *, steps: int, pieces: int = 1, rate: float = 0.01) -> tuple[sonde.NoiseScaleProbe, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=rate), torch.Generator().manual_seed(1)
    with attached(model, optimizer, unit="rows", units_per_piece=ROWS, per_example="auto") as probe:
        for _ in range(steps):
            for _ in range(pieces):
                (loss(model, generator) / pieces).backward()
            optimizer.step()
            optimizer.zero_grad()
        probe.reading()
    return probe, model


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_rows_that_a_loss_compares_give_no_number(loss: Loss) -> None:
    probe, _ = trained(loss, steps=200)
    assert probe.alerts.keys() & {"negative_signal", "dependent_examples"}
    reading = probe.reading()
    assert (reading.status, reading.b_simple, reading.low) == ("unresolved", None, None)


def test_rows_that_stand_alone_are_not_accused() -> None:
    probe, _ = trained(each_alone, steps=200)
    assert not probe.alerts
    assert probe.reading().low is not None


def noise_scale(loss: Loss, model: nn.Module, batches: int = 1500) -> float:
    """ROWS · tr Cov(F)/|E F|², over batches with a loss of their own."""
    generator = torch.Generator().manual_seed(2)
    parameters = list(model.parameters())
    drawn = [torch.autograd.grad(loss(model, generator), parameters) for _ in range(batches)]
    gradients = torch.stack([torch.cat([g.flatten() for g in each]) for each in drawn]).double()
    trace_cov = float(gradients.var(0).sum())
    return ROWS * trace_cov / (float(gradients.mean(0).square().sum()) - trace_cov / batches)


@pytest.mark.parametrize("loss", [LOSSES[name] for name in LOSSES if name != "Barlow twins"])
def test_at_still_weights_four_pieces_give_the_noise_scale_of_losses_that_compare_rows(loss: Loss) -> None:
    """In rows, of batches that are each compared within themselves. That of Barlow twins takes far more windows."""
    probe, model = trained(loss, steps=400, pieces=4, rate=0.0)
    reading = probe.reading()
    assert not probe.alerts
    assert reading.b_simple is not None
    assert 1 / 1.3 < reading.b_simple / noise_scale(loss, model) < 1.3
