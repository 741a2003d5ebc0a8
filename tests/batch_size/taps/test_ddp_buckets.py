"""DDP's buckets as pieces: a rank's window is one piece, and what else the buckets hold is named."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sonde.batch_size.taps.ddp_buckets import comm_hook_name
from tests.batch_size.ddp_loops import (
    assert_as_by_hand,
    batches,
    by_hand,
    first_batches,
    train_on_rank,
    windows_of_one_piece,
    wrap,
)
from tests.batch_size.loops import (
    attached,
    batch,
    mean_loss,
    small_model,
)
from tests.ranks import Ranks


def _without_accumulation(tap: str, ddp_options: dict[str, Any], clip: bool) -> dict[str, Any]:
    return train_on_rank(ddp_options, n_micro=1, windows=6, tap=tap, clip=clip)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("ddp_options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.01}], ids=str)
@pytest.mark.parametrize("tap", ["leaf", "comm_hook"])
def test_one_piece_a_rank(ranks2: Ranks, tap: str, ddp_options: dict[str, Any], clip: bool) -> None:
    results = ranks2(_without_accumulation, tap, ddp_options, clip)
    assert_as_by_hand(results, windows=6)
    expected = "leaf hooks" if tap == "leaf" else "DDP's communication hook"
    assert [r["tap"] for r in results] == [expected] * 2
    assert set(results[0]["taps_logged"]) == {expected}  # rank 0 writes


def _buckets_with_accumulation(hook: str | None) -> dict[str, Any]:
    return train_on_rank({}, tap="comm_hook", hook=hook)


@pytest.mark.parametrize("hook", [None, "allreduce"])
def test_buckets_take_a_rank_as_one_piece(ranks2: Ranks, hook: str | None) -> None:
    assert_as_by_hand(ranks2(_buckets_with_accumulation, hook))


def _buckets_reduced_each_time() -> dict[str, Any]:
    return train_on_rank({}, tap="comm_hook", no_sync=False)


def test_buckets_reduced_more_than_once_are_refused(ranks2: Ranks) -> None:
    for result in ranks2(_buckets_reduced_each_time):
        assert result["reading"].windows == 0
        assert "accumulate under model.no_sync()" in result["reading"].reason


def _second_hook() -> str:
    _, model = wrap({})
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    try:
        attached(model, tap="comm_hook")
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_registered_hook_cannot_be_wrapped_and_the_message_says_what_to_do(ranks2: Ranks) -> None:
    for message in ranks2(_second_hook):
        assert "'allreduce_hook' is registered already" in message
        assert "attach(comm_hook=" in message


def _attach_again(how: str) -> dict[str, Any]:
    """After a probe with a communication hook has closed, the model can be measured again."""
    plain, model = wrap({})
    with attached(model, tap="comm_hook", log_every=1) as probe:
        windows_of_one_piece(probe, model, first_batches(6))
        assert probe._reader.tap_name == "DDP's communication hook"
    if how != "same":
        model = pickle.loads(pickle.dumps(model)) if how == "pickled" else copy.deepcopy(model)
        plain = model.module
    names = [comm_hook_name(model)]
    with attached(model, tap="comm_hook") as probe:
        windows_of_one_piece(probe, model, first_batches(3))
        try:
            attached(model, tap="comm_hook")
        except ValueError as error:
            names.append(str(error))
        reading = probe.reading()
    return {
        "reading": reading,
        "norms": [],
        "names": names,
        "expected": by_hand(plain, 2, 1, 3, per_rank=True),
        "hooks": sum(len(p._backward_hooks or ()) for p in plain.parameters()),
    }


@pytest.mark.parametrize("how", ["same", "pickled", "deepcopied"])
def test_a_model_is_as_good_as_new_after_close(ranks2: Ranks, how: str) -> None:
    results = ranks2(_attach_again, how)
    assert_as_by_hand(results)
    for result in results:
        assert result["names"][0] is None  # sonde's relay is no hook of the user
        assert "another probe reads the buckets" in result["names"][1]


def _changed_behind_the_buckets(tap: str) -> tuple[str, dict[str, int], str]:
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(small_model())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap=tap, log_every=1) as probe:
        for _ in range(30):
            with probe.piece(units=4):
                mean_loss(model, *batch(4, generator)).backward()
            for p in model.parameters():
                p.grad.clamp_(-0.01, 0.01)  # type: ignore[union-attr]
            probe.step()
            model.zero_grad()
        return probe.reading().status, dict(probe.reading().dropped), probe._reader.tap_name


@pytest.mark.parametrize("tap", ["leaf", "comm_hook"])
def test_changes_after_the_reduction_are_seen(ranks2: Ranks, tap: str) -> None:
    for status, dropped, tap_name in ranks2(_changed_behind_the_buckets, tap):
        assert status == "unresolved"
        assert sum(dropped.values()) == 30
        assert all("clipped by value" in reason for reason in dropped)
        assert (tap_name == "leaf hooks") == (tap == "leaf")


def _scaled_behind_the_buckets() -> list[tuple[float | None, float | None]]:
    """Moments without a clip, and with a clip by norm before probe.step(), whose factor differs between windows."""
    moments = []
    for clips in (False, True):
        model = DistributedDataParallel(small_model())
        generator = torch.Generator().manual_seed(dist.get_rank())
        with attached(model, tap="comm_hook") as probe:
            for _ in range(20):
                with probe.piece(units=4):
                    mean_loss(model, *batch(4, generator)).backward()
                if clips:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                probe.step()
                model.zero_grad()
            moments.append((probe.reading().trace_cov, probe.reading().grad_sq))
    return moments


def test_scaling_after_the_reduction_does_not_matter(ranks2: Ranks) -> None:
    for plain, clipped in ranks2(_scaled_behind_the_buckets):
        assert clipped == pytest.approx(plain, rel=1e-4)


def _odd_pieces(case: str) -> tuple[int, list[str]]:
    model = DistributedDataParallel(small_model())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap="comm_hook", units_per_piece=4) as probe:
        for _ in range(5):
            if case == "empty":
                with probe.piece():
                    pass
            elif case == "interrupted":
                with contextlib.suppress(KeyError), model.no_sync(), probe.piece():
                    mean_loss(model, *batch(4, generator)).backward()
                    raise KeyError
            with contextlib.nullcontext() if case == "undeclared" else probe.piece():
                mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            model.zero_grad()
        return probe.reading().windows, list(probe.reading().dropped)


@pytest.mark.parametrize(
    ("case", "windows", "reason"),
    [
        ("empty", 0, "no backward reached the parameters in a piece"),
        ("interrupted", 0, "in a piece that was interrupted"),
        ("undeclared", 5, None),
        ("plain", 5, None),
    ],
)
def test_empty_interrupted_and_undeclared_pieces_in_buckets(
    ranks2: Ranks, case: str, windows: int, reason: str | None
) -> None:
    for got_windows, dropped in ranks2(_odd_pieces, case):
        assert got_windows == windows
        assert (reason in dropped[0]) if reason else dropped == []


def _ungated(case: str, tap: str) -> tuple[str, float | None, int, list[str]]:
    """Train a batch per window and rank, without `piece()` unless a case needs it."""
    torch.manual_seed(3)
    model = DistributedDataParallel(small_model())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap=tap, units_per_piece=4, log_every=1, groups=None) as probe:
        for window in range(12):
            x, y = batch(4, generator)
            if case == "left over" and window == 0:
                model.zero_grad()
            if case == "failed" and window == 4:
                with contextlib.suppress(KeyError), model.no_sync():
                    _fails_halfway(model, x)
                model.zero_grad()
            if case == "outside":
                with model.no_sync():
                    mean_loss(model, x, y).backward()
            with probe.piece() if case == "outside" else contextlib.nullcontext():
                mean_loss(model, x, y).backward()
            probe.step()
            if case != "left over":
                model.zero_grad()
        return probe._reader.tap_name, probe.reading().trace_cov, probe.reading().windows, list(probe.reading().dropped)


def _fails_halfway(model: nn.Module, x: torch.Tensor) -> None:
    def fail(_: torch.Tensor) -> None:
        raise KeyError

    handle = next(model.parameters()).register_hook(fail)  # the last that backward reaches
    try:
        model(x).sum().backward()
    finally:
        handle.remove()


def test_buckets_are_read_without_declared_pieces_too(ranks2: Ranks) -> None:
    expected = ranks2(_ungated, "plain", "leaf")[0]
    for tap_name, trace_cov, windows, dropped in ranks2(_ungated, "plain", "comm_hook"):
        assert (tap_name, windows, dropped) == ("DDP's communication hook", 12, [])
        assert trace_cov == pytest.approx(expected[1], rel=1e-5)


@pytest.mark.parametrize(
    ("case", "windows", "reason"),
    [
        ("left over", 1, "gradients from before the window's first backward"),
        ("failed", 11, "in a piece that was interrupted"),
        ("outside", 0, "a backward outside piece(), or in"),
    ],
)
def test_gradients_in_ddps_buckets_beside_the_piece_are_named(
    ranks2: Ranks, case: str, windows: int, reason: str
) -> None:
    for _, _, got_windows, dropped in ranks2(_ungated, case, "comm_hook"):
        assert got_windows == windows, dropped
        assert reason in dropped[-1]  # in the first window, the backward outside counted as a piece


def _all_checkpointed(tap: str) -> tuple[int, list[str]]:
    model = small_model()
    ddp = DistributedDataParallel(model)
    forward = model.forward
    model.forward = lambda x: checkpoint(forward, x, use_reentrant=True)  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(ddp, tap=tap, units_per_piece=4) as probe:
        for _ in range(5):
            x, y = batch(4, generator)
            mean_loss(ddp, x.requires_grad_(), y).backward()
            probe.step()
            ddp.zero_grad()
        return probe.reading().windows, list(probe.reading().dropped)


@pytest.mark.parametrize("tap", ["leaf", "comm_hook"])
def test_reentrant_checkpointing_without_declared_pieces_is_named(ranks2: Ranks, tap: str) -> None:
    for windows, dropped in ranks2(_all_checkpointed, tap):
        assert windows == 0
        assert "reentrant checkpointing runs backward inside backward" in dropped[0]


def _scaled(init_scale: float) -> tuple[int, float, float]:
    """A rank's windows under a GradScaler, read in DDP's buckets; a scale of 0 for no scaler."""
    _, model = wrap({})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale or 1.0, enabled=init_scale > 0)
    with attached(model, optimizer, tap="comm_hook", grad_scaler=scaler) as probe:
        for window in range(4):
            for x, y in batches(dist.get_rank(), 1, window):
                with probe.piece(units=len(x)):
                    scaler.scale(mean_loss(model, x, y)).backward()
            scaler.unscale_(optimizer)
            probe.step()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        reading = probe.reading()
    assert reading.trace_cov is not None
    assert reading.grad_sq is not None
    return reading.windows, reading.trace_cov, reading.grad_sq


def test_a_loss_scale_is_taken_out_of_the_buckets(ranks2: Ranks) -> None:
    for scaled, plain in zip(ranks2(_scaled, 1024.0), ranks2(_scaled, 0.0), strict=True):
        assert scaled[0] == plain[0] == 4
        assert scaled[1:] == pytest.approx(plain[1:], rel=1e-6)  # powers of two scale without rounding
