"""Windows that cannot be used: which of them are a cause for alarm."""

from __future__ import annotations

import pytest
import torch

from tests.batch_size.loops import Recording, attached, batch, mean_loss, small_model


def test_a_loss_scale_that_overflows_again_and_again_is_an_alert() -> None:
    model = small_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=0.999, growth_interval=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sink = Recording()
    with attached(model, optimizer, grad_scaler=scaler, sinks=[sink]) as probe:
        generator = torch.Generator().manual_seed(0)
        for window in range(12):
            for _ in range(2):
                with probe.piece(units=4):
                    scaler.scale(100 * mean_loss(model, *batch(4, generator))).backward()
            probe.step()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            probe.reading()
            assert ("loss_scale" in probe.alerts) == (window >= 9)
    assert [a["name"] for a in sink.of_kind("alert")].count("loss_scale") == 1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_windows_in_which_no_piece_has_a_gradient_are_left_out_without_alarm(set_to_none: bool) -> None:
    """As in reinforcement learning, where every advantage of a prompt is 0 if its answers are all alike."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(0)
    with attached(model, optimizer, log_every=1) as probe:
        for window in range(40):
            for _ in range(3):
                with probe.piece(units=4):
                    (float(window % 2) * mean_loss(model, *batch(4, generator))).backward()
            probe.step()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        reading = probe.reading()
        assert probe.alerts == {}
    assert reading.windows == 20
    assert [(reason.split(",")[0], n) for reason, n in reading.dropped.items()] == [("no piece had a gradient", 20)]


def test_squares_that_overflow_at_the_end_of_the_window_are_not_called_infinite_gradients() -> None:
    model = small_model()
    with attached(model) as probe:
        for _ in range(8):
            with probe.piece(units=4):
                loss = mean_loss(model, *batch(4, torch.Generator().manual_seed(0)))
                (loss * (4e18 / float(loss.detach()))).backward()
        probe.step()
        (reason,) = probe.reading().dropped
    assert "leave the range of fp32" in reason


@pytest.mark.parametrize("how", ["zeroed", "discarded", "kept elsewhere"])
def test_windows_whose_gradients_go_between_pieces(how: str) -> None:
    """Zeroed without a step, as where a loss has a spike; or added up by the loop itself, which changes nothing."""
    model = small_model()
    parameters, generator = list(model.parameters()), torch.Generator().manual_seed(0)
    with attached(model) as probe:
        for window in range(12):
            own = [torch.zeros_like(p) for p in parameters]
            for _ in range(3):
                with probe.piece(units=4):
                    mean_loss(model, *batch(4, generator)).backward()
                if how == "kept elsewhere":
                    for p, total in zip(parameters, own, strict=True):
                        assert p.grad is not None
                        total += p.grad
                        p.grad = None
            if how == "kept elsewhere":
                for p, total in zip(parameters, own, strict=True):
                    p.grad = total
            is_skipped = how != "kept elsewhere" and window in (3, 7)
            if not is_skipped:
                probe.step()
            model.zero_grad()
            if is_skipped and how == "discarded":
                probe.discard()
        reading = probe.reading()
    assert reading.trace_cov is not None
    n_dropped = 2 if how == "zeroed" else 0
    assert reading.windows == {"zeroed": 8, "discarded": 10, "kept elsewhere": 12}[how]
    assert list(reading.dropped.values()) == ([n_dropped] if n_dropped else [])
    for reason in reading.dropped:
        assert reason.startswith("gradients were zeroed between the pieces of the window: where the loop zeroes them")
