"""Which tap reads a model under DDP, and DDP's buckets as pieces: what else they hold, or cannot hold, is named."""

from __future__ import annotations

import contextlib
import copy
import pickle
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sonde.batch_size.taps.ddp_buckets import averages_alike, comm_hook_name
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


def _beside(case: str, tap: str) -> tuple[float | None, int, list[str]]:
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
            if case == "empty":
                with probe.piece():
                    pass
            if case == "interrupted":
                with contextlib.suppress(KeyError), model.no_sync(), probe.piece():
                    mean_loss(model, x, y).backward()
                    raise KeyError
            with probe.piece() if case in ("outside", "empty", "interrupted") else contextlib.nullcontext():
                mean_loss(model, x, y).backward()
            probe.step()
            if case != "left over":
                model.zero_grad()
        return probe.reading().trace_cov, probe.reading().windows, list(probe.reading().dropped)


def _fails_halfway(model: nn.Module, x: torch.Tensor) -> None:
    def fail(_: torch.Tensor) -> None:
        raise KeyError

    handle = next(model.parameters()).register_hook(fail)  # the last that backward reaches
    try:
        model(x).sum().backward()
    finally:
        handle.remove()


def test_buckets_are_read_without_declared_pieces_too(ranks2: Ranks) -> None:
    expected = ranks2(_beside, "plain", "leaf")[0]
    for trace_cov, windows, dropped in ranks2(_beside, "plain", "comm_hook"):
        assert (windows, dropped) == (12, [])
        assert trace_cov == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.parametrize(
    ("case", "windows", "reason"),
    [
        ("left over", 1, "gradients from before the window's first backward"),
        ("failed", 11, "in a piece that was interrupted"),
        ("outside", 0, "a backward outside piece(), or in"),
        ("empty", 0, "no backward reached the parameters in a piece"),
        ("interrupted", 0, "in a piece that was interrupted"),
    ],
)
def test_what_buckets_hold_beside_the_piece_is_named(ranks2: Ranks, case: str, windows: int, reason: str) -> None:
    for _, got_windows, dropped in ranks2(_beside, case, "comm_hook"):
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


class Sparse(nn.Module):
    """An embedding with sparse gradients, which DDP reduces in a bucket of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 6, sparse=True)
        self.head = nn.Linear(6, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(rows))
        return out


class Blocks(nn.Module):
    """Residual blocks that a step may skip: all but two that the witness does not read in every window."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(6))
        self.choose = torch.Generator().manual_seed(9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = float(torch.rand((), generator=self.choose)) < 0.5
        for layer in (self.layers[1], self.layers[4]) if skips else self.layers:
            x = x + torch.tanh(layer(x))
        return x


def _windows(kind: str, tap: str) -> tuple[str, int, int, list[str]]:
    """Where gradients are read, how many communication hooks DDP has, windows and reasons, of 12 windows."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    makes: dict[str, Any] = {"sparse": Sparse, "skipped": Blocks, "two modules": _two_modules}
    model = makes.get(kind, small_model)()
    if kind != "two modules":
        model = DistributedDataParallel(model, find_unused_parameters=kind in ("skipped", "frozen"))
    if kind == "frozen":  # after DDP was made
        model.module[0].requires_grad_(False)
    if kind == "built-in hook":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with attached(model, tap=tap, units_per_piece=8, log_every=1, groups=None) as probe:
        for _ in range(12):
            x = torch.randint(50, (8,), generator=generator) if kind == "sparse" else batch(8, generator)[0]
            with probe.piece():
                model(x).square().sum(1).mean().backward()
            probe.step()
            model.zero_grad()
        n_hooks = len(getattr(model, "_comm_hooks", ()))
        return probe._reader.tap_name, n_hooks, probe.reading().windows, list(probe.reading().dropped)


def _two_modules() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(DistributedDataParallel(nn.Linear(12, 8)), DistributedDataParallel(nn.Linear(8, 3)))


LEAF, BUCKETS = "leaf hooks", "DDP's communication hook"


@pytest.mark.parametrize("kind", ["plain", "sparse", "skipped", "two modules", "built-in hook"])
def test_leaf_hooks_read_any_model_and_ddp_gets_no_communication_hook(ranks2: Ranks, kind: str) -> None:
    assert ranks2(_windows, kind, "leaf") == [(LEAF, 0, 12, [])] * 2


@pytest.mark.parametrize("kind", ["frozen", "skipped"])
def test_buckets_with_parameters_that_get_no_gradient(ranks2: Ranks, kind: str) -> None:
    """Blocks that are skipped at random are compared in other windows. They do not count as empty pieces."""
    for tap_name, _, windows, dropped in ranks2(_windows, kind, "comm_hook"):
        assert tap_name == BUCKETS
        assert not [reason for reason in dropped if "no backward" in reason]
        assert windows >= 10, dropped


def test_sparse_buckets_are_named(ranks2: Ranks) -> None:
    for _, _, windows, dropped in ranks2(_windows, "sparse", "comm_hook"):
        assert windows == 0
        assert "DDP does not put a sparse gradient into a bucket" in dropped[0]


def _refusal(kind: str) -> str:
    if kind == "registered":
        model: nn.Module = wrap({})[1]
        model.register_comm_hook(None, default_hooks.allreduce_hook)  # type: ignore[operator]
    elif kind == "two modules":
        model = _two_modules()
    else:
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        model = DistributedDataParallel(small_model(), process_group=alone)
        attached(model, tap="leaf").close()
    try:
        attached(model, tap="comm_hook")
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("registered", ("'allreduce_hook' is registered already", "attach(comm_hook=")),
        ("two modules", ("parameters outside", "use tap='leaf'")),
        ("one rank", ("got 1 rank", "use tap='leaf'")),
    ],
)
def test_buckets_that_cannot_be_read_are_refused_with_the_way_out(
    ranks2: Ranks, kind: str, words: tuple[str, ...]
) -> None:
    for message in ranks2(_refusal, kind):
        assert all(each in message for each in words), message


def test_a_hook_rounds_as_ddp_does_on_powers_of_two_ranks_or_without_a_bucket_view() -> None:
    def is_alike(n_ranks: int, view: bool) -> bool:
        model = SimpleNamespace(gradient_as_bucket_view=view, process_group=SimpleNamespace(size=lambda: n_ranks))
        return averages_alike(cast(DistributedDataParallel, model))

    assert [n for n in range(1, 20) if is_alike(n, True)] == [1, 2, 4, 8, 16]
    assert all(is_alike(n, False) for n in range(1, 20))


def _issued(tap: str | None, n_micro: int) -> int:
    """Collectives of 4 windows; without a probe if `tap` is None."""
    _, model = wrap({"bucket_cap_mb": 0.01})
    generator = torch.Generator().manual_seed(dist.get_rank())
    group: Any = dist.group.WORLD
    with attached(model, tap=tap, units_per_piece=4) if tap else contextlib.nullcontext() as probe:
        for window in range(8):  # DDP rebuilds its buckets after the first
            if window == 4:
                before = group._get_sequence_number_for_group()
            for i in range(n_micro):
                sync = contextlib.nullcontext() if i == n_micro - 1 else model.no_sync()
                with probe.piece() if probe else contextlib.nullcontext(), sync:
                    mean_loss(model, *batch(4, generator)).backward()
            if probe:
                probe.clip_grad_norm_(1.0)
            model.zero_grad()
        return int(group._get_sequence_number_for_group() - before)


@pytest.mark.parametrize(("tap", "n_micro"), [("leaf", 3), ("comm_hook", 1), ("comm_hook", 3)])
def test_one_collective_a_window(ranks2: Ranks, tap: str, n_micro: int) -> None:
    for n_with, n_without in zip(ranks2(_issued, tap, n_micro), ranks2(_issued, None, n_micro), strict=True):
        assert n_with - n_without == 4
