"""Which parameters, units and models single examples can be read of, and what is said where they cannot."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sonde
from tests.batch_size.loops import Recording, attached, batch, flat_grad, mean_loss, pieces_of, small_model
from tests.batch_size.single_examples import Scaled, assert_as, by_hand, drawn, run
from tests.oracles import window_by_hand
from tests.ranks import Ranks, mesh_of
from tests.runs.report.visible_text import visible_text


def test_only_the_covered_parameters_count_and_the_others_are_named() -> None:
    torch.manual_seed(0)
    model, pieces, sink = Scaled(), pieces_of(6), Recording()
    keep = torch.cat([torch.full((p.numel(),), name != "own") for name, p in model.named_parameters()])
    expected = by_hand(model, pieces, keep=keep.tolist())
    with attached(model, per_example="always", sinks=[sink]) as probe:
        with probe.piece(units=6):
            mean_loss(model, *pieces[0]).backward()
        probe.step()
        reading = probe.reading()
    assert_as(reading, expected)
    grads = {name: float(p.grad.square().sum()) for name, p in model.named_parameters() if p.grad is not None}
    assert reading.coverage is not None
    assert (reading.coverage.n_parameters, reading.coverage.n_all) == (4, 5)
    assert reading.coverage.part == pytest.approx(1 - grads["own"] / sum(grads.values()), rel=1e-6)
    assert "own (Scaled has no rule" in probe.alerts["not_covered"]
    assert "of 4 of 5 parameters" in str(reading)
    assert set(reading.groups) == {"first", "last"}
    assert sink.of_kind("reading")[-1]["metrics"]["gns/covered"] == pytest.approx(reading.coverage.part)


class HardlyScaled(Scaled):
    """The parameter that no rule covers has less than a thousandth of the squared gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * (1 + 0.03 * self.own))


def test_where_hardly_anything_is_left_out_nothing_looks_wrong(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = HardlyScaled()
    with attached(model, per_example="auto", sinks=[sonde.JsonlSink(tmp_path)], log_every=4) as probe:
        run(model, probe, *drawn(20, 16))
        reading = probe.reading()
        assert probe.alerts == {}
    assert "(of 4 of 5 parameters, with 99.9 % of |F|²)" in str(reading)
    text = visible_text(sonde.write_report(tmp_path))
    assert "It speaks of parameters with 99.9 % of the squared gradient." in text
    assert "Something looks wrong" not in text


WRONG_UNITS: dict[str, tuple[tuple[int, ...], tuple[float, ...], tuple[str, ...]]] = {
    "no rows": (
        (6,),
        (3,),
        (
            "its examples cannot be told apart: the first dim of what its layer returned is 6, not 3",
            "Accumulate gradients over 2 or more micro-batches",
        ),
    ),
    "no whole number": (
        (6,),
        (6.5,),
        ("examples were read in 0 of 1 piece only: the number of units of a piece is no whole number", "pass an int"),
    ),
    "no whole number of one piece": ((6, 4), (6, 4.5), ("examples were read in 1 of 2 pieces only", "no whole number")),
    "very many": ((6,), (2_000_000,), ("the norms of 2,000,000 examples in 8 parameters take too much memory",)),
}


@pytest.mark.parametrize("name", WRONG_UNITS)
def test_units_that_are_not_rows_give_a_reason(name: str) -> None:
    sizes, units, reasons = WRONG_UNITS[name]
    model = small_model()
    with attached(model, per_example="always") as probe:
        run(model, probe, pieces_of(*sizes), units=units)
        reading = probe.reading()
    assert reading.windows == 0
    for reason in reasons:
        assert reason in reading.reason


def test_rows_that_may_be_positions_are_not_taken_for_examples() -> None:
    """Eight sequences of eight positions, with positions first: torch's layers do so by default."""
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    with attached(model, per_example="always") as probe:
        with probe.piece(units=8):
            model(torch.randn(8, 8, 8)).square().mean().backward()
        probe.step()
        assert "batch_first=False was called with as many examples as positions" in probe.reading().reason


@pytest.mark.parametrize("per_example", ["auto", "always"])
def test_batch_normalisation_counts_by_what_it_does_in_the_window(per_example: str) -> None:
    """It couples the examples in train mode alone, and is often put in evaluation mode after attach."""
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with attached(model, per_example=per_example) as probe:
        for mode in (True, False):
            model[1].train(mode)
            run(model, probe, pieces_of(6))
            assert not mode or "batch normalisation in train mode" in probe.reading().reason
        assert probe.reading().windows == 1


def test_batch_normalisation_in_a_forward_before_the_piece_counts_too() -> None:
    """The piece's backward is its own; one before it, outside pieces, does not count, nor does it hide the layer."""
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with attached(model, per_example="always") as probe:
        for window in range(3):
            loss = mean_loss(model, *pieces_of(6)[0])
            if window:  # once pieces are declared
                mean_loss(nn.Sequential(model[0], model[2]), *pieces_of(5)[0]).backward()
                model.zero_grad()
            with probe.piece(units=6):
                loss.backward()
            probe.step()
            model.zero_grad()
        assert probe.reading().windows == 0
        assert "batch normalisation in train mode" in probe.reading().reason


def test_windows_of_other_parameters_are_not_continued() -> None:
    """A state of the covered parameters, loaded by a probe that measures pieces of the whole model."""
    torch.manual_seed(0)
    model = Scaled()
    with attached(model, per_example="always") as covered:
        run(model, covered, *drawn(12, 6))
        state = covered.state_dict()
    with attached(model) as fresh:
        run(model, fresh, *drawn(11, 6, 6, first=13))  # the first of other parameters shows it
        expected = fresh.reading()
    with attached(model) as resumed:
        resumed.load_state_dict(state)
        run(model, resumed, *drawn(12, 6, 6, first=12))
        reading = resumed.reading()
    assert reading.coverage is None
    assert (reading.grad_sq, reading.trace_cov) == pytest.approx((expected.grad_sq, expected.trace_cov), rel=1e-4)


# On ranks: every example of every rank is a piece.


SIZES = (5, 2, 4)
"""Rows of the micro-batches of ranks 0, 1 and 2."""


class Routed(nn.Module):
    """One of two layers by the sign of the first row's first number: another one on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.ModuleList([nn.Linear(12, 5), nn.Linear(12, 5)])
        self.own = nn.Parameter(torch.ones(5))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.first[dist.get_rank() % 2]
        h = chosen(x)
        # The parameter that no rule covers is used on rank 0 alone.
        return self.last(h * self.own if dist.get_rank() == 0 else h)


def data(rank: int, window: int, n: int | None = None) -> tuple[Tensor, Tensor]:
    return batch(n or SIZES[rank], torch.Generator().manual_seed(100 * window + rank))


def routed() -> dict[str, Any]:
    """Each rank covers other parameters than its peer."""
    model, rank, world = Routed(), dist.get_rank(), dist.get_world_size()
    with attached(model, per_example="always", process_group=dist.group.WORLD) as probe:
        (x, y) = data(rank, 0, n=4)
        with probe.piece(units=4):
            mean_loss(model, x, y).backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
        probe.step()
        reading = probe.reading()
    model.zero_grad()
    own = [flat_grad(model, (model(x) - y).square().sum(-1)[b] / 4) for b in range(4)]
    gradients: list[Any] = [None] * world
    dist.all_gather_object(gradients, own)
    keep = torch.cat([torch.full((p.numel(),), name != "own") for name, p in model.named_parameters()])
    kept = [g[keep] for of_rank in gradients for g in of_rank]
    exact = window_by_hand(kept, [1 / 4] * 8, [1.0] * 8, torch.stack(kept).sum(0) / world)
    return {"found": (reading.trace_cov, reading.grad_sq), "exact": exact, "coverage": reading.coverage}


def test_only_parameters_that_are_covered_on_all_ranks_count(ranks2: Ranks) -> None:
    for result in ranks2(routed):
        assert result["found"] == pytest.approx(result["exact"], rel=5e-6)
        assert result["coverage"].n_parameters == result["coverage"].n_all - 1


class Partly(Scaled):
    """A parameter that no rule covers, and a layer that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Identity()


def one_rank_stops_reading(wrapper: str) -> tuple[int, bool, list[str]]:
    """After the first window, rank 0 has the only piece. Rank 1 cannot read examples once its hooks were off.

    Returns:
        Windows that were averaged, whether rank 1 has stopped reading, and the reasons of dropped windows.
    """
    torch.manual_seed(2)
    inner = Partly()
    rank, model = dist.get_rank(), inner if wrapper == "FSDP2" else DistributedDataParallel(inner)
    if wrapper == "FSDP2":
        fully_shard(inner, mesh=mesh_of((2,)))
    with attached(model, per_example="always", every=2, log_every=1) as probe:
        for window in range(24):
            has_piece = rank == 0 or window == 0
            x, y = data(rank, window)
            with probe.piece(units=len(x)) if has_piece else contextlib.nullcontext():
                (mean_loss(model, x, y) * has_piece).backward()
            probe.step()
            model.zero_grad()
            if (rank, window) == (1, 0):
                inner.idle.compile(backend="eager")  # models with compiled parts are refused
        reading = probe.reading()
        return reading.windows, bool(probe._mechanism.why_not), list(reading.dropped)


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_a_rank_that_reads_no_examples_does_not_say_what_it_covers(ranks2: Ranks, wrapper: str) -> None:
    for rank, (windows, has_stopped, reasons) in enumerate(ranks2(one_rank_stops_reading, wrapper)):
        assert has_stopped == (rank == 1)
        assert 1 <= windows < 24
        assert all("another rank does not read them" in reason for reason in reasons), reasons
        assert reasons
