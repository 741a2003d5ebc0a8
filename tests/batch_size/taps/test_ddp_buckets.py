"""DDP's buckets as pieces: what else they hold, or cannot hold, is named. `test_matrix.py` has their numbers."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
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
from tests.batch_size.loops import attached, batch, mean_loss, pieces_of, small_model
from tests.batch_size.single_examples import run
from tests.ranks import Ranks

LEAF, BUCKETS = "leaf hooks", "DDP's communication hook"


def _attached_again(how: str) -> tuple[Any, Any, list[Any]]:
    """What a second probe reads, and a probe of leaf hooks; the user's hook, and what is said to a third probe."""
    model: Any = DistributedDataParallel(small_model())
    own = [pieces_of(4, seed=10 * window + dist.get_rank()) for window in range(6)]
    with attached(model, tap="comm_hook") as probe:
        run(model, probe, *own)
    if how != "same":
        model = pickle.loads(pickle.dumps(model)) if how == "pickled" else copy.deepcopy(model)
    names = [comm_hook_name(model)]
    with attached(model, tap="comm_hook") as probe:
        run(model, probe, *own)
        reading = probe.reading()
        with pytest.raises(ValueError, match="another probe reads the buckets"):
            attached(model, tap="comm_hook")
    with attached(model, tap="leaf") as probe:
        run(model, probe, *own)
        return reading, probe.reading(), names


@pytest.mark.parametrize("how", ["same", "pickled", "deepcopied"])
def test_a_model_is_as_good_as_new_after_close(ranks2: Ranks, how: str) -> None:
    for reading, by_leaves, names in ranks2(_attached_again, how):
        assert reading.windows == 6
        assert (reading.trace_cov, reading.grad_sq) == pytest.approx((by_leaves.trace_cov, by_leaves.grad_sq), rel=1e-5)
        assert names == [None]  # sonde's relay is no hook of the user


# One window has a batch of each rank; something comes beside it.


def plain(model: Any, probe: Any, window: int, rows: Any) -> None:
    mean_loss(model, *rows).backward()


def clipped_by_value(model: Any, probe: Any, window: int, rows: Any) -> None:
    plain(model, probe, window, rows)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def failed(model: Any, probe: Any, window: int, rows: Any) -> None:
    """A backward fails halfway in the third window, and is tried again."""

    def fail(_: torch.Tensor) -> None:
        raise KeyError

    if window == 2:
        handle = next(model.parameters()).register_hook(fail)  # the last that backward reaches
        with contextlib.suppress(KeyError), model.no_sync():
            mean_loss(model, *rows).backward()
        handle.remove()
        model.zero_grad()
    plain(model, probe, window, rows)


def outside(model: Any, probe: Any, window: int, rows: Any) -> None:
    with model.no_sync():
        mean_loss(model, *rows).backward()
    with probe.piece():
        mean_loss(model, *rows).backward()


def empty(model: Any, probe: Any, window: int, rows: Any) -> None:
    with probe.piece():
        pass
    with probe.piece():
        mean_loss(model, *rows).backward()


def interrupted(model: Any, probe: Any, window: int, rows: Any) -> None:
    with contextlib.suppress(KeyError), model.no_sync(), probe.piece():
        mean_loss(model, *rows).backward()
        raise KeyError
    with probe.piece():
        mean_loss(model, *rows).backward()


def left_over(model: Any, probe: Any, window: int, rows: Any) -> None:
    """Gradients are zeroed before the first window only."""
    plain(model, probe, window, rows)
    model.zero_grad = lambda: None


Window = Callable[[Any, Any, int, Any], None]
BESIDE: dict[str, tuple[Window, str, int, str]] = {
    "nothing, leaf hooks": (plain, "leaf", 6, ""),
    "nothing": (plain, "comm_hook", 6, ""),
    "clipped by value, leaf hooks": (clipped_by_value, "leaf", 0, "clipped by value"),
    "clipped by value": (clipped_by_value, "comm_hook", 0, "clipped by value"),
    "left over": (left_over, "comm_hook", 1, "gradients from before the window's first backward"),
    "failed": (failed, "comm_hook", 5, "in a piece that was interrupted"),
    "outside": (outside, "comm_hook", 0, "a backward outside piece(), or in"),
    "empty": (empty, "comm_hook", 0, "no backward reached the parameters in a piece"),
    "interrupted": (interrupted, "comm_hook", 0, "in a piece that was interrupted"),
}


def _beside(name: str) -> tuple[int, list[str]]:
    one_window, tap, *_ = BESIDE[name]
    model, generator = DistributedDataParallel(small_model()), torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap=tap, units_per_piece=4, groups=None) as probe:
        for window in range(6):
            one_window(model, probe, window, batch(4, generator))
            probe.step()
            model.zero_grad()
        return probe.reading().windows, list(probe.reading().dropped)


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_beside_the_piece_is_named(ranks2: Ranks, name: str) -> None:
    *_, expected, reason = BESIDE[name]
    for windows, dropped in ranks2(_beside, name):
        assert windows == expected, dropped
        assert reason in (dropped or [""])[-1]  # in the first window, a backward outside counted as a piece


def _all_checkpointed(tap: str) -> list[str]:
    model = small_model()
    ddp, forward = DistributedDataParallel(model), model.forward
    model.forward = lambda x: checkpoint(forward, x, use_reentrant=True)  # type: ignore[method-assign]
    with attached(ddp, tap=tap, units_per_piece=4) as probe:
        x, y = batch(4, torch.Generator().manual_seed(dist.get_rank()))
        mean_loss(ddp, x.requires_grad_(), y).backward()
        probe.step()
        return list(probe.reading().dropped)


@pytest.mark.parametrize("tap", ["leaf", "comm_hook"])
def test_reentrant_checkpointing_without_declared_pieces_is_named(ranks2: Ranks, tap: str) -> None:
    for [reason] in ranks2(_all_checkpointed, tap):
        assert "reentrant checkpointing runs backward inside backward" in reason


# Models whose buckets are of other kinds.


class Sparse(nn.Module):
    """An embedding with sparse gradients, which DDP reduces in a bucket of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x[:, 0].abs().mul(10).long()))  # type: ignore[no-any-return]


class Blocks(nn.Module):
    """Residual blocks that a step may skip: all but two that the witness does not read in every window."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(6))
        self.choose = torch.Generator().manual_seed(9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = float(torch.rand((), generator=self.choose)) < 0.5
        for layer in (self.layers[1], self.layers[4]) if skips else self.layers:
            x = x + torch.tanh(layer(x))
        return x


def _made(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "two modules":
        return nn.Sequential(DistributedDataParallel(nn.Linear(12, 8)), DistributedDataParallel(nn.Linear(8, 3)))
    inner = {"sparse": Sparse, "skipped": Blocks}.get(kind, small_model)()
    model = DistributedDataParallel(inner, find_unused_parameters=kind in ("skipped", "frozen"))
    if kind == "frozen":  # after DDP was made
        model.module[0].requires_grad_(False)
    if kind == "built-in hook":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return model


def _windows(kind: str, tap: str) -> tuple[str, int, int, list[str]]:
    """Where gradients are read, how many communication hooks DDP has, windows and reasons, of 12 windows."""
    model, generator = _made(kind), torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap=tap, units_per_piece=8, groups=None) as probe:
        for _ in range(12):
            model(batch(8, generator)[0]).square().sum(1).mean().backward()
            probe.step()
            model.zero_grad()
        n_hooks = len(getattr(model, "_comm_hooks", ()))
        return probe._reader.tap_name, n_hooks, probe.reading().windows, list(probe.reading().dropped)


@pytest.mark.parametrize("kind", ["sparse", "skipped", "two modules", "built-in hook"])
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


# Refusals.


def _refusal(kind: str) -> str:
    model = _made(kind)
    if kind == "registered":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    if kind == "one rank":
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        model = DistributedDataParallel(small_model(), process_group=alone)
        attached(model, tap="leaf").close()
    if kind == "views":
        model = DistributedDataParallel(small_model(), gradient_as_bucket_view=True)
    with pytest.raises(ValueError, match="comm_hook") as refused:
        attached(model, tap="comm_hook")
    return str(refused.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("registered", ("'allreduce_hook' is registered already", "attach(comm_hook=")),
        ("two modules", ("parameters outside", "use tap='leaf'")),
        ("one rank", ("got 1 rank", "use tap='leaf'")),
        ("views", ("cannot round as DDP does with gradient_as_bucket_view=True on 3 ranks", "use tap='leaf'")),
    ],
)
def test_buckets_that_cannot_be_read_are_refused_with_the_way_out(
    ranks3: Ranks, kind: str, words: tuple[str, ...]
) -> None:
    for message in ranks3(_refusal, kind):
        assert all(each in message for each in words), message


def test_a_hook_rounds_as_ddp_does_on_powers_of_two_ranks_or_without_a_bucket_view() -> None:
    def is_alike(n_ranks: int, view: bool) -> bool:
        model = SimpleNamespace(gradient_as_bucket_view=view, process_group=SimpleNamespace(size=lambda: n_ranks))
        return averages_alike(cast(DistributedDataParallel, model))

    assert [n for n in range(1, 20) if is_alike(n, True)] == [1, 2, 4, 8, 16]
    assert all(is_alike(n, False) for n in range(1, 20))
