"""Pieces that hold the same data are named, and independent data are not accused."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.batch_size.ddp_loops import batches, wrap
from tests.batch_size.loops import (
    attached,
    batch,
    mean_loss,
    piece_losses,
    small_model,
)
from tests.ranks import Ranks


def test_same_data_in_all_micro_batches() -> None:
    model = small_model()
    loss = piece_losses(model, [4])[0]
    with attached(model, log_every=1) as probe:
        for _ in range(8):
            for _ in range(3):
                with probe.piece(units=4):
                    loss().backward()
            probe.step()
            model.zero_grad()
        probe.reading()
        assert "the same data" in probe.alerts["same_data"]


def _same_data(n_micro: int) -> tuple[dict[str, str], float | None]:
    _, model = wrap({})
    with attached(model, log_every=1) as probe:
        for window in range(8):
            for x, y in batches(0, n_micro, window):
                with probe.piece(units=len(x)):
                    mean_loss(model, x, y).backward()
            probe.step()
            model.zero_grad()
        assert probe.reading().status == "unresolved"
        assert probe.reading().b_simple is None
        return dict(probe.alerts), probe.reading().consistency


def test_same_data_on_all_ranks(ranks2: Ranks) -> None:
    for alerts, consistency in ranks2(_same_data, 3):
        assert "do all ranks" in alerts["same_data"]
        assert consistency == math.inf
    for alerts, consistency in ranks2(_same_data, 1):  # nothing within ranks to compare with, but no noise at all
        assert "do all ranks" in alerts["same_data"]
        assert consistency is None


def _repeated_micro_batch() -> dict[str, str]:
    _, model = wrap({})
    with attached(model, log_every=1) as probe:
        for window in range(8):
            x, y = batches(dist.get_rank(), 1, window)[0]
            for _ in range(3):
                with probe.piece(units=len(x)):
                    mean_loss(model, x, y).backward()
            probe.step()
            model.zero_grad()
        return dict(probe.alerts)


def test_the_same_micro_batch_repeated_on_a_rank_is_named(ranks2: Ranks) -> None:
    for alerts in ranks2(_repeated_micro_batch):
        assert "several micro-batches of a rank" in alerts["same_data"]


def _healthy() -> tuple[float | None, dict[str, str]]:
    _, model = wrap({})
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, log_every=10) as probe:
        for _ in range(300):
            for _ in range(3):
                with probe.piece(units=4):
                    mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            model.zero_grad()
        return probe.reading().consistency, dict(probe.alerts)


def test_consistency_is_about_one_on_sound_data(ranks2: Ranks) -> None:
    for consistency, alerts in ranks2(_healthy):
        # 300 windows of 2 ranks and some ten effective dimensions: about 5 % of scatter.
        assert consistency == pytest.approx(1.0, abs=0.2)
        assert "same_data" not in alerts


def _one_spike() -> list[bool]:
    """Whether the data are called the same, for independent data with huge labels in one window."""
    accused = []
    for seed in range(6):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(3, 1))
        generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
        with attached(model, tap="leaf") as probe:
            for window in range(45):
                for k in range(2):
                    x = torch.randn(2, 3, generator=generator)
                    y = torch.randn(2, 1, generator=generator) * (40.0 if window == 4 else 1.0)
                    with model.no_sync() if k == 0 else contextlib.nullcontext(), probe.piece(units=2):
                        (model(x) - y).square().mean().backward()
                probe.step()
                model.zero_grad()
            accused.append("same_data" in probe.reading().doubts)
    return accused


def test_a_loss_spike_is_no_proof_of_the_same_data(ranks2: Ranks) -> None:
    assert ranks2(_one_spike)[0] == [False] * 6


DEPENDENT = {
    "two equal neighbours": (0, 0, 1, 2),
    "the last repeats the first": (0, 1, 2, 0),
    "each batch twice": (0, 0, 1, 1),
}


@pytest.mark.parametrize("order", DEPENDENT.values(), ids=DEPENDENT)
def test_one_process_names_micro_batches_that_share_data(order: tuple[int, ...]) -> None:
    model = small_model()
    generator = torch.Generator().manual_seed(0)
    with attached(model, log_every=10) as probe:
        for _ in range(80):
            data = [batch(4, generator) for _ in range(3)]
            for i in order:
                with probe.piece(units=4):
                    mean_loss(model, *data[i]).backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
        assert "independent" in probe.alerts["dependent_pieces"]
        assert (reading.status, reading.b_simple) == ("unresolved", None)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (9.0, 1.0, 9.0, 1.0)], ids=str)
def test_one_process_with_independent_micro_batches_is_not_accused(weights: tuple[float, ...]) -> None:
    """A finite data set, shuffled in each epoch, while the weights of the model move."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    generator = torch.Generator().manual_seed(0)
    x, y = batch(256, generator)
    with attached(model, optimizer, log_every=10) as probe:
        for _ in range(60):
            for window in torch.randperm(256, generator=generator).view(4, 4, 16):
                for rows, weight in zip(window, weights, strict=True):
                    with probe.piece(units=16, weight=weight):
                        (mean_loss(model, x[rows], y[rows]) * weight / sum(weights)).backward()
                probe.step()
                optimizer.step()
                optimizer.zero_grad()
        probe.reading()
        assert "dependent_pieces" not in probe.alerts


def _some_ranks_alike(n_micro: int, tap: str, alike: bool) -> dict[str, str]:
    _, model = wrap({})
    seen_by = [0, 1, 1][dist.get_rank()] if alike else dist.get_rank()
    with attached(model, log_every=1, tap=tap) as probe:
        for window in range(12):
            for x, y in batches(seen_by, n_micro, window):
                with probe.piece(units=len(x)):
                    mean_loss(model, x, y).backward()
            probe.step()
            model.zero_grad()
        return dict(probe.alerts)


@pytest.mark.parametrize(("n_micro", "tap"), [(1, "leaf"), (3, "leaf"), (1, "comm_hook")])
def test_two_of_three_ranks_with_the_same_data_are_named(ranks3: Ranks, n_micro: int, tap: str) -> None:
    for alerts in ranks3(_some_ranks_alike, n_micro, tap, True):
        assert "two ranks (1 and 2) had the same gradient" in alerts["same_data"]
    for alerts in ranks3(_some_ranks_alike, n_micro, tap, False):
        assert alerts == {}
