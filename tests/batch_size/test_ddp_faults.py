"""What goes wrong under DDP: peers that fail, and gradients that are not finite on one rank."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sonde
from tests.batch_size.ddp_loops import batches, wrap
from tests.batch_size.loops import (
    Recording,
    attached,
    batch,
    mean_loss,
    small_model,
)
from tests.ranks import Ranks


def _peer_leaves(by_with: bool) -> dict[str, object]:
    """A window whose sum fails: the other rank does not take part, and the collective runs into its timeout."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    model, sink = small_model(), Recording()
    probe = attached(model, process_group=group, sinks=[sink])
    if dist.get_rank() == 1:
        time.sleep(3)
        return {}
    raised = ""
    try:
        if by_with:
            with probe:
                _one_window(model, probe)
                raise KeyError("the user's own")
        _one_window(model, probe)
        probe.close()
    except (KeyError, RuntimeError) as error:
        raised = type(error).__name__
    return {
        "hooks": sum(len(p._backward_hooks or ()) for p in model.parameters()),
        "kinds": [r["kind"] for r in sink.records],
        "closed": sink.closed,
        "raised": raised,
    }


def _one_window(model: torch.nn.Module, probe: sonde.NoiseScaleProbe) -> None:
    for _ in range(2):
        with probe.piece(units=4):
            mean_loss(model, *batch(4, torch.Generator().manual_seed(0))).backward()
    probe.step()
    time.sleep(1.5)  # until the sum over ranks has failed


@pytest.mark.parametrize("by_with", [True, False])
def test_a_failed_peer_leaves_no_hook_and_a_whole_log(by_with: bool) -> None:
    ranks = Ranks(2)  # new ranks, since one of their groups is broken afterwards
    try:
        left, _ = ranks(_peer_leaves, by_with)
    finally:
        ranks.stop()
    assert left["hooks"] == 0
    assert left["kinds"] == ["header", "end"]
    assert left["closed"] == 1
    assert left["raised"] == ("KeyError" if by_with else "RuntimeError")


def _peer_fails() -> str:
    """Rank 1 leaves the loop before it ends its second window. Rank 0 must not wait for rank 1 for ever."""
    model = small_model()
    pair = dist.new_group([0, 1])
    sink = Recording()
    try:
        with attached(model, process_group=pair, sinks=[sink]) as probe:
            for window in range(2):
                for x, y in batches(dist.get_rank(), 2):
                    with probe.piece(units=len(x)):
                        mean_loss(model, x, y).backward()
                if (dist.get_rank(), window) == (1, 1):
                    raise KeyError
                probe.step()
                model.zero_grad()
            raise KeyError
    except KeyError:
        return sink.of_kind("end")[0]["reason"] if dist.get_rank() == 0 else ""


def test_a_rank_that_fails_does_not_hang_the_others(ranks2: Ranks) -> None:
    assert ranks2(_peer_fails)[0] == "stopped by KeyError"
    ranks2.stop(kill=True)  # a collective without its peer is left behind in that group


def _one_nan() -> tuple[sonde.NoiseScaleReading, int]:
    """Rank 1's first micro-batch of window 1 is NaN."""
    rank = dist.get_rank()
    _, model = wrap({})
    with attached(model) as probe:
        for window in range(3):
            for i, (x, y) in enumerate(batches(rank, 2, window)):
                sync = contextlib.nullcontext() if i else model.no_sync()
                with probe.piece(units=len(x)), sync:
                    (mean_loss(model, x, y) * (math.nan if (rank, window, i) == (1, 1, 0) else 1.0)).backward()
            probe.step()
            model.zero_grad()
        return probe.reading(), rank


def _uneven(measures: bool, clips: bool, every: int) -> tuple[Any, ...]:
    """Three windows on each rank, then as many batches as a rank has, inside join()."""
    model = DistributedDataParallel(small_model())
    optimizer, generator = torch.optim.SGD(model.parameters(), lr=1e-3), torch.Generator().manual_seed(dist.get_rank())
    probe = attached(model, optimizer, every=every) if measures else None

    def window() -> None:
        with probe.piece(units=4) if probe is not None else contextlib.nullcontext():
            mean_loss(model, *batch(4, generator)).backward()
        if clips:
            (probe or model_clip).clip_grad_norm_(1e-2)
        elif probe is not None:
            probe.step()
        optimizer.step()
        optimizer.zero_grad()

    class model_clip:
        @staticmethod
        def clip_grad_norm_(max_norm: float) -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    for _ in range(3):
        window()
    with model.join():
        for _ in range(2 if dist.get_rank() == 0 else 5):
            window()
    for _ in range(3):
        window()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    if probe is None:
        return (weights,)
    reading, alerts = probe.reading(), probe.alerts
    probe.close()
    return weights, reading.windows, reading.dropped, list(alerts)


@pytest.mark.parametrize(("clips", "every"), [(False, 1), (True, 1), (False, 2)])
def test_uneven_inputs_are_left_out_and_training_is_the_same(clips: bool, every: int, ranks2: Ranks) -> None:
    for measured, without in zip(ranks2(_uneven, True, clips, every), ranks2(_uneven, False, clips, 1), strict=True):
        weights, windows, dropped, alerts = measured
        assert weights.isfinite().all()
        assert torch.allclose(weights, without[0], rtol=1e-6) if clips else torch.equal(weights, without[0])
        assert (dropped, alerts) == ({}, ["uneven_inputs"])
        assert 0 < windows <= 3


def _never_reduces() -> str | None:
    model = DistributedDataParallel(small_model())
    optimizer, generator = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(dist.get_rank())
    with attached(model, optimizer) as probe, model.no_sync():
        for _ in range(2):
            with probe.piece(units=4):
                mean_loss(model, *batch(4, generator)).backward()
        probe.step()
        return probe.reading().reason


def test_ranks_that_do_not_average_are_named(ranks2: Ranks) -> None:
    """As with local SGD."""
    for reason in ranks2(_never_reduces):
        assert reason is not None
        assert "ranks did not average their gradients (local SGD, model.no_sync())" in reason


def test_a_nan_on_one_rank_is_seen_by_all(ranks2: Ranks) -> None:
    for reading, _ in ranks2(_one_nan):
        assert reading.windows == 2
        assert list(reading.dropped.values()) == [1]
        assert "not finite" in next(iter(reading.dropped))


def _buckets_in_a_graph() -> dict[str, object]:
    """The second of three windows runs while the device seems to record a graph."""
    model = torch.nn.parallel.DistributedDataParallel(small_model())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap="comm_hook", units_per_piece=4) as probe:
        for window in range(3):
            recorded = mock.patch("sonde.batch_size.taps.tap.is_capturing", return_value=window == 1)
            with recorded, no_reads_of_norms() if window == 1 else contextlib.nullcontext():
                mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    return {"windows": reading.windows, "dropped": dict(reading.dropped)}


@contextlib.contextmanager
def no_reads_of_norms() -> Iterator[None]:
    """Inside, a bucket's norms must not be read."""
    read = "sonde.batch_size.taps.ddp_buckets.GradientTerms.take"
    with mock.patch(read, side_effect=AssertionError("a bucket was read")):
        yield


def test_buckets_are_not_read_inside_a_cuda_graph(ranks2: Ranks) -> None:
    for result in ranks2(_buckets_in_a_graph):
        assert result["windows"] == 2
        (reason,) = result["dropped"]
        assert "backwards ran inside a CUDA graph" in reason
