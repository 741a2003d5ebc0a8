"""Pieces of two kinds, and summed losses without weights, are noticed by which piece has the larger gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import sonde
from sonde.batch_size.stats.dependence import Dependence, order_of_pieces
from tests.batch_size.loops import attached

TRUTH = torch.randn(16, 1, generator=torch.Generator().manual_seed(5)) / 4
Losses = Callable[[nn.Module, torch.Generator], list[Tensor]]


def real_then_fake(model: nn.Module, generator: torch.Generator) -> list[Tensor]:
    real, fake = torch.randn(32, 16, generator=generator) + 1, torch.randn(32, 16, generator=generator) / 2
    return [softplus(-model(real)).mean(), softplus(model(fake)).mean()]


def both_in_each(model: nn.Module, generator: torch.Generator) -> list[Tensor]:
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(16)[:, None]
    scale = torch.tensor([1.0, 0.5]).repeat_interleave(16)[:, None]
    batches = [torch.randn(32, 16, generator=generator) * scale + (signs + 1) / 2 for _ in range(2)]
    return [softplus(-signs * model(x)).mean() for x in batches]


def two_losses_of_a_batch(model: nn.Module, generator: torch.Generator) -> list[Tensor]:
    x = torch.randn(32, 16, generator=generator)
    return [(model(x) - x @ TRUTH).square().mean(), 0.1 * model(x).abs().mean()]


def regression(*sizes: int, sums: bool) -> Losses:
    def losses(model: nn.Module, generator: torch.Generator) -> list[Tensor]:
        found = []
        for n in sizes:
            x = torch.randn(n, 16, generator=generator)
            y = x @ TRUTH + 0.5 * torch.randn(n, 1, generator=generator)
            squares = (model(x) - y).square()
            found.append(squares.sum() / sum(sizes) if sums else squares.mean())
        return found

    return losses


def trained(losses: Losses, *, weight: bool = False, windows: int = 120) -> sonde.NoiseScaleReading:
    torch.manual_seed(0)
    model, generator = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with attached(model, optimizer) as probe:
        for _ in range(windows):
            sizes: list[int] = []
            handle = model.register_forward_pre_hook(lambda _, args, sizes=sizes: sizes.append(len(args[0])))
            found = losses(model, generator)
            handle.remove()
            for loss, n in zip(found, sizes, strict=True):
                with probe.piece(units=n, weight=n if weight else 1.0):
                    loss.backward()
            probe.step()
            optimizer.step()
            optimizer.zero_grad()
        return probe.reading()


@pytest.mark.parametrize(
    ("losses", "weight", "words"),
    [
        (real_then_fake, False, "so they are of two kinds"),
        (two_losses_of_a_batch, False, "so they are of two kinds"),
        (regression(4, 12, sums=True), False, "as if their losses were sums"),
        (regression(16, 16, 4, sums=True), False, "as if their losses were sums"),
        (both_in_each, False, ""),
        (regression(8, 8, sums=True), False, ""),
        (regression(4, 12, sums=True), True, ""),
        (regression(4, 12, sums=False), False, ""),
        (regression(16, 16, 4, sums=False), False, ""),
    ],
)
def test_kinds_and_sums_take_the_number_away(losses: Losses, weight: bool, words: str) -> None:
    reading = trained(losses, weight=weight)
    if words:
        assert reading.b_simple is None
        assert words in reading.reason
    else:
        assert not reading.doubts
        assert reading.status != "unresolved", reading.reason


def test_an_order_by_chance_raises_no_doubt() -> None:
    """Over 20 runs of 500 windows, at each window."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        watch = Dependence(100.0)
        for sign in torch.randint(0, 2, (500,), generator=generator) * 2 - 1:
            watch.add({"place": (float(sign), 1.0), "units": (float(sign), 1.0)})
            assert not watch.doubts()


def test_only_pieces_that_can_be_compared_are() -> None:
    small, large = torch.tensor(1.0), torch.tensor(4.0)
    assert order_of_pieces([large, small], [8.0, 8.0]) == [1.0, 1.0, 0.0, 0.0]
    assert order_of_pieces([small, large], [8.0, 8.0]) == [-1.0, 1.0, 0.0, 0.0]
    assert order_of_pieces([large, small, small], [12.0, 8.0, 4.0]) == [0.0, 0.0, 1.0, 1.0]
    assert order_of_pieces([small, large], [12.0, 4.0]) == [0.0, 0.0, -1.0, 1.0]
    for sizes in ([], [8.0], [8.0, 9.0], [8.0, 8.0, 8.0]):
        assert order_of_pieces([small] * len(sizes), sizes) == [0.0] * 4


def test_a_restart_remembers_the_order() -> None:
    watch, other = Dependence(100.0), Dependence(100.0)
    for _ in range(100):
        watch.add({"place": (-1.0, 1.0)})
    other.load_state_dict(watch.state_dict())
    assert other.doubts() == watch.doubts()
    assert "smaller gradient" in other.doubts()["dependent_pieces"]
