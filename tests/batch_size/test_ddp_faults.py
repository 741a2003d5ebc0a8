"""What goes wrong under DDP: peers that fail, hooks that come late, gradients changed behind DDP's buckets."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import sonde
from tests.batch_size.loops import Recording, attached, batch, mean_loss, small_model
from tests.batch_size.test_probe_ddp import in_bf16
from tests.ranks import Ranks


def _peer_leaves(by_with: bool) -> dict[str, object]:
    """A window whose sum never finishes: the other rank does not take part, and the collective fails in time."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        time.sleep(3)
        return {}
    model, sink = small_model(), Recording()
    probe = attached(model, process_group=group, sinks=[sink])
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
    ranks = Ranks(2)  # their own: a group of theirs is broken afterwards
    try:
        left, _ = ranks(_peer_leaves, by_with)
    finally:
        ranks.stop()
    assert left["hooks"] == 0
    assert left["kinds"] == ["header", "end"]
    assert left["closed"] == 1
    assert left["raised"] == ("KeyError" if by_with else "RuntimeError")


def _changed_behind_the_buckets(tap: str) -> tuple[str, dict[str, int], str]:
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(small_model())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap=tap, log_every=1, horizon=20.0) as probe:
        for _ in range(30):
            with probe.piece(units=4):
                mean_loss(model, *batch(4, generator)).backward()
            for p in model.parameters():
                p.grad.clamp_(-0.01, 0.01)  # type: ignore[union-attr]
            probe.step()
            model.zero_grad()
        return probe.reading().status, dict(probe.reading().dropped), probe._reader.tap_name


@pytest.mark.parametrize("tap", ["auto", "comm_hook"])
def test_what_is_changed_after_the_reduction_is_seen(ranks2: Ranks, tap: str) -> None:
    for status, dropped, tap_name in ranks2(_changed_behind_the_buckets, tap):
        assert status == "unresolved"
        assert sum(dropped.values()) == 30
        assert all("clipped by value" in reason for reason in dropped)
        assert (tap_name == "leaf hooks") == (tap == "auto")  # no reason to change to a tap that sees less


def _scaled_behind_the_buckets() -> list[tuple[float | None, float | None]]:
    """Clipped by norm, differently in each window, before probe.step(): the same as not clipped."""
    found = []
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
            found.append((probe.reading().trace_cov, probe.reading().grad_sq))
    return found


def test_scaling_after_the_reduction_does_not_matter(ranks2: Ranks) -> None:
    for plain, clipped in ranks2(_scaled_behind_the_buckets):
        assert clipped == pytest.approx(plain, rel=1e-4)


def _hook_registered_late() -> tuple[int, dict[str, int]]:
    model = DistributedDataParallel(small_model())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap="leaf", log_every=1) as probe:
        model.register_comm_hook(None, in_bf16)
        for _ in range(10):
            with probe.piece(units=4):
                mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            model.zero_grad()
        return probe.reading().windows, dict(probe.reading().dropped)


def test_a_communication_hook_may_be_registered_after_attach(ranks2: Ranks) -> None:
    for windows, dropped in ranks2(_hook_registered_late):
        assert (windows, dropped) == (10, {})


def _a_tap_each() -> tuple[float | None, float | None, bool]:
    """One rank reads leaf hooks, the other DDP's buckets, as when "auto" changes at different windows."""
    model, plain = DistributedDataParallel(small_model()), DistributedDataParallel(small_model())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap="leaf" if dist.get_rank() == 0 else "comm_hook") as probe:
        for _ in range(10):
            x, y = batch(4, generator)
            with probe.piece(units=4):
                mean_loss(model, x, y).backward()
            mean_loss(plain, x, y).backward()
            probe.step()
            same = all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]
            if not same:
                break
            model.zero_grad()
            plain.zero_grad()
        return probe.reading().trace_cov, probe.reading().grad_sq, same


def _leaf_on_both() -> tuple[float | None, float | None]:
    model = DistributedDataParallel(small_model())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap="leaf") as probe:
        for _ in range(10):
            with probe.piece(units=4):
                mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            model.zero_grad()
        return probe.reading().trace_cov, probe.reading().grad_sq


def test_ranks_may_change_taps_at_different_windows(ranks2: Ranks) -> None:
    expected = ranks2(_leaf_on_both)[0]
    for trace_cov, grad_sq, same in ranks2(_a_tap_each):
        assert same
        assert (trace_cov, grad_sq) == pytest.approx(expected, rel=1e-5)


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


def _sparse_under_ddp(tap: str) -> tuple[str, int, list[str]]:
    model = DistributedDataParallel(Sparse())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap=tap, log_every=1) as probe:
        for _ in range(12):
            with probe.piece(units=8):
                model(torch.randint(50, (8,), generator=generator)).square().sum(1).mean().backward()
            probe.step()
            model.zero_grad()
        return probe._reader.tap_name, probe.reading().windows, list(probe.reading().dropped)


def test_sparse_gradients_stay_with_leaf_hooks(ranks2: Ranks) -> None:
    for tap_name, windows, dropped in ranks2(_sparse_under_ddp, "auto"):
        assert (tap_name, windows, dropped) == ("leaf hooks", 12, [])
    for _, windows, dropped in ranks2(_sparse_under_ddp, "comm_hook"):
        assert windows == 0
        assert "DDP does not put a sparse gradient into a bucket" in dropped[0]


def _odd_pieces(what: str) -> tuple[int, list[str]]:
    model = DistributedDataParallel(small_model())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap="comm_hook", units_per_piece=4) as probe:
        for _ in range(5):
            if what == "empty":
                with probe.piece():
                    pass
            elif what == "interrupted":
                with contextlib.suppress(KeyError), model.no_sync(), probe.piece():
                    mean_loss(model, *batch(4, generator)).backward()
                    raise KeyError
            with contextlib.nullcontext() if what == "undeclared" else probe.piece():
                mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            model.zero_grad()
        return probe.reading().windows, list(probe.reading().dropped)


@pytest.mark.parametrize(
    ("what", "windows", "reason"),
    [
        ("empty", 0, "no backward reached the parameters in a piece"),
        ("interrupted", 0, "a piece was interrupted in or after its backward"),
        ("undeclared", 5, None),
        ("plain", 5, None),
    ],
)
def test_pieces_that_buckets_cannot_see_for_themselves(
    ranks2: Ranks, what: str, windows: int, reason: str | None
) -> None:
    for got, dropped in ranks2(_odd_pieces, what):
        assert got == windows
        assert (reason in dropped[0]) if reason else dropped == []


def _builtin_hook() -> tuple[str, int]:
    model = DistributedDataParallel(small_model())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, log_every=1) as probe:
        for _ in range(10):
            with probe.piece(units=4):
                mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            model.zero_grad()
        return probe._reader.tap_name, probe.reading().windows


def test_where_ddp_takes_no_hook_leaf_hooks_stay(ranks2: Ranks) -> None:
    for tap_name, windows in ranks2(_builtin_hook):
        assert (tap_name, windows) == ("leaf hooks", 10)


def _one_spike() -> list[bool]:
    """Independent data, one window with huge labels: is the data said to be the same?"""
    accused = []
    for seed in range(6):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(3, 1))
        generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
        with attached(model, tap="leaf", horizon=100.0) as probe:
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


def _bias_before_batch_norm() -> tuple[int, dict[str, int]]:
    """Its gradient is zero but for rounding, and fp16 loses that."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 3)))
    model.register_comm_hook(None, in_fp16)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap="leaf") as probe:
        for _ in range(10):
            for k in range(2):
                x = torch.randn(8, 6, generator=generator)
                with model.no_sync() if k == 0 else contextlib.nullcontext(), probe.piece(units=8):
                    (model(x) - x[:, :3]).square().mean().backward()
            probe.step()
            model.zero_grad()
        return probe.reading().windows, dict(probe.reading().dropped)


def in_fp16(state: object, bucket):  # type: ignore[no-untyped-def]  # torch's own refuses gloo by its name
    return default_hooks.fp16_compress_hook(state, bucket)


def test_what_fp16_loses_by_underflow_is_no_change(ranks2: Ranks) -> None:
    for windows, dropped in ranks2(_bias_before_batch_norm):
        assert (windows, dropped) == (10, {})


def _ungated(what: str, tap: str) -> tuple[str, float | None, int, list[str]]:
    """The loss of one rank's batch in each window, without `piece()` unless a case is about it."""
    torch.manual_seed(3)
    model = DistributedDataParallel(small_model())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap=tap, units_per_piece=4, log_every=1, groups=None) as probe:
        for window in range(12):
            x, y = batch(4, generator)
            if what == "left over" and window == 0:
                model.zero_grad()
            if what == "failed" and window == 4:
                with contextlib.suppress(KeyError), model.no_sync():
                    _fails_halfway(model, x)
                model.zero_grad()
            if what == "outside":
                with model.no_sync():
                    mean_loss(model, x, y).backward()
            with probe.piece() if what == "outside" else contextlib.nullcontext():
                mean_loss(model, x, y).backward()
            probe.step()
            if what != "left over":
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


def test_auto_reads_buckets_without_declared_pieces_too(ranks2: Ranks) -> None:
    expected = ranks2(_ungated, "plain", "leaf")[0]
    for tap_name, trace_cov, windows, dropped in ranks2(_ungated, "plain", "auto"):
        assert (tap_name, windows, dropped) == ("DDP's communication hook", 12, [])
        assert trace_cov == pytest.approx(expected[1], rel=1e-5)


@pytest.mark.parametrize(
    ("what", "windows", "reason"),
    [
        ("left over", 1, "gradients from before the window's first backward"),
        ("failed", 11, "a piece was interrupted in or after its backward"),
        ("outside", 1, "a backward outside piece() added to the gradients"),
    ],
)
def test_what_ddps_buckets_hold_besides_the_piece_is_named(ranks2: Ranks, what: str, windows: int, reason: str) -> None:
    for _, _, got, dropped in ranks2(_ungated, what, "comm_hook"):
        assert got == windows, dropped
        assert reason in dropped[0]


class Blocks(nn.Module):
    """Residual blocks that a step may skip; the first and last of them are what the witness always reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(6))
        self.kept = [True] * 6
        self.checkpoints = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, kept in zip(self.layers, self.kept, strict=True):
            if kept:
                x = x + torch.tanh(layer(x))
        return x


def _skipped() -> tuple[str, int, list[str]]:
    model = Blocks()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    generator, choose = torch.Generator().manual_seed(dist.get_rank()), torch.Generator().manual_seed(9)
    with attached(ddp, units_per_piece=4, log_every=1, groups=None) as probe:
        for _ in range(30):
            model.kept = [True] * 6
            if float(torch.rand((), generator=choose)) < 0.5:
                model.kept = [False, True, True, True, True, False]  # those that are always compared
            x = torch.randn(4, 12, generator=generator)
            with probe.piece():
                ddp(x).square().sum(1).mean().backward()
            probe.step()
            ddp.zero_grad()
        return probe._reader.tap_name, probe.reading().windows, list(probe.reading().dropped)


def test_blocks_that_are_skipped_at_random_are_no_empty_pieces(ranks2: Ranks) -> None:
    for tap_name, windows, dropped in ranks2(_skipped):
        assert tap_name == "DDP's communication hook"
        assert not [reason for reason in dropped if "no backward" in reason]
        assert windows >= 25, dropped


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
