"""κ: everything that scales the gradient as a whole, and what does more."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.batch_size.loops import (
    Recording,
    attached,
    batch,
    flat_grad,
    mean_loss,
    piece_losses,
    small_model,
    train,
)
from tests.oracles import window_by_hand
from tests.pretend_device import DEVICE, PretendDevice


def b_simple_of(**options: Any) -> float:
    """tr Σ/|G|² after 30 windows at a fixed model, resolved or not."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attach_options = {k: options.pop(k) for k in ("grad_scaler",) if k in options}
    with attached(model, optimizer, **attach_options) as probe:
        make = options.pop("before_step", None)
        train(model, probe, optimizer, windows=30, before_step=make(model) if make else lambda: None, **options)
        reading = probe.reading()
    assert reading.windows == 30, reading.dropped
    assert reading.trace_cov is not None
    assert reading.grad_sq is not None
    return reading.trace_cov / reading.grad_sq


def _divide(model: nn.Module) -> Callable[[], None]:
    counts = iter(range(90, 1000))  # differs from window to window, as token counts do

    def divide() -> None:
        tokens = next(counts)
        for p in model.parameters():
            p.grad.div_(tokens)  # type: ignore[union-attr]

    return divide


@pytest.mark.parametrize(
    "change",
    [
        {"scale_loss": lambda loss: loss / 3},
        {"scale_loss": lambda loss: loss * 1024},
        {"before_step": lambda model: lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)},
        {"before_step": lambda model: lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)},
        {"before_step": _divide},
    ],
    ids=["mean-of-micro-losses", "loss-scaled", "clipped-every-time", "clip-never-reached", "divided-by-tokens"],
)
def test_scaling_does_not_matter(change: dict[str, Any]) -> None:
    assert b_simple_of(**change) == pytest.approx(b_simple_of(), rel=1e-4)


@pytest.mark.parametrize("unscaled_first", [True, False])
def test_grad_scaler(unscaled_first: bool) -> None:
    """A real GradScaler that grows every 5 windows: pieces are unscaled by the scale they were taken at."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(0)
    with attached(model, optimizer, grad_scaler=scaler) as probe:
        for _ in range(30):
            for _ in range(3):
                with probe.piece(units=4):
                    scaler.scale(mean_loss(model, *batch(4, generator))).backward()
            if unscaled_first:
                scaler.unscale_(optimizer)
            probe.step()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        reading = probe.reading()
    assert scaler.get_scale() > 100
    assert reading.windows == 30
    assert reading.trace_cov is not None
    assert reading.grad_sq is not None
    assert reading.trace_cov / reading.grad_sq == pytest.approx(b_simple_of(), rel=1e-4)


def test_overflow_under_a_grad_scaler_is_dropped_and_poisons_nothing() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-80, growth_interval=1000)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(0)
    sink = Recording()
    with attached(model, optimizer, grad_scaler=scaler, sinks=[sink]) as probe:
        for _ in range(40):
            for _ in range(2):
                with probe.piece(units=4):
                    scaler.scale(100 * mean_loss(model, *batch(4, generator))).backward()
            scaler.unscale_(optimizer)
            probe.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        reading = probe.reading()
        dropped = sum(reading.dropped.values())
        assert 0 < dropped < 20
        assert reading.windows == 40 - dropped
        assert all("multiplied by the loss scale" in reason for reason in reading.dropped)
        assert math.isfinite(reading.trace_cov or math.nan)
        assert not probe.alerts  # a GradScaler finds its scale by overflows
    assert not sink.of_kind("alert")


def test_one_nan_piece_is_dropped_counted_and_named() -> None:
    model = small_model()
    losses = piece_losses(model, [4, 4])
    with attached(model) as probe:
        for window in range(3):
            for i, loss in enumerate(losses):
                with probe.piece(units=4):
                    (loss() * (math.nan if window == 1 and i == 0 else 1.0)).backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    assert (reading.windows, sum(reading.dropped.values())) == (2, 1)
    assert "not finite" in next(iter(reading.dropped))
    gradients = [flat_grad(model, loss()) for loss in losses]
    trace_cov, _ = window_by_hand(gradients, [1, 1], [4, 4], gradients[0] + gradients[1])
    assert reading.trace_cov == pytest.approx(trace_cov, rel=1e-5)


@pytest.mark.parametrize(
    ("factor", "name", "reason"),
    [
        (math.nan, "not_finite", "squares overflow fp32"),
        (math.inf, "not_finite", "squares overflow fp32"),
        (1e25, "not_finite", "squares overflow fp32"),
    ],
)
def test_a_gradient_that_is_not_finite_says_what_is_known(factor: float, name: str, reason: str) -> None:
    model = small_model()
    with attached(model, log_every=1) as probe:
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                (loss() * factor).backward()
        probe.step()
        assert reason in probe.reading().reason
        assert list(probe.alerts) == [name]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_bad_counts_on_the_device_drop_the_window(bad: float) -> None:
    with PretendDevice() as device:
        model = small_model().to(DEVICE)
        with attached(model) as probe:
            with device.no_reads():
                for _ in range(2):
                    with probe.piece(units=4, weight=torch.tensor(bad, device="cpu").to(DEVICE)):
                        model(torch.randn(4, 12, device=DEVICE)).square().mean().backward()
                probe.step()
            reading = probe.reading()
    assert reading.windows == 0
    assert "not finite and positive" in reading.reason


def _clip_by_value(model: nn.Module) -> Callable[[], None]:
    def clip() -> None:
        largest = max(float(p.grad.abs().max()) for p in model.parameters())  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.02 * largest)

    return clip


def _add_noise(model: nn.Module) -> Callable[[], None]:
    def add() -> None:
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p.grad) * 0.05 * p.grad.std().nan_to_num())  # type: ignore[union-attr,arg-type]

    return add


@pytest.mark.parametrize(
    ("before_step", "reason"),
    [(_clip_by_value, "clipped by value"), (_add_noise, "noise was added")],
    ids=["value", "noise"],
)
def test_changes_other_than_a_scale_are_named(before_step: Any, reason: str) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer) as probe:
        train(model, probe, optimizer, windows=3, before_step=before_step(model))
        reading = probe.reading()
        assert reading.windows == 0
        assert reason in reading.reason
        assert "changed" in probe.alerts


def _clip_few_by_value(model: nn.Module) -> Callable[[], None]:
    """Clip by a value that one element in ten thousand reaches: most windows show no change where it is compared."""

    def clip() -> None:
        joined = torch.cat([p.grad.abs().flatten() for p in model.parameters()])  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_value_(model.parameters(), float(joined.quantile(0.9999)))

    return clip


def test_windows_between_changed_ones_are_not_trusted() -> None:
    """Those windows were clipped too, at elements that were not compared: their numbers would be wrong."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer) as probe:
        train(model, probe, optimizer, windows=100, before_step=_clip_few_by_value(model))
        reading = probe.reading()
    assert reading.windows > 30  # averaged, since no change was seen in them
    assert reading.status == "unresolved"
    assert (reading.b_simple, reading.low, reading.grad_sq) == (None, None, None)
    assert "clipped by value" in reading.reason or "not a multiple" in reading.reason
    assert "others may have been" in reading.reason
    assert all(group.b_simple is None for group in reading.groups.values())


def test_a_doubt_fades_with_the_windows_that_raised_it() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer) as probe:
        train(model, probe, optimizer, windows=40)
        assert probe.reading().status == "resolved"
        train(model, probe, optimizer, windows=3, before_step=_add_noise(model))
        assert "changed" in probe.reading().doubts
        train(model, probe, optimizer, windows=200)
        assert probe.reading().status == "resolved"
        assert probe.reading().doubts == {}


def test_a_change_to_a_block_with_small_gradients_is_seen() -> None:
    """The block is negligible beside the others, but its own noise scale would be wrong."""
    model = nn.ModuleDict({"large": nn.Linear(12, 3), "small": nn.Linear(12, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(0)
    with attached(model, optimizer) as probe:
        for _ in range(5):
            for _ in range(2):
                with probe.piece(units=4):
                    x, y = batch(4, generator)
                    loss = (model["large"](x) - y).square().mean() + 1e-5 * (model["small"](x) - y).square().mean()
                    loss.backward()
            for p in model["small"].parameters():
                p.grad.mul_(0.9)  # type: ignore[union-attr]
            probe.step()
            optimizer.zero_grad()
        assert probe.reading().windows == 0
        assert "not a multiple" in probe.reading().reason


@pytest.mark.parametrize(
    ("scale", "reason"), [(1e-25, "vanish"), (1e-22, "vanish"), (1e-21, "vanish"), (1e22, r"so large \(above 1e19\)")]
)
@pytest.mark.parametrize("clip", [False, True])
def test_squares_beyond_fp32_give_no_number(scale: float, reason: str, clip: bool) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer) as probe:
        train(model, probe, optimizer, windows=2, scale_loss=lambda loss: loss * scale)
        if clip:
            for loss in piece_losses(model, [4, 4]):
                with probe.piece(units=4):
                    (loss() * scale).backward()
            probe.clip_grad_norm_(math.inf)
        reading = probe.reading()
    assert reading.windows == 0
    assert all(re.search(reason, r) for r in reading.dropped)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_forgotten_zero_grad_is_named(set_to_none: bool) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    with attached(model, optimizer, log_every=1) as probe:
        for window in range(4):
            for _ in range(3):
                with probe.piece(units=4):
                    mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            optimizer.step()
            if window != 1:
                optimizer.zero_grad(set_to_none=set_to_none)
        reading = probe.reading()
        assert reading.windows == 3
        [(reason, n)] = reading.dropped.items()
        assert n == 1
        assert "zero_grad() after every optimizer.step()" in reason
        assert list(probe.alerts) == ["not_zeroed"]


@pytest.mark.parametrize("weight", [1e200, 1e-310])
def test_weights_that_cannot_be_added_up(weight: float) -> None:
    model = small_model()
    with attached(model) as probe:
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4, weight=weight):
                loss().backward()
        probe.step()
        assert "too large or too small to add up" in probe.reading().reason


def test_a_change_to_one_layer_of_many_is_found() -> None:
    """Half of the compared elements move with every window. One layer of 40 is set to 0 in each window."""
    model = nn.ModuleList(nn.Linear(12, 3) for _ in range(40))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(0)
    with attached(model, optimizer) as probe:
        for _ in range(45):
            for _ in range(2):
                with probe.piece(units=4):
                    x, y = batch(4, generator)
                    (sum(layer(x) for layer in model) - y).square().mean().backward()  # type: ignore[union-attr]
            model[23].weight.grad.zero_()  # type: ignore[union-attr]
            probe.step()
            optimizer.zero_grad()
        reading = probe.reading()
        assert "changed" in probe.alerts
        assert 2 <= sum(reading.dropped.values()) <= 15
        assert reading.status == "unresolved"


def test_a_gradient_larger_than_its_pieces_allow_is_dropped() -> None:
    """The change is at an element that is not compared. But |F|² > Σw Σ|h|²/w is impossible for a sum of pieces."""
    model = small_model()
    losses = piece_losses(model, [4, 4])
    with attached(model) as probe:
        for loss in losses:
            with probe.piece(units=4):
                loss().backward()
        grad = model[3].weight.grad
        assert isinstance(grad, Tensor)
        compared = torch.zeros_like(grad)
        index = [p is model[3].weight for p in model.parameters()].index(True)
        probe._reader._witness.read(index, compared).fill_(1.0)
        grad.view(-1)[int(compared.view(-1).argmin())] += 1e3
        probe.step()
        assert "not a multiple of the sum of its pieces" in probe.reading().reason


def test_gradients_present_at_attach_are_noticed_but_zeros_are_accepted() -> None:
    model = small_model()
    losses = piece_losses(model, [4, 4])
    losses[0]().backward()
    with attached(model) as probe:
        for _ in range(2):
            for loss in losses:
                with probe.piece(units=4):
                    loss().backward()
            probe.step()
            model.zero_grad(set_to_none=False)
        reading = probe.reading()
    assert (reading.windows, sum(reading.dropped.values())) == (1, 1)
    assert "were still in .grad" in next(iter(reading.dropped))


def test_zeroed_gradients_are_named() -> None:
    model = small_model()
    with attached(model) as probe:
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                loss().backward()
        model.zero_grad()
        probe.step()
        assert "was it zeroed" in probe.reading().reason


@pytest.mark.parametrize("ends", ["clip", "step", "optimizer"])
def test_a_run_in_float64_that_diverges_goes_on(ends: str) -> None:
    """Its squares leave the range of float64, where Python's `**` raises: windows are dropped, and training goes on."""
    model = nn.Linear(16, 4).double()
    optimizer, generator = torch.optim.SGD(model.parameters(), lr=300.0), torch.Generator().manual_seed(0)
    with attached(model, optimizer) as probe:
        for _ in range(60):
            for _ in range(3):
                x = torch.randn(8, 16, generator=generator, dtype=torch.float64)
                model(x).square().mean().backward()
            if ends == "clip":
                probe.clip_grad_norm_(None)
            elif ends == "step":
                probe.step()
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
    assert probe.n_windows == 60
    assert reading.windows + sum(reading.dropped.values()) == 60
