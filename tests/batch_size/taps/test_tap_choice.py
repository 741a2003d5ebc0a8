"""When tap="auto" changes from leaf hooks to DDP's buckets, when it changes back, and when it stays."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sonde.batch_size.taps.ddp_buckets import is_power_of_two
from sonde.batch_size.taps.ddp_division import why_division_differs
from tests.batch_size.ddp_loops import (
    assert_as_by_hand,
    batches,
    batches_of_four,
    first_batches,
    in_bf16,
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


def _auto_when_accumulation_starts_later() -> tuple[list[str], int, int]:
    """One piece per rank at first, later three without no_sync: then no bucket holds one rank's gradient."""
    _, model = wrap({})
    names = []
    with attached(model, log_every=1) as probe:
        for window in range(16):
            for x, y in batches(dist.get_rank(), 1 if window < 6 else 3, window):
                with probe.piece(units=len(x)):
                    mean_loss(model, x, y).backward()
            probe.step()
            model.zero_grad()
            names.append(probe._reader.tap_name)
        reading = probe.reading()
    return names, reading.windows, sum(reading.dropped.values())


def test_auto_goes_back_to_leaf_hooks_when_buckets_fail(ranks2: Ranks) -> None:
    for names, windows, dropped in ranks2(_auto_when_accumulation_starts_later):
        assert "DDP's communication hook" in names
        assert names[-1] == "leaf hooks"
        assert (windows + dropped, dropped <= 3) == (16, True)


def _auto_with_pieces_now_and_then() -> set[str]:
    """Every third window has three pieces a rank, so there are never three windows of one piece in a row."""
    _, model = wrap({})
    names = set()
    with attached(model, log_every=1) as probe:
        for window in range(12):
            data = batches(dist.get_rank(), 1 if window % 3 else 3, window)
            for i, (x, y) in enumerate(data):
                with probe.piece(units=len(x)), model.no_sync() if i < len(data) - 1 else contextlib.nullcontext():
                    mean_loss(model, x, y).backward()
            probe.step()
            model.zero_grad()
            names.add(probe._reader.tap_name)
    return names


def test_auto_waits_for_windows_of_one_piece_in_a_row(ranks2: Ranks) -> None:
    assert ranks2(_auto_with_pieces_now_and_then) == [{"leaf hooks"}] * 2


def _auto_with_two_backwards() -> tuple[set[str], dict[str, int]]:
    _, model = wrap({})
    names = set()
    with attached(model, log_every=1) as probe:
        for window in range(8):
            with probe.piece(units=4):
                for x, y in batches(dist.get_rank(), 2, window):
                    mean_loss(model, x, y).backward()
            probe.step()
            model.zero_grad()
            names.add(probe._reader.tap_name)
        return names, dict(probe.reading().dropped)


def test_auto_does_not_change_where_a_piece_has_several_backwards(ranks2: Ranks) -> None:
    for names, dropped in ranks2(_auto_with_two_backwards):
        assert names == {"leaf hooks"}  # not even for one window, whose buckets would be of no use
        assert not any("more than once" in reason for reason in dropped)


def _auto_with_accumulation() -> dict[str, Any]:
    return train_on_rank({}, tap="auto", windows=6)


def test_auto_keeps_leaf_hooks_under_accumulation(ranks2: Ranks) -> None:
    results = ranks2(_auto_with_accumulation)
    assert_as_by_hand(results, windows=6)
    assert [r["tap"] for r in results] == ["leaf hooks"] * 2


def _frozen_after_wrapping() -> tuple[str, int]:
    plain, model = wrap({"find_unused_parameters": True})
    plain[0].requires_grad_(False)  # type: ignore[index]
    with attached(model, log_every=1) as probe:
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


def test_two_ddp_modules_stay_with_leaf_hooks(ranks2: Ranks) -> None:
    for name, traces, message in ranks2(_two_ddp_modules):
        assert name == "leaf hooks"
        assert min(traces) > 0.3 * max(traces)
        assert "parameters outside" in message


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
    with attached(model, tap="leaf") as probe:
        windows_of_one_piece(probe, model, batches_of_four(10))
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


def _builtin_hook() -> tuple[str, int]:
    model = DistributedDataParallel(small_model())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with attached(model, log_every=1) as probe:
        windows_of_one_piece(probe, model, batches_of_four(10))
        return probe._reader.tap_name, probe.reading().windows


def test_leaf_hooks_stay_where_ddp_accepts_no_hook(ranks2: Ranks) -> None:
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
    with attached(ddp, units_per_piece=4, log_every=1, groups=None) as probe:
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


def _auto_with_one_piece_a_rank(bucket_view: bool) -> dict[str, Any]:
    return train_on_rank({"gradient_as_bucket_view": bucket_view}, n_micro=1, tap="auto", windows=6)


@pytest.mark.parametrize(("bucket_view", "tap"), [(False, "DDP's communication hook"), (True, "leaf hooks")])
def test_auto_takes_the_buckets_of_three_ranks_where_ddp_rounds_in_one_way(
    ranks3: Ranks, bucket_view: bool, tap: str
) -> None:
    """DDP's rounding of 1/3 depends on its options, and a tap must not change it."""
    results = ranks3(_auto_with_one_piece_a_rank, bucket_view)
    assert_as_by_hand(results, windows=6)
    assert [r["tap"] for r in results] == [tap] * 3


def _said(bucket_view: bool) -> str:
    """What the probe prints while "auto" would change."""
    _, model = wrap({"gradient_as_bucket_view": bucket_view})
    with contextlib.redirect_stderr(io.StringIO()) as printed, attached(model, log_every=1, verbose=True) as probe:
        windows_of_one_piece(probe, model, first_batches(6))
    return printed.getvalue()


def test_auto_says_why_it_keeps_leaf_hooks(ranks3: Ranks) -> None:
    said, *_ = ranks3(_said, True)
    assert said.count("leaf hooks keep reading the gradients: on 3 ranks DDP rounds the average of gradients") == 1
    assert "DDP's communication hook reads the gradients from now on" in ranks3(_said, False)[0]


def _divisions(n_ranks: int) -> list[str] | None:
    """What DDP shows on the last ranks for several dtypes, without a bucket view and with one; and no random draw."""
    n_before = dist.get_world_size() - n_ranks
    group = dist.new_group(range(n_before, dist.get_world_size()))
    if dist.get_rank() < n_before:
        return None
    model = small_model()
    # 16 bits are rounded alike, since 32 bits are divided: the others must be tried too.
    parameters = [torch.zeros(1, dtype=d) for d in (torch.bfloat16, torch.float16, torch.float32, torch.float64)]
    before = torch.get_rng_state()
    with torch.no_grad():  # as a user may attach
        found = [
            why_division_differs(
                DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=view), parameters
            )
            for view in (False, True)
        ]
    assert torch.equal(torch.get_rng_state(), before)
    return found


def _assert_divides_as_expected(ranks: Ranks, n_ranks: int) -> None:
    """A power of two divides exactly; otherwise a bucket view divides where a copy multiplies."""
    exact = n_ranks in (2, 4)
    other = f"on {n_ranks} ranks DDP rounds the average of gradients that lie in its buckets already"
    for found in ranks(_divisions, n_ranks)[-n_ranks:]:
        assert found is not None
        alone, in_view = found
        assert alone == ""
        assert in_view.startswith("" if exact else other)
        assert bool(in_view) != exact


def test_powers_of_two_are_told_from_other_even_numbers() -> None:
    assert [n for n in range(1, 20) if is_power_of_two(n)] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_ddp_shows_how_it_divides(request: pytest.FixtureRequest, n_ranks: int) -> None:
    _assert_divides_as_expected(request.getfixturevalue(f"ranks{n_ranks}"), n_ranks)


def test_some_of_eight_ranks_show_how_ddp_divides(ranks8: Ranks) -> None:
    for n_ranks in (4, 5, 6, 7):
        _assert_divides_as_expected(ranks8, n_ranks)
    ranks8.stop(kill=True)  # DDP on some of the ranks leaves them with other numbers of process groups


def _auto_beside(rival: str) -> tuple[str, int]:
    """The user's hook is registered, or another probe reads the buckets, before "auto" would change."""
    _, model = wrap({})
    other: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    with attached(model, log_every=1) as probe:
        if rival == "user's hook":
            model.register_comm_hook(None, in_bf16)
        else:
            other = attached(model, tap="comm_hook")
        with other:
            windows_of_one_piece(probe, model, first_batches(8))
        return probe._reader.tap_name, probe.reading().windows


@pytest.mark.parametrize("rival", ["user's hook", "another probe"])
def test_auto_keeps_leaf_hooks_where_the_buckets_are_taken(ranks2: Ranks, rival: str) -> None:
    assert ranks2(_auto_beside, rival) == [("leaf hooks", 8)] * 2


def _seconds_of_both_taps() -> tuple[str, float, float]:
    _, model = wrap({})
    with attached(model, log_every=1) as probe:
        leaf = probe._taps.tap
        windows_of_one_piece(probe, model, first_batches(8))
        assert leaf.seconds > 0
        return probe._reader.tap_name, probe._taps.seconds, leaf.seconds + probe._taps.tap.seconds


def test_the_time_of_a_replaced_tap_still_counts(ranks2: Ranks) -> None:
    for tap_name, seconds, seconds_of_both in ranks2(_seconds_of_both_taps):
        assert tap_name == "DDP's communication hook"
        assert seconds == pytest.approx(seconds_of_both)


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
