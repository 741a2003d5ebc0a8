"""Windows that are ended twice, late or never."""

from __future__ import annotations

import pytest
import torch

from tests.batch_size.loops import (
    attached,
    piece_losses,
    small_model,
)


def test_a_window_ended_twice_raises_an_alert_and_counts_once() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, optimizer) as probe:
        for _ in range(3):
            for loss in piece_losses(model, [4, 4]):
                with probe.piece(units=4):
                    loss().backward()
            norm = probe.clip_grad_norm_(0.5)
            probe.step()
            again = probe.clip_grad_norm_(0.5)
            assert float(norm) > 0.5
            assert float(again) == pytest.approx(0.5, rel=1e-4)
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
        assert (reading.windows, reading.units_per_window) == (3, 8)
        assert "ended twice" in probe.alerts["called_twice"]


def test_a_window_never_ended_raises_an_alert_and_its_pieces_are_forgotten() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer) as probe:
        for window in range(3):
            for loss in piece_losses(model, [4, 4]):
                with probe.piece(units=4):
                    loss().backward()
            if window:
                probe.step()
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
        assert (reading.windows, reading.dropped) == (2, {})
        assert "call probe.step()" in probe.alerts["never_called"]


def test_a_last_window_that_is_never_ended_raises_an_alert_at_close() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, optimizer) as probe:
        with probe.piece(units=4):
            piece_losses(model, [4])[0]().backward()
        optimizer.step()
        assert not probe.alerts  # probe.step() may still come: late
    assert "was not ended" in probe.alerts["never_called"]


def test_a_window_ended_after_the_optimizers_step_raises_one_alert_only() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, optimizer) as probe:
        for _ in range(3):
            for loss in piece_losses(model, [4, 4]):
                with probe.piece(units=4):
                    loss().backward()
            optimizer.step()
            probe.step()
            optimizer.zero_grad()
        reading = probe.reading()
    assert list(probe.alerts) == ["ended_late"]
    assert reading.windows == 0
    [(reason, n)] = reading.dropped.items()
    assert "ended after optimizer.step()" in reason
    assert n == 3
