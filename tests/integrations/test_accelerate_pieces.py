"""Which backwards of a loop with Accelerate are pieces, and how many units these have."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[accelerate]'")
# Accelerate and what it imports cause various warnings.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_accelerate_state")]

from sonde.integrations import accelerate as integration  # noqa: E402
from tests.integrations.accelerate_loop import Attached, accelerator, batches, loop, loss_of, network, tokens  # noqa: E402
from tests.integrations.plain_loop import BY_PIECES, Piece, optimizer_of, plain_loop, same_numbers, weights  # noqa: E402


def loss_of_piece(model: Any, piece: Piece) -> Tensor:
    return loss_of(model, piece.inputs["batch"]) * piece.weight


def test_units_that_cannot_be_counted_do_not_stop_training(caplog: pytest.LogCaptureFixture) -> None:
    n_calls = 0

    def units(batch: Tensor) -> int:
        nonlocal n_calls
        n_calls += 1
        if n_calls in (2, 9, 10):
            raise KeyError("length")
        return len(batch)

    a = accelerator()
    attached = Attached(a, units=units, on_error="warn")
    with caplog.at_level(logging.ERROR):
        model = loop(a, attached)
    assert "units_per_piece= could not count a piece: KeyError: 'length'" in caplog.text
    reading = attached.probe.reading()
    # Nothing else is said of these windows, so the others stay trusted.
    assert [why for why in reading.dropped if "could not count a piece" not in why] == []
    assert (reading.windows, sum(reading.dropped.values())) == (7, 2)
    assert reading.trace_cov is not None
    assert torch.equal(weights(model), weights(loop(accelerator())))


@pytest.mark.parametrize("case", ["two forwards", "two backwards"])
def test_what_shows_no_number_of_rows_is_named_and_may_be_counted(case: str) -> None:
    """A loss over two views of a batch, and two backwards of one forward. Each remedy of the alert gives a number."""

    def measured(piece: Any = None, **options: Any) -> Any:
        a = accelerator(gradient_accumulation_steps=2)
        model, optimizer = a.prepare(net := network(), optimizer_of(net))
        attached = integration.attach(a, model, optimizer, on_error="raise", **BY_PIECES | options)
        for views in zip(batches()[::2] * 2, batches()[1::2] * 2, strict=True):
            n = len(views[0]) + len(views[1])
            around = attached.probe.piece(**piece(n)) if attached.probe and piece else contextlib.nullcontext()
            with a.accumulate(model), around:
                if case == "two forwards":
                    a.backward(loss_of(model, views[0]) + loss_of(model, views[1]))
                else:
                    output = model(torch.cat(views))
                    a.backward(output.square().mean(), retain_graph=True)
                    a.backward(output.abs().mean())
            optimizer.step()
            optimizer.zero_grad()
        return attached

    asked, n_units = measured(), sum(map(len, batches())) / 2  # of a window
    assert asked.reading().windows == 0
    if case == "two forwards":
        why = "a backward follows 2 forwards of the model. Pass units_per_piece= a number"
        assert measured(units_per_piece=8).reading().units_per_window == 16
        counted = measured(lambda n: {"units": n})
    else:
        why = "had a second backward. Put all backwards of one batch into one 'with probe.piece():'"
        counted = measured(lambda n: {})
    assert why in asked.probe.alerts["units"]
    assert counted.reading().units_per_window == pytest.approx(n_units, rel=0.05)  # an average that forgets
    assert counted.reading().dropped == {}


def test_a_loop_without_accelerator_backward_is_measured_all_the_same() -> None:
    a = accelerator(gradient_accumulation_steps=1)
    model, optimizer = a.prepare(net := network(), optimizer_of(net))
    by_examples = BY_PIECES | {"per_example": "always"}
    attached = integration.attach(a, model, optimizer, unit="rows", units=tokens, on_error="raise", **by_examples)
    for batch in batches():
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    windows = [[Piece({"batch": b}, {"unit_weights": tokens(b).tolist()}, 1.0)] for b in batches()]
    expected = plain_loop(network(), windows, loss_of_piece, max_norm=1e9, **by_examples)
    assert same_numbers(attached.reading(), expected)


def test_a_window_whose_gradients_are_zeroed_without_a_step_does_not_count() -> None:
    """As where a loss has a spike. The pieces of the next window are measured from the first on."""
    a = accelerator(gradient_accumulation_steps=2)
    model, optimizer = a.prepare(net := network(), optimizer_of(net))
    probe = integration.attach(a, model, optimizer, unit="rows", units=len, on_error="raise", **BY_PIECES)
    windows = [[Piece({"batch": b}, {"units": len(b)}, 0.5) for b in batches()[k : k + 2]] for k in (0, 2, 4, 1, 3)]
    for number, window in enumerate(windows):
        for piece in window:
            with a.accumulate(model):
                a.backward(loss_of(model, piece.inputs["batch"]))
                if number not in (1, 3):
                    optimizer.step()
                optimizer.zero_grad()
    expected = plain_loop(
        network(),
        [windows[0], windows[2], windows[4]],
        lambda net, piece: loss_of(net, piece.inputs["batch"]) * piece.weight,
        max_norm=1e9,
    )
    reading = probe.reading()
    assert reading.dropped == {}
    assert same_numbers(reading, expected)
