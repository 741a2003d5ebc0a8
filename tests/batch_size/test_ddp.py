"""Loops under DDP that reduce in ways of their own, and what goes wrong on one rank: a reason, never a hang."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel

from tests.batch_size.cut_loops import train
from tests.batch_size.cuts import in_bf16
from tests.batch_size.loops import Recording, assert_same, attached, batch, flat_grad, mean_loss, pieces_of, small_model
from tests.batch_size.set_ups import Loop
from tests.oracles import window_by_hand
from tests.ranks import Ranks

# How gradients are reduced.


def two_backwards(first_reduces: bool) -> tuple[Any, tuple[float, float]]:
    """Two losses with a backward each in a rank's only piece, as with an auxiliary loss."""
    plain = small_model()
    model = DistributedDataParallel(plain)
    with attached(model) as probe:
        for window in range(2):  # the first shows that there are several
            with probe.piece(units=4):
                for i, (x, y) in enumerate(pieces_of(4, 4, seed=10 * window + dist.get_rank())):
                    with contextlib.nullcontext() if i or first_reduces else model.no_sync():
                        mean_loss(model, x, y).backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    gradients = [
        sum(flat_grad(plain, mean_loss(plain, *rows)) for rows in pieces_of(4, 4, seed=10 + r)) for r in (0, 1)
    ]
    return reading, window_by_hand(gradients, [1, 1], [4, 4], sum(gradients) / 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("first_reduces", [False, True])
def test_two_backwards_in_a_ranks_only_piece(ranks2: Ranks, first_reduces: bool) -> None:
    for reading, expected in ranks2(two_backwards, first_reduces):
        assert_same(reading, expected, rel=2e-5)
        assert ["several backwards" in reason for reason in reading.dropped] == [True]


class Routed(nn.Module):
    """A model with a layer that its caller may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.last, self.extra = nn.Linear(12, 160), nn.Linear(160, 3), nn.Linear(160, 3)

    def forward(self, x: Tensor, uses_extra: bool) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden) + (self.extra(hidden) if uses_extra else 0)  # type: ignore[no-any-return]


USED = {"in turn": lambda rank, micro: micro == rank, "late": lambda rank, micro: micro >= rank}


def with_a_layer_now_and_then(no_sync: bool, used: str, forgets_to_zero: bool) -> dict[str, Any]:
    """A rank uses a layer in some micro-batches only, and DDP may reduce after each of them."""
    twin, model = Routed(), DistributedDataParallel(Routed(), find_unused_parameters=True)

    def loss_of(model: nn.Module, rank: int, window: int, micro: int) -> Tensor:
        x, y = batch(4, torch.Generator().manual_seed(1000 * rank + 10 * window + micro))
        return (model(x, USED[used](rank, micro)) - y).square().sum(-1).mean()  # type: ignore[no-any-return]

    differences = []
    with attached(model, units_per_piece=4) as probe:
        for window in range(4):
            for micro in range(3):
                with model.no_sync() if no_sync and micro < 2 else contextlib.nullcontext():
                    loss_of(model, dist.get_rank(), window, micro).backward()
            probe.step()
            if not forgets_to_zero:
                model.zero_grad()
            if (solved := probe.window()) is not None:
                grads = [flat_grad(twin, loss_of(twin, r, window, m)) for r in range(2) for m in range(3)]
                trace, grad_sq = window_by_hand(grads, [1.0] * 6, [4.0] * 6, torch.stack(grads).sum(0) / 2)
                differences += [solved.total.trace_cov / trace - 1, (solved.total.grad_sq - grad_sq) / trace]
        return {"windows": probe.reading().windows, "alerts": dict(probe.alerts), "differences": differences}


@pytest.mark.parametrize("forgets_to_zero", [False, True])
@pytest.mark.parametrize(("no_sync", "used"), [(True, "in turn"), (False, "in turn"), (False, "late")])
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_what_ddp_has_reduced_before_is_not_left_over(
    ranks2: Ranks, no_sync: bool, used: str, forgets_to_zero: bool
) -> None:
    for found in ranks2(with_a_layer_now_and_then, no_sync, used, forgets_to_zero):
        if forgets_to_zero:
            assert found["windows"] == 1
            assert "not_zeroed" in found["alerts"]
        else:
            assert (found["windows"], found["alerts"]) == (4, {})
            # fp32 gradients that gloo has averaged, after each micro-batch or once.
            assert found["differences"] == pytest.approx([0.0] * 8, abs=1e-5)


def with_lossy_communication() -> Any:
    return train(Loop("ddp", hook="powersgd", clips=False, windows=6), probed=True, compares=False)["reading"]


def test_lossy_communication_is_named(ranks2: Ranks) -> None:
    """Rounding by 16-bit communication is no change."""
    for reading in ranks2(with_lossy_communication):
        assert any("communication hook 'powerSGD_hook' is lossy" in reason for reason in reading.dropped)


# Each loop runs on both ranks, and every window is given to both.


def window_of(model: nn.Module, probe: Any, generator: torch.Generator, n_pieces: int = 2, factor: float = 1.0) -> None:
    """Backwards of one window; the first piece's loss is multiplied by a factor."""
    for i in range(n_pieces):
        waits = i < n_pieces - 1 and isinstance(model, DistributedDataParallel)
        with probe.piece(units=4), model.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
            (mean_loss(model, *batch(4, generator)) * (1.0 if i else factor)).backward()


def hook_registered_late(probe: Any, model: Any, generator: torch.Generator, rank: int) -> None:
    model.register_comm_hook(None, in_bf16)
    for _ in range(10):
        window_of(model, probe, generator, 1)
        probe.step()
        model.zero_grad()


def one_nan(probe: Any, model: Any, generator: torch.Generator, rank: int) -> None:
    for window in range(3):
        window_of(model, probe, generator, factor=math.nan if (rank, window) == (1, 1) else 1.0)
        probe.step()
        model.zero_grad()


def never_reduces(probe: Any, model: Any, generator: torch.Generator, rank: int) -> None:
    """As with local SGD."""
    with model.no_sync():
        window_of(model, probe, generator)
        probe.step()


def state_is_made(probe: Any, model: Any, generator: torch.Generator, rank: int) -> None:
    """torch.distributed.checkpoint makes an optimizer's state by a step without gradients."""
    optimizer = torch.optim.AdamW(model.parameters())
    get_state_dict(model, optimizer)
    for _ in range(4):
        window_of(model, probe, generator, 1)
        optimizer.step()
        optimizer.zero_grad()


def the_step_ends(probe: Any, model: Any, generator: torch.Generator, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(6):
        window_of(model, probe, generator, 1)
        optimizer.step()
        optimizer.zero_grad()


def without_a_piece(probe: Any, model: Any, generator: torch.Generator, rank: int) -> None:
    """The peers of a rank without a piece wait for its part of the sum. Nothing is reduced here."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for window in range(6):
        if (window, rank) != (3, 1):
            with model.no_sync():
                window_of(model, probe, generator, 1)
        optimizer.step()
        optimizer.zero_grad()


LOOPS: dict[str, tuple[Callable[..., None], dict[str, Any], int, dict[str, int]]] = {
    "a hook registered after attach": (hook_registered_late, {}, 10, {}),
    "a NaN on one rank": (one_nan, {}, 2, {"not finite": 1}),
    "no reduction": (never_reduces, {}, 0, {"ranks did not average their gradients (local SGD, model.no_sync())": 1}),
    "an optimizer's state is made": (state_is_made, {}, 4, {"": 1}),
    "the step ends the window": (the_step_ends, {}, 6, {}),
    "a rank without a piece": (without_a_piece, {}, 0, {"": 6}),
}


def looped(name: str) -> tuple[int, dict[str, int]]:
    loop, options, *_ = LOOPS[name]
    model = DistributedDataParallel(small_model())
    with attached(model, **options) as probe:
        loop(probe, model, torch.Generator().manual_seed(dist.get_rank()), dist.get_rank())
        reading = probe.reading()
        return reading.windows, dict(reading.dropped)


@pytest.mark.parametrize("name", LOOPS)
def test_all_ranks_say_the_same_of_a_loop(ranks2: Ranks, name: str) -> None:
    *_, windows, expected = LOOPS[name]
    for found, dropped in ranks2(looped, name):
        assert (found, sum(dropped.values())) == (windows, sum(expected.values()))
        assert all(any(reason in each for reason in expected) for each in dropped), dropped


def in_fp16(state: object, bucket):  # type: ignore[no-untyped-def]  # torch's own refuses gloo by its name
    return default_hooks.fp16_compress_hook(state, bucket)


def bias_before_batch_norm() -> tuple[int, dict[str, int]]:
    """The gradient of a bias before batch norm is 0 but for rounding, and fp16 loses the rounding."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 3)))
    model.register_comm_hook(None, in_fp16)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model) as probe:
        for _ in range(10):
            for k in range(2):
                x = torch.randn(8, 6, generator=generator)
                with model.no_sync() if k == 0 else contextlib.nullcontext(), probe.piece(units=8):
                    (model(x) - x[:, :3]).square().mean().backward()
            probe.step()
            model.zero_grad()
        return probe.reading().windows, dict(probe.reading().dropped)


def test_underflow_in_fp16_does_not_count_as_a_change(ranks2: Ranks) -> None:
    assert ranks2(bias_before_batch_norm) == [(10, {})] * 2


def with_uneven_inputs(measures: bool, clips: bool, every: int) -> tuple[Any, ...]:
    """Three windows on each rank, then as many batches as a rank has inside join(), and three again."""
    model = DistributedDataParallel(small_model())
    optimizer, generator = torch.optim.SGD(model.parameters(), lr=1e-3), torch.Generator().manual_seed(dist.get_rank())
    probe = attached(model, optimizer, every=every) if measures else None

    def window() -> None:
        with probe.piece(units=4) if probe is not None else contextlib.nullcontext():
            mean_loss(model, *batch(4, generator)).backward()
        if clips and probe is not None:
            probe.clip_grad_norm_(1e-2)
        elif clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        elif probe is not None:
            probe.step()
        optimizer.step()
        optimizer.zero_grad()

    for n in (3, 2 if dist.get_rank() == 0 else 5, 3):
        with model.join() if n != 3 else contextlib.nullcontext():
            for _ in range(n):
                window()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    if probe is None:
        return (weights,)
    reading, alerts = probe.reading(), probe.alerts
    probe.close()
    return weights, reading.windows, reading.dropped, list(alerts)


@pytest.mark.parametrize(("clips", "every"), [(False, 1), (True, 1), (False, 2)])
def test_uneven_inputs_are_left_out_and_training_is_the_same(clips: bool, every: int, ranks2: Ranks) -> None:
    measured, plain = (ranks2(with_uneven_inputs, measures, clips, every) for measures in (True, False))
    for (weights, windows, dropped, alerts), (without,) in zip(measured, plain, strict=True):
        assert weights.isfinite().all()
        assert torch.allclose(weights, without, rtol=1e-6) if clips else torch.equal(weights, without)
        assert (dropped, alerts) == ({}, ["uneven_inputs"])
        assert 0 < windows <= 3


# Ranks that fail.


def peer_leaves(by_with: bool) -> tuple[int, list[str], int, str]:
    """A window whose sum fails: the other rank does not take part, and the collective runs into its timeout."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    model, sink = small_model(), Recording()
    probe = attached(model, process_group=group, sinks=[sink])
    if dist.get_rank() == 1:
        time.sleep(3)
        return 0, [], 0, ""
    error = pytest.raises((KeyError, RuntimeError))
    with error as raised, probe if by_with else contextlib.nullcontext():
        window_of(model, probe, torch.Generator())
        probe.step()
        time.sleep(1.5)  # until the sum over ranks has failed
        if by_with:
            raise KeyError("the user's own")
        probe.close()
    hooks = sum(len(p._backward_hooks or ()) for p in model.parameters())
    return hooks, [r["kind"] for r in sink.records], sink.closed, type(raised.value).__name__


@pytest.mark.parametrize("by_with", [True, False])
def test_a_failed_peer_leaves_no_hook_and_a_whole_log(by_with: bool) -> None:
    ranks = Ranks(2)  # new ranks, since one of their groups is broken afterwards
    try:
        left, _ = ranks(peer_leaves, by_with)
    finally:
        ranks.stop()
    assert left == (0, ["header", "end"], 1, "KeyError" if by_with else "RuntimeError")


def peer_fails() -> str:
    """Rank 1 leaves the loop before it ends its second window. Rank 0 must not wait for rank 1 for ever."""
    model, sink = small_model(), Recording()
    with contextlib.suppress(KeyError), attached(model, process_group=dist.new_group([0, 1]), sinks=[sink]) as probe:
        for window in range(3):
            window_of(model, probe, torch.Generator())
            if window == 2 - dist.get_rank():
                raise KeyError
            probe.step()
            model.zero_grad()
    return sink.of_kind("end")[0]["reason"] if dist.get_rank() == 0 else ""


def test_a_rank_that_fails_does_not_hang_the_others(ranks2: Ranks) -> None:
    assert ranks2(peer_fails)[0] == "stopped by KeyError"
    ranks2.stop(kill=True)  # a collective without its peer is left behind in that group
