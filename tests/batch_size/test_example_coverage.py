"""Which parameters, units and models single examples can be read of, and what is said where they cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sonde
from tests.batch_size.loops import Recording, attached, mean_loss, pieces_of, small_model
from tests.batch_size.single_examples import Scaled, assert_as, by_hand, drawn, run
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
