"""The numbers of the probe under DDP, on real gloo ranks, against whole gradients of all ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch.distributed as dist

import sonde
from tests.batch_size.ddp_loops import assert_as_by_hand, batches, by_hand, train_on_rank, wrap
from tests.batch_size.loops import (
    attached,
    flat_grad,
    mean_loss,
    small_model,
)
from tests.oracles import window_by_hand
from tests.ranks import Ranks


@pytest.mark.parametrize(
    "ddp_options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 0.01},
        {"find_unused_parameters": True},
    ],
    ids=lambda o: next(iter(o), "default"),
)
@pytest.mark.parametrize("no_sync", [True, False])
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@pytest.mark.shows("noise scale", "DDP")
def test_accumulation(ranks2: Ranks, ddp_options: dict[str, Any], no_sync: bool) -> None:
    assert_as_by_hand(ranks2(_accumulate, ddp_options, no_sync))


def _accumulate(ddp_options: dict[str, Any], no_sync: bool) -> dict[str, Any]:
    return train_on_rank(ddp_options, no_sync=no_sync)


def test_three_ranks(ranks3: Ranks) -> None:
    assert_as_by_hand(ranks3(_accumulate, {}, True))


def _two_backwards(first_reduces: bool) -> dict[str, Any]:
    """Two losses with a backward each in a rank's only piece, as with an auxiliary loss."""
    plain, model = wrap({})
    rank = dist.get_rank()
    with attached(model) as probe:
        for window in range(3):
            with probe.piece(units=4):
                for i, (x, y) in enumerate(batches(rank, 2, window)):
                    with contextlib.nullcontext() if i or first_reduces else model.no_sync():
                        mean_loss(model, x, y).backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    estimates = []
    for window in (1, 2):  # the first window shows that there are several
        gradients = [sum(flat_grad(plain, mean_loss(plain, x, y)) for x, y in batches(r, 2, window)) for r in range(2)]
        estimates.append(window_by_hand(gradients, [1, 1], [4, 4], sum(gradients) / 2))  # type: ignore[arg-type]
    traces, grads = zip(*estimates, strict=True)
    return {
        "reading": reading,
        "norms": [],
        "expected": {"trace_cov": sum(traces) / 2, "grad_sq": sum(grads) / 2},
        "hooks": sum(len(p._backward_hooks or ()) for p in plain.parameters()),
    }


@pytest.mark.parametrize("first_reduces", [False, True])
def test_two_backwards_in_a_ranks_only_piece(ranks2: Ranks, first_reduces: bool) -> None:
    results = ranks2(_two_backwards, first_reduces)
    assert_as_by_hand(results, windows=2)
    assert ["several backwards" in reason for r in results for reason in r["reading"].dropped] == [True] * 2


def _summed() -> dict[str, Any]:
    return train_on_rank({}, summed=True, clip=False)


def test_ranks_summed_instead_of_averaged(ranks2: Ranks) -> None:
    assert_as_by_hand(ranks2(_summed))


def _plain_reduced_by_hand(average: bool) -> tuple[sonde.NoiseScaleReading, dict[str, Any]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = small_model()
    with attached(model, process_group=dist.group.WORLD) as probe:
        for x, y in batches(rank, 3):
            with probe.piece(units=len(x)):
                mean_loss(model, x, y).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            if average:
                p.grad.div_(world)  # type: ignore[union-attr]
        probe.step()
        reading = probe.reading()
    return reading, by_hand(model, world, 3, 1, per_rank=False)


@pytest.mark.parametrize("average", [True, False])
def test_gradients_reduced_by_the_user(ranks2: Ranks, average: bool) -> None:
    for reading, expected in ranks2(_plain_reduced_by_hand, average):
        assert reading.trace_cov == pytest.approx(expected["trace_cov"], rel=2e-5)
        assert reading.grad_sq == pytest.approx(expected["grad_sq"], rel=2e-5, abs=2e-5 * expected["trace_cov"])


def _reduced_without_telling() -> str:
    model = small_model()
    with attached(model) as probe:
        for x, y in batches(dist.get_rank(), 3):
            with probe.piece(units=len(x)):
                mean_loss(model, x, y).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        probe.step()
        return probe.reading().reason


def test_a_reduction_without_process_group_is_named(ranks2: Ranks) -> None:
    for reason in ranks2(_reduced_without_telling):
        assert "pass process_group= if you average them yourself" in reason
