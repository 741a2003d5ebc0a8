"""Pieces, ranks and examples that share data are named and give no number; independent data are never accused."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

import sonde
from tests.batch_size.loops import Rows, attached, batch, mean_loss, pieces_of, small_model
from tests.ranks import Ranks


def run(
    model: Any, windows: Callable[[int], list[Rows]], n: int, *, units: int = 4, **options: Any
) -> tuple[sonde.NoiseScaleReading, dict[str, str]]:
    """Windows at fixed weights, whose pieces are drawn by a function."""
    with attached(model, **options) as probe:
        for window in range(n):
            pieces = windows(window)
            for k, (x, y) in enumerate(pieces):
                waits = k < len(pieces) - 1 and isinstance(model, DistributedDataParallel)
                with probe.piece(units=units), model.no_sync() if waits else contextlib.nullcontext():
                    (mean_loss(model, x, y) / len(pieces)).backward()
            probe.step()
            model.zero_grad()
        return probe.reading(), dict(probe.alerts)


# Pieces of one process.


@pytest.mark.parametrize(("n_pieces", "units"), [(3, 4), (7, 1024)])
def test_the_same_micro_batch_is_noticed_for_any_unit(n_pieces: int, units: int) -> None:
    reading, alerts = run(small_model(), lambda window: pieces_of(4) * n_pieces, 10, units=units)
    assert "the same data" in alerts["same_data"]
    assert (list(reading.doubts), reading.b_simple) == (["same_data"], None)


@pytest.mark.parametrize("order", [(0, 0, 1, 2), (0, 1, 2, 0)], ids=str)
def test_micro_batches_that_share_data_are_named(order: tuple[int, ...]) -> None:
    def windows(window: int) -> list[Rows]:
        data = pieces_of(4, 4, 4, seed=window)
        return [data[i] for i in order]

    reading, alerts = run(small_model(), windows, 80)
    assert "independent" in alerts["dependent_pieces"]
    assert (reading.status, reading.b_simple) == ("unresolved", None)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (9.0, 1.0, 9.0, 1.0)], ids=str)
def test_independent_micro_batches_are_not_accused(weights: tuple[float, ...]) -> None:
    """A finite data set, shuffled in each epoch, while the weights of the model move."""
    model, generator = small_model(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    x, y = batch(256, generator)
    with attached(model, optimizer) as probe:
        for _ in range(25):
            for window in torch.randperm(256, generator=generator).view(4, 4, 16):
                for rows, weight in zip(window, weights, strict=True):
                    with probe.piece(units=16, weight=weight):
                        (mean_loss(model, x[rows], y[rows]) * weight / sum(weights)).backward()
                optimizer.step()
                optimizer.zero_grad()
        probe.reading()
        assert "dependent_pieces" not in probe.alerts


# Ranks.


def with_same_data(whose: str, n_pieces: int, n: int) -> tuple[sonde.NoiseScaleReading, dict[str, str]]:
    """All ranks have the same data, the last two of three, or none; or each rank repeats its own."""
    rank = dist.get_rank()
    seed = {"all": 0, "two": min(rank, 1)}.get(whose, rank)

    def windows(window: int) -> list[Rows]:
        if whose == "repeated":
            return pieces_of(4, seed=1000 * rank + window) * n_pieces
        return pieces_of(*[4] * n_pieces, seed=1000 * seed + window)

    return run(DistributedDataParallel(small_model()), windows, n)


@pytest.mark.parametrize(
    ("n_ranks", "whose", "n_pieces", "said"),
    [
        (2, "all", 3, "do all ranks"),
        (2, "all", 1, "do all ranks"),
        (2, "repeated", 3, "several micro-batches of a rank"),
        (3, "two", 1, "two ranks (1 and 2) had the same gradient"),
        (3, "two", 3, "two ranks (1 and 2) had the same gradient"),
        (3, "none", 1, ""),
    ],
)
def test_ranks_with_the_same_data_are_named(
    request: pytest.FixtureRequest, n_ranks: int, whose: str, n_pieces: int, said: str
) -> None:
    for reading, alerts in request.getfixturevalue(f"ranks{n_ranks}")(with_same_data, whose, n_pieces, 12):
        assert said in alerts.get("same_data", "")
        assert bool(said) == bool(alerts)
        if whose == "all":  # with one piece, there is nothing within ranks to compare with, but no noise at all
            assert reading.consistency == (math.inf if n_pieces == 3 else None)
            assert (reading.status, reading.b_simple) == ("unresolved", None)


def test_consistency_is_about_one_on_sound_data(ranks2: Ranks) -> None:
    for reading, alerts in ranks2(with_same_data, "none", 3, 100):
        # 100 windows of 2 ranks and some ten effective dimensions: about 8 % of scatter.
        assert reading.consistency == pytest.approx(1.0, abs=0.2)
        assert "same_data" not in alerts


def one_spike() -> list[bool]:
    """Whether the data are called the same, for independent data with huge labels in one window."""
    accused = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())

        def windows(window: int, generator: torch.Generator = generator) -> list[Rows]:
            x, y = torch.randn(2, 2, 3, generator=generator), torch.randn(2, 2, 1, generator=generator)
            return list(zip(x, (40.0 if window == 4 else 1.0) * y, strict=True))

        torch.manual_seed(0)
        reading, _ = run(DistributedDataParallel(nn.Linear(3, 1)), windows, 45)
        accused.append("same_data" in reading.doubts)
    return accused


def test_a_loss_spike_is_no_proof_of_the_same_data(ranks2: Ranks) -> None:
    assert ranks2(one_spike)[0] == [False] * 4


# Rows that share samples are no examples.

DIRECTIONS = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))


def rows_of(kind: str, n: int, generator: torch.Generator) -> Rows:
    x = torch.randn(n, 10, generator=generator)
    y = functional.one_hot((0.7 * x @ DIRECTIONS).argmax(1), 4).float()
    if kind == "repeated":
        rows = torch.arange(n) // 2
        return x[rows] + 0.3 * torch.randn(n, 10, generator=generator), y[rows]
    if kind == "sorted":
        return x[x[:, 0].argsort()], y[x[:, 0].argsort()]
    if kind == "independent":
        return x, y
    # Mixup, with partners as in timm, as in torchvision, or at random.
    order = {"flip": torch.arange(n).flip(0), "roll": torch.arange(n).roll(1)}
    partner, part = order.get(kind, torch.randperm(n, generator=generator)), float(torch.rand((), generator=generator))
    return part * x + (1 - part) * x[partner], part * y + (1 - part) * y[partner]


def trained(
    kind: str, *, rate: float = 0.1, pieces: int = 1, steps: int = 80, adam: bool = False, **options: Any
) -> sonde.NoiseScaleProbe:
    """A probe after some steps of training; it is closed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = (torch.optim.AdamW if adam else torch.optim.SGD)(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(1)
    with attached(model, optimizer, **{"units_per_piece": 64, "per_example": "auto"} | options) as probe:
        for _ in range(steps):
            for _ in range(pieces):
                x, y = rows_of(kind, 64, generator)
                functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        probe.reading()
    return probe


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("flip", "the second and the last but one, and so on are more alike than chance allows"),
        ("roll", "neighbouring rows of a batch are more alike than chance allows"),
        ("repeated", "neighbouring rows of a batch are more alike than chance allows"),
    ],
)
def test_shared_samples_are_named_and_give_no_number(kind: str, words: str) -> None:
    probe = trained(kind, rate=0.3)
    assert words in probe.alerts["dependent_examples"]
    reading = probe.reading()
    assert (reading.status, reading.b_simple) == ("unresolved", None)
    assert "not independent" in reading.reason


@pytest.mark.parametrize(
    ("kind", "rate", "adam"), [("independent", 3.0, False), ("sorted", 0.1, False), ("sorted", 0.03, True)]
)
def test_independent_rows_are_not_accused_at_any_rate(kind: str, rate: float, adam: bool) -> None:
    probe = trained(kind, rate=rate, adam=adam)
    assert "dependent_examples" not in probe.alerts
    assert probe.reading().windows == 80


@pytest.mark.parametrize(("kind", "is_doubted"), [("random", True), ("independent", False)])
def test_where_both_are_read_examples_are_held_against_pieces(kind: str, is_doubted: bool) -> None:
    """Partners at random places show nowhere in the order of rows, but pieces differ more than examples say."""
    probe = trained(kind, pieces=8, steps=40, per_example="always")
    assert ("times the noise that single examples say" in probe.alerts.get("dependent_examples", "")) == is_doubted
    assert (probe.reading().b_simple is None) >= is_doubted


def test_pieces_of_rows_that_share_samples_are_read_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Where single examples are read, the set-up says once that rows must share no samples."""
    probe = trained("flip", pieces=4, steps=20)
    assert "dependent_examples" not in probe.alerts
    assert probe.reading().u == pytest.approx(1 / 64)
    trained("independent", steps=4, verbose=True)
    said = "rows that share samples, as after mixup, or that are not drawn at random"
    assert capsys.readouterr().err.count(said) == 1


# Pieces of two kinds, and summed losses without weights, show by which piece has the larger gradient.

TRUTH = torch.randn(16, 1, generator=torch.Generator().manual_seed(5)) / 4
Losses = Callable[[nn.Module, torch.Generator], list[tuple[Tensor, int]]]


def real_then_fake(model: nn.Module, generator: torch.Generator) -> list[tuple[Tensor, int]]:
    real, fake = torch.randn(32, 16, generator=generator) + 1, torch.randn(32, 16, generator=generator) / 2
    return [(softplus(-model(real)).mean(), 32), (softplus(model(fake)).mean(), 32)]


def both_in_each(model: nn.Module, generator: torch.Generator) -> list[tuple[Tensor, int]]:
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(16)[:, None]
    scale = torch.tensor([1.0, 0.5]).repeat_interleave(16)[:, None]
    batches = [torch.randn(32, 16, generator=generator) * scale + (signs + 1) / 2 for _ in range(2)]
    return [(softplus(-signs * model(x)).mean(), 32) for x in batches]


def two_losses_of_a_batch(model: nn.Module, generator: torch.Generator) -> list[tuple[Tensor, int]]:
    x = torch.randn(32, 16, generator=generator)
    return [((model(x) - x @ TRUTH).square().mean(), 32), (0.1 * model(x).abs().mean(), 32)]


def regression(*sizes: int, sums: bool) -> Losses:
    def losses(model: nn.Module, generator: torch.Generator) -> list[tuple[Tensor, int]]:
        found = []
        for n in sizes:
            x = torch.randn(n, 16, generator=generator)
            squares = (model(x) - (x @ TRUTH + 0.5 * torch.randn(n, 1, generator=generator))).square()
            found.append((squares.sum() / sum(sizes) if sums else squares.mean(), n))
        return found

    return losses


@pytest.mark.parametrize(
    ("losses", "is_weighted", "words"),
    [
        (real_then_fake, False, "so they are of two kinds"),
        (two_losses_of_a_batch, False, "so they are of two kinds"),
        (regression(4, 12, sums=True), False, "as if their losses were sums"),
        (regression(16, 16, 4, sums=True), False, "as if their losses were sums"),
        (both_in_each, False, ""),
        (regression(8, 8, sums=True), False, ""),
        (regression(4, 12, sums=True), True, ""),
        (regression(16, 16, 4, sums=False), False, ""),
    ],
)
def test_kinds_and_sums_take_the_number_away(losses: Losses, is_weighted: bool, words: str) -> None:
    torch.manual_seed(0)
    model, generator = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with attached(model, optimizer) as probe:
        for _ in range(120):
            for loss, n in losses(model, generator):
                with probe.piece(units=n, weight=n if is_weighted else 1.0):
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
    if words:
        assert reading.b_simple is None
        assert words in reading.reason
    else:
        assert not reading.doubts
        assert reading.status != "unresolved", reading.reason
