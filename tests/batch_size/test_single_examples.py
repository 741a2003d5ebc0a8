"""The noise scale from single examples, the choice between examples and pieces."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.batch_size.loops import attached, mean_loss, pieces_of, small_model
from tests.batch_size.single_examples import assert_as, by_hand, drawn, run, shares


def test_backwards_of_one_piece_are_added_up_for_each_example_from_the_second_window_on() -> None:
    model, (x, y) = small_model(), pieces_of(6)[0]
    expected = by_hand(model, [(x, y)])
    with attached(model, per_example="auto") as probe:
        for _ in range(2):
            with probe.piece(units=6):
                (0.3 * mean_loss(model, x, y)).backward()
                (0.7 * mean_loss(model, x, y)).backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
        assert [why.split(";")[0] for why in reading.dropped] == ["a piece had several backwards"]
        assert_as(reading, expected)
        assert probe.alerts == {}


def test_pieces_of_other_sizes_and_weights() -> None:
    model, pieces = small_model(), pieces_of(6, 3, 1)
    weights, own = [3.0, 1.0, 2.0], [[1.0, 2.0, 0.0, 4.0, 1.0, 1.0], [1.0, 5.0, 2.0], [1.0]]
    expected = by_hand(model, pieces, weights=weights, unit_weights=own)
    with attached(model, per_example="always") as probe:
        for (x, y), weight, of_units in zip(pieces, weights, own, strict=True):
            with probe.piece(weight=weight, unit_weights=of_units):
                (weight * shares(model, x, y, of_units).sum()).backward()
        probe.step()
        assert_as(probe.reading(), expected)


# The choice between examples and pieces.


def test_three_windows_in_a_row_change_from_pieces_to_examples_and_back(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    with attached(model, per_example="auto", log_every=1, verbose=True) as probe:
        run(model, probe, *drawn(20, 4, 4))
        run(model, probe, *drawn(1, 8))  # shows nothing, and changes nothing
        run(model, probe, *drawn(4, 4, 4))
        assert probe.reading().windows == 24
        run(model, probe, *drawn(8, 16))
        # Three windows show that single pieces are all there is, when the fourth has begun; then examples are read.
        reading = probe.reading()
        assert (reading.windows, reading.u) == (28, 1.0)
        assert "windows are single pieces now" in capsys.readouterr().err
        run(model, probe, *drawn(8, 4, 4))
        reading = probe.reading()
        assert (reading.windows, reading.u) == (36, 0.25)
        assert "windows have several pieces now" in capsys.readouterr().err
    assert not any(m._forward_hooks for m in model.modules())


def test_training_is_bit_for_bit_the_same_through_the_change() -> None:
    def weights(per_example: str) -> list[Tensor]:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with attached(model, optimizer, per_example=per_example, log_every=1) as probe:
            for window in range(24):
                for x, y in pieces_of(*((8, 8) if window < 20 else (5,)), seed=window):
                    with probe.piece(units=len(x)):
                        functional.dropout(model(x) - y, 0.1).square().mean().backward()
                probe.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()] + [torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(weights("auto"), weights("never"), strict=True))


@pytest.mark.parametrize("sizes", [(32, 32), (24,)])
def test_a_restart_equals_the_run_that_was_not_interrupted(sizes: tuple[int, ...]) -> None:
    model = small_model()
    with attached(model, per_example="auto", log_every=1) as whole:
        run(model, whole, *drawn(24, *sizes))
        state = whole.state_dict()
        run(model, whole, *drawn(16, *sizes))
        expected = whole.reading()
    with attached(model, per_example="auto", log_every=1) as resumed:
        resumed.load_state_dict(state)
        run(model, resumed, *drawn(16, *sizes))
        reading = resumed.reading()
    # The witness looks at other elements after a restart, so κ differs in the last bits.
    for name in ("trace_cov", "grad_sq", "low", "high", "u"):
        assert getattr(reading, name) == pytest.approx(getattr(expected, name), rel=1e-6)


def test_windows_that_are_not_measured_have_no_hook() -> None:
    model, hooked = small_model(), []
    with attached(model, per_example="always", every=4) as probe:
        for window in drawn(16, 6):
            hooked.append(any(layer._forward_hooks for layer in model))
            run(model, probe, window)
        assert probe.reading().windows == sum(hooked) < 8
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(p._backward_hooks for p in model.parameters())


def test_an_interrupted_piece_does_not_count() -> None:
    model, pieces = small_model(), pieces_of(6, 4)
    expected = by_hand(model, pieces[1:])
    with attached(model, per_example="always") as probe:
        with contextlib.suppress(KeyError), probe.piece(units=6):
            mean_loss(model, *pieces[0]).backward()
            raise KeyError
        model.zero_grad()
        run(model, probe, pieces[1:])
        assert_as(probe.reading(), expected)


@pytest.mark.parametrize("per_example", ["auto", "always"])
def test_backwards_outside_declared_pieces_do_not_count(per_example: str) -> None:
    """A first pass whose gradients are thrown away; a backward that only fills up; and one after the last piece."""
    model, pieces = small_model(), pieces_of(6) if per_example == "auto" else pieces_of(6, 3)
    expected = by_hand(model, pieces)
    with attached(model, per_example=per_example) as probe:
        for window in range(5):
            if window:  # once pieces are declared
                mean_loss(model, *pieces_of(5)[0]).backward()
                model.zero_grad()
            for x, y in pieces:
                with probe.piece(units=len(x)):
                    mean_loss(model, x, y).backward()
            if window:
                (0.0 * mean_loss(model, *pieces_of(2)[0])).backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
        assert (reading.windows, dict(reading.dropped)) == (5, {})
        assert (reading.trace_cov, reading.grad_sq) == pytest.approx(expected, rel=1e-5)


def test_a_parameter_that_is_released_while_examples_are_read_is_read_from_the_next_window_on() -> None:
    """It was frozen when the hooks were installed. In the window in which it is released it has none."""
    model, of_two, of_one = small_model(), pieces_of(4, 4), pieces_of(6)
    expected = by_hand(model, of_one)
    with attached(model, per_example="auto", log_every=1) as probe:
        for window in range(10):
            model[0].requires_grad_(not 2 <= window < 8)
            run(model, probe, of_two if window < 3 else of_one)
            probe.reading()
        assert any("0.weight, … became trainable after the hooks" in why for why in probe.reading().dropped)
        assert (probe.window().total.trace_cov, probe.window().total.grad_sq) == pytest.approx(expected, rel=1e-5)


def test_reading_that_closes_within_a_window_gives_that_window_no_examples() -> None:
    """A window that arrives while the next one ends may decide that examples are read no more."""
    model = small_model()
    with attached(model, per_example="always") as probe:
        for closes in (False, True, False):
            for x, y in pieces_of(4, 4):
                with probe.piece(units=4):
                    mean_loss(model, x, y).backward()
            if closes:
                probe._reader._examples.norms.close()  # type: ignore[union-attr]
            probe.step()
            model.zero_grad()
        assert probe.reading().windows >= 2


@pytest.mark.parametrize("sizes", [(6,), (6, 6)])
def test_parameters_may_be_frozen_between_measured_windows(sizes: tuple[int, ...]) -> None:
    model = small_model()
    with attached(model, per_example="auto", every=3) as probe:
        for number, window in enumerate(drawn(30, *sizes)):
            model[0].requires_grad_(number < 12)
            run(model, probe, window)
        assert probe.reading().windows > 5
    assert not any(p._backward_hooks for p in model.parameters())
