"""Which parameters, units and models single examples can be read of, and what is said where they cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sonde
from tests.batch_size.loops import Recording, attached, mean_loss, small_model
from tests.batch_size.single_examples import Scaled, assert_as, by_hand, pieces_of
from tests.runs.report.visible_text import visible_text


def test_only_the_covered_parameters_count_and_the_others_are_named() -> None:
    torch.manual_seed(0)
    model, pieces = Scaled(), pieces_of(6)
    keep = torch.cat([torch.full((p.numel(),), name != "own") for name, p in model.named_parameters()])
    expected = by_hand(model, pieces, keep=keep.tolist())
    sink = Recording()
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
    assert sink.of_kind("reading")[-1]["metrics"]["gns/covered"] == pytest.approx(reading.coverage.part)


class HardlyScaled(Scaled):
    """The parameter that no rule covers has less than a thousandth of the squared gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * (1 + 0.03 * self.own))


def test_where_hardly_anything_is_left_out_nothing_looks_wrong(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = HardlyScaled()
    with attached(model, per_example="auto", sinks=[sonde.JsonlSink(tmp_path)], log_every=4) as probe:
        for window in range(20):
            with probe.piece(units=16):
                mean_loss(model, *pieces_of(16, seed=window)[0]).backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
        assert probe.alerts == {}
    assert "(of 4 of 5 parameters, with 99.9 % of |F|²)" in str(reading)
    text = visible_text(sonde.write_report(tmp_path))
    assert "It speaks of parameters with 99.9 % of the squared gradient." in text
    assert "Something looks wrong" not in text


def test_units_that_are_not_rows_give_a_reason() -> None:
    model, (x, y) = small_model(), pieces_of(6)[0]
    with attached(model, per_example="auto") as probe:
        for _ in range(5):
            with probe.piece(units=3):
                mean_loss(model, x, y).backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    assert reading.windows == 0
    assert "its examples cannot be told apart: the first dim of what its layer returned is 6, not 3" in reading.reason
    assert "Accumulate gradients over 2 or more micro-batches" in reading.reason


def test_units_that_are_no_whole_number_give_a_reason() -> None:
    model, (x, y) = small_model(), pieces_of(6)[0]
    with attached(model, per_example="always") as probe:
        with probe.piece(units=6.5):
            mean_loss(model, x, y).backward()
        probe.step()
        reading = probe.reading()
    assert reading.windows == 0
    why = "examples were read in 0 of 1 piece only: the number of units of a piece is no whole number"
    assert why in reading.reason
    assert "pass an int" in reading.reason


@pytest.mark.parametrize("per_example", ["auto", "always"])
def test_batch_normalisation_counts_by_what_it_does_in_the_window(per_example: str) -> None:
    """It couples the examples in train mode alone, and is often put in evaluation mode after attach."""
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with attached(model, per_example=per_example) as probe:
        for mode in (True, False):
            model[1].train(mode)
            with probe.piece(units=6):
                mean_loss(model, *pieces_of(6)[0]).backward()
            probe.step()
            model.zero_grad()
            if mode:
                assert "batch normalisation in train mode" in probe.reading().reason
        assert probe.reading().windows == 1


def test_batch_normalisation_in_a_forward_before_the_piece_counts_too() -> None:
    """The piece's backward is its own; one before it, outside pieces, does not count, nor does it hide the layer."""
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    (x, y), (a, b) = pieces_of(6)[0], pieces_of(5)[0]
    with attached(model, per_example="always") as probe:
        for window in range(3):
            loss = mean_loss(model, x, y)
            if window:  # once pieces are declared
                mean_loss(nn.Sequential(model[0], model[2]), a, b).backward()
                model.zero_grad()
            with probe.piece(units=6):
                loss.backward()
            probe.step()
            model.zero_grad()
        assert probe.reading().windows == 0
        assert "batch normalisation in train mode" in probe.reading().reason


def test_layers_of_ones_own_have_rules() -> None:
    torch.manual_seed(0)
    pieces = pieces_of(6)

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.full((20,), 1.5))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.own

    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), Scale(), nn.Linear(20, 3))
    rules = {Scale: lambda layer, inputs, grad: {"own": grad * inputs[0]}}
    expected = by_hand(model, pieces)
    with attached(model, per_example="auto", rules=rules) as probe:
        with probe.piece(units=6):
            mean_loss(model, *pieces[0]).backward()
        probe.step()
        reading = probe.reading()
    assert_as(reading, expected)
    assert reading.coverage is None


def test_groups_without_a_covered_parameter_are_left_out() -> None:
    torch.manual_seed(0)
    model, pieces = Scaled(), pieces_of(6)
    with attached(model, per_example="always") as probe:
        for _ in range(2):
            with probe.piece(units=6):
                mean_loss(model, *pieces[0]).backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    assert "own" not in reading.groups
    assert reading.groups["first"].trace_cov is not None
    assert "not_covered" in probe.alerts


def test_rows_that_may_be_positions_are_not_taken_for_examples() -> None:
    """Eight sequences of eight positions, with positions first: torch's layers do so by default."""
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    with attached(model, per_example="always") as probe:
        with probe.piece(units=8):
            model(torch.randn(8, 8, 8)).square().mean().backward()
        probe.step()
        assert "batch_first=False was called with as many examples as positions" in probe.reading().reason


def test_more_units_than_could_be_rows_take_no_memory() -> None:
    model = small_model()
    with attached(model, per_example="always") as probe:
        with probe.piece(units=2_000_000):
            mean_loss(model, *pieces_of(6)[0]).backward()
        probe.step()
        assert "the norms of 2,000,000 examples in 8 parameters take too much memory" in probe.reading().reason


@pytest.mark.parametrize("sizes", [(6,), (6, 6)])
def test_parameters_may_be_frozen_between_measured_windows(sizes: tuple[int, ...]) -> None:
    model = small_model()
    with attached(model, per_example="auto", every=3) as probe:
        for window in range(30):
            if window == 12:
                for p in model[0].parameters():
                    p.requires_grad_(False)
            for piece in pieces_of(*sizes, seed=window):
                with probe.piece(units=6):
                    mean_loss(model, *piece).backward()
            probe.step()
            model.zero_grad()
        assert probe.reading().windows > 5
    assert not any(p._backward_hooks for p in model.parameters())


def test_windows_of_other_parameters_are_not_continued() -> None:
    """A state of the covered parameters, loaded by a probe that measures pieces of the whole model."""
    torch.manual_seed(0)
    model = Scaled()

    def run(probe: sonde.NoiseScaleProbe, sizes: tuple[int, ...], first: int) -> None:
        for window in range(first, first + (12 if first < 13 else 11)):
            for piece in pieces_of(*sizes, seed=window):
                with probe.piece(units=len(piece[0])):
                    mean_loss(model, *piece).backward()
            probe.step()
            model.zero_grad()

    with attached(model, per_example="always") as covered:
        run(covered, (6,), 0)
        state = covered.state_dict()
    with attached(model) as fresh:
        run(fresh, (6, 6), 13)  # the first of other parameters shows it
        expected = fresh.reading()
    with attached(model) as resumed:
        resumed.load_state_dict(state)
        run(resumed, (6, 6), 12)
        reading = resumed.reading()
    assert reading.coverage is None
    assert reading.grad_sq == pytest.approx(expected.grad_sq, rel=1e-4)
    assert reading.trace_cov == pytest.approx(expected.trace_cov, rel=1e-4)
