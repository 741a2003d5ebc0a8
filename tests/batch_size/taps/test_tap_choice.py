"""Which tap reads a model: leaf hooks, unless DDP's buckets are asked for. The choice never changes during a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sonde.batch_size.taps.ddp_buckets import averages_alike
from tests.batch_size.ddp_loops import batches_of_four, windows_of_one_piece, wrap
from tests.batch_size.loops import attached, batch, mean_loss, small_model
from tests.ranks import Ranks


def _by_default() -> tuple[list[str], int]:
    """One piece per rank in each window."""
    _, model = wrap({})
    with attached(model, log_every=1) as probe:
        names: list[str] = []
        windows_of_one_piece(probe, model, batches_of_four(10), lambda: names.append(probe._reader.tap_name))
        return names, len(model._comm_hooks)


def test_leaf_hooks_read_by_default_and_ddp_gets_no_communication_hook(ranks2: Ranks) -> None:
    assert ranks2(_by_default) == [(["leaf hooks"] * 10, 0)] * 2


def _frozen_after_wrapping() -> tuple[str, int]:
    plain, model = wrap({"find_unused_parameters": True})
    plain[0].requires_grad_(False)  # type: ignore[index]
    with attached(model, tap="comm_hook", log_every=1) as probe:
        windows_of_one_piece(probe, model, batches_of_four(8))
        return probe._reader.tap_name, probe.reading().windows


def test_parameters_frozen_after_wrapping(ranks2: Ranks) -> None:
    assert ranks2(_frozen_after_wrapping) == [("DDP's communication hook", 8)] * 2


def _two_ddp_modules() -> tuple[str, list[float | None], str]:
    torch.manual_seed(0)
    model = nn.Sequential(DistributedDataParallel(nn.Linear(12, 8)), DistributedDataParallel(nn.Linear(8, 3)))
    traces: list[float | None] = []
    with attached(model, log_every=1) as probe:
        windows_of_one_piece(
            probe, model, batches_of_four(8), lambda: traces.append(probe.reading().groups["1"].trace_cov)
        )
        name = probe._reader.tap_name
    try:
        attached(model, tap="comm_hook")
    except ValueError as error:
        return name, traces, str(error)
    return name, traces, "no error"


def test_two_ddp_modules_are_read_by_leaf_hooks_alone(ranks2: Ranks) -> None:
    for name, traces, message in ranks2(_two_ddp_modules):
        assert name == "leaf hooks"
        assert min(traces) > 0.3 * max(traces)
        assert "parameters outside" in message


def _a_tap_each() -> tuple[float | None, float | None, bool]:
    """One rank reads leaf hooks, the other DDP's buckets."""
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
    with attached(model, tap="leaf") as probe:
        windows_of_one_piece(probe, model, batches_of_four(10))
        return probe.reading().trace_cov, probe.reading().grad_sq


def test_ranks_may_have_other_taps(ranks2: Ranks) -> None:
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


def test_leaf_hooks_read_sparse_gradients(ranks2: Ranks) -> None:
    for tap_name, windows, dropped in ranks2(_sparse_under_ddp, "leaf"):
        assert (tap_name, windows, dropped) == ("leaf hooks", 12, [])
    for _, windows, dropped in ranks2(_sparse_under_ddp, "comm_hook"):
        assert windows == 0
        assert "DDP does not put a sparse gradient into a bucket" in dropped[0]


def _builtin_hook() -> tuple[str, int]:
    model = DistributedDataParallel(small_model())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with attached(model, log_every=1) as probe:
        windows_of_one_piece(probe, model, batches_of_four(10))
        return probe._reader.tap_name, probe.reading().windows


def test_leaf_hooks_read_where_ddp_accepts_no_hook(ranks2: Ranks) -> None:
    for tap_name, windows in ranks2(_builtin_hook):
        assert (tap_name, windows) == ("leaf hooks", 10)


class Blocks(nn.Module):
    """Residual blocks that a step may skip; the witness reads the first and the last block in every window."""

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
    with attached(ddp, tap="comm_hook", units_per_piece=4, log_every=1, groups=None) as probe:
        for _ in range(30):
            model.kept = [True] * 6
            if float(torch.rand((), generator=choose)) < 0.5:
                model.kept = [False, True, True, True, True, False]  # the blocks that are compared in every window
            x = torch.randn(4, 12, generator=generator)
            with probe.piece():
                ddp(x).square().sum(1).mean().backward()
            probe.step()
            ddp.zero_grad()
        return probe._reader.tap_name, probe.reading().windows, list(probe.reading().dropped)


def test_blocks_skipped_at_random_do_not_count_as_empty_pieces(ranks2: Ranks) -> None:
    for tap_name, windows, dropped in ranks2(_skipped):
        assert tap_name == "DDP's communication hook"
        assert not [reason for reason in dropped if "no backward" in reason]
        assert windows >= 25, dropped


def test_a_hook_rounds_as_ddp_does_on_powers_of_two_ranks_or_without_a_bucket_view() -> None:
    def is_alike(n_ranks: int, view: bool) -> bool:
        model = SimpleNamespace(gradient_as_bucket_view=view, process_group=SimpleNamespace(size=lambda: n_ranks))
        return averages_alike(cast(DistributedDataParallel, model))

    assert [n for n in range(1, 20) if is_alike(n, True)] == [1, 2, 4, 8, 16]
    assert all(is_alike(n, False) for n in range(1, 20))


def _buckets_on_one_rank() -> str:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    model = DistributedDataParallel(small_model(), process_group=alone)
    attached(model, tap="leaf").close()
    try:
        attached(model, tap="comm_hook")
    except ValueError as error:
        return str(error)
    return "no error"


def test_buckets_of_a_single_rank_are_refused_with_the_way_out(ranks2: Ranks) -> None:
    """Its whole window would be one piece, however many micro-batches it has."""
    for message in ranks2(_buckets_on_one_rank):
        assert "got 1 rank" in message
        assert "use tap='leaf'" in message
