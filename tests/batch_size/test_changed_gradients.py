"""κ: everything that scales the gradient as a whole; and what does more, whose window is dropped with its cause."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.batch_size.loops import attached, batch, flat_grad, mean_loss, piece_losses, sgd, small_model, train
from tests.oracles import window_by_hand
from tests.pretend_device import DEVICE, PretendDevice

Change = Callable[[Any, int], object]
"""What a loop does to a model in a window of this number."""


def grads(model: nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def divide(model: nn.Module, window: int) -> None:
    """By a number that differs from window to window, as token counts do."""
    for grad in grads(model):
        grad.div_(90 + window)


def clip(max_norm: float) -> Change:
    return lambda model, window: nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def clip_by_value(model: nn.Module, window: int) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.02 * max(float(grad.abs().max()) for grad in grads(model)))


def add_noise(model: nn.Module, window: int) -> None:
    for grad in grads(model):
        grad.add_(torch.randn_like(grad) * 0.05 * grad.std().nan_to_num())


@functools.cache
def b_simple_of(
    factor: float = 1.0, before_step: Change = lambda model, window: None, scaler: Any = None, unscales: bool = True
) -> float:
    """tr Σ/|G|² after 12 windows at a fixed model, resolved or not."""
    model, generator = small_model(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer, grad_scaler=scaler) as probe:
        for window in range(12):
            for _ in range(3):
                with probe.piece(units=4):
                    loss = mean_loss(model, *batch(4, generator)) * factor
                    (scaler.scale(loss) if scaler else loss).backward()
            if scaler and unscales:
                scaler.unscale_(optimizer)
            before_step(model, window)
            probe.step()
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        reading = probe.reading()
    assert reading.windows == 12, reading.dropped
    assert reading.trace_cov is not None
    assert reading.grad_sq is not None
    return reading.trace_cov / reading.grad_sq


@pytest.mark.parametrize(
    "change",
    [
        {"factor": 1 / 3},
        {"factor": 1024.0},
        {"before_step": clip(0.01)},
        {"before_step": clip(1e6)},
        {"before_step": divide},
        {"grows": True},
        {"grows": True, "unscales": False},
    ],
    ids=lambda options: ", ".join(options),
)
def test_scaling_does_not_matter(change: dict[str, Any]) -> None:
    """A real GradScaler grows every 5 windows: pieces are unscaled by the scale they were taken at."""
    if change.pop("grows", False):
        change["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
    assert b_simple_of(**change) == pytest.approx(b_simple_of(), rel=1e-4)


@dataclass(frozen=True)
class Loop:
    """Windows of pieces, in which something is wrong.

    Attributes:
        factor: by which the loss of a piece is multiplied, given the window and the piece.
        weight: of each piece.
        piece: what a piece holds besides, or in place of, its backward.
        before_step: between the last backward and the end of the window.
        zeroes: whether gradients are zeroed after a window.
        n: how many windows.
        n_pieces: of each.
    """

    factor: Callable[[int, int], float] = lambda window, piece: 1.0
    weight: float = 1.0
    before_step: Change = lambda model, window: None
    further: Callable[[Any, Any], object] = lambda model, probe: None
    zeroes: Callable[[int], bool] = lambda window: True
    set_to_none: bool = True
    n: int = 3
    n_pieces: int = 2

    def run(self) -> tuple[Any, list[str], Tensor]:
        """The reading, the alerts, and the gradients of the pieces."""
        model = small_model()
        losses = piece_losses(model, [4] * self.n_pieces)
        with attached(model, log_every=1) as probe:
            for window in range(self.n):
                for k, loss in enumerate(losses):
                    with probe.piece(units=4, weight=self.weight):
                        (loss() * self.factor(window, k)).backward()
                self.further(model, probe)
                self.before_step(model, window)
                probe.step()
                if self.zeroes(window):
                    model.zero_grad(self.set_to_none)
            reading, alerts = probe.reading(), list(probe.alerts)
        model.zero_grad()
        return reading, alerts, torch.stack([flat_grad(model, loss()) for loss in losses])


def constant(factor: float) -> Callable[[int, int], float]:
    return lambda window, piece: factor


def in_odd_windows(window: int, piece: int) -> float:
    return float(window % 2)


def interrupted(model: Any, probe: Any) -> None:
    with contextlib.suppress(KeyError), probe.piece(units=4):
        mean_loss(model, *batch(4, torch.Generator().manual_seed(0))).backward()
        raise KeyError


def skipped(model: Any, probe: Any) -> None:
    with probe.piece(units=4):
        pass


def zero(model: Any, window: int) -> None:
    model.zero_grad()


def too_large(model: Any, window: int) -> None:
    """At one element of many; |F|² > Σw Σ|h|²/w is impossible for a sum of pieces, wherever it is."""
    grads(model)[4].view(-1)[window] += 1e3


def one_layer(model: Any, window: int) -> None:
    for p in model[4].parameters():
        p.grad.mul_(0.9)


OVERFLOW, VANISH, NOT_ONE = "squares overflow fp32", "vanish", "not a multiple of the sum of its pieces"
WRONG: dict[str, tuple[Loop, int, str, list[str]]] = {
    "a NaN piece": (
        Loop(factor=lambda window, piece: math.nan if (window, piece) == (1, 0) else 1.0),
        2,
        "not finite",
        ["not_finite"],
    ),
    "all NaN": (Loop(factor=constant(math.nan)), 0, OVERFLOW, ["not_finite"]),
    "infinite": (Loop(factor=constant(math.inf)), 0, OVERFLOW, ["not_finite"]),
    "too large for fp32": (Loop(factor=constant(1e25)), 0, OVERFLOW, ["not_finite"]),
    "above 1e19": (Loop(factor=constant(1e22)), 0, "so large (above 1e19)", ["not_finite"]),
    "small": (Loop(factor=constant(1e-21)), 0, VANISH, ["vanishing"]),
    "tiny": (Loop(factor=constant(1e-25)), 0, VANISH, ["vanishing"]),
    "clipped by value": (Loop(before_step=clip_by_value), 0, "clipped by value", ["changed"]),
    "noise": (Loop(before_step=add_noise), 0, "noise was added", ["changed"]),
    "one layer scaled": (Loop(before_step=one_layer), 0, NOT_ONE, ["changed"]),
    "one element": (Loop(before_step=too_large), 0, NOT_ONE, ["changed"]),
    "zeroed before the step": (Loop(before_step=zero), 0, "was it zeroed", ["zero"]),
    "never zeroed once": (
        Loop(zeroes=lambda window: window != 0),
        2,
        "zero_grad() after every optimizer.step()",
        ["not_zeroed"],
    ),
    "never zeroed once, set to 0": (
        Loop(zeroes=lambda window: window != 0, set_to_none=False),
        2,
        "zero_grad() after every optimizer.step()",
        ["not_zeroed"],
    ),
    "weights too large": (Loop(weight=1e200), 0, "too large or too small to add up", ["weights"]),
    "a piece without a backward": (
        Loop(further=skipped),
        0,
        "no backward reached the parameters in a piece: leave out skipped micro-batches",
        ["empty_piece"],
    ),
    # Squares of pieces are in the range of fp32, and those of their sum are not: no gradient is called infinite.
    "too large in the sum": (Loop(factor=constant(4e17), n_pieces=8), 0, "leave the range of fp32", ["out_of_range"]),
    # As in reinforcement learning, where every advantage of a prompt is 0 if its answers are all alike.
    "no gradient in a window": (Loop(factor=in_odd_windows, n=40), 20, "no piece had a gradient", []),
    "no gradient, set to 0": (Loop(factor=in_odd_windows, n=40, set_to_none=False), 20, "no piece had a gradient", []),
    "an interrupted piece": (
        Loop(further=interrupted),
        0,
        "a piece was interrupted in or after its backward",
        ["interrupted"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    loop, windows, reason, alerts = WRONG[name]
    reading, raised, gradients = loop.run()
    assert reading.windows == windows
    assert sum(reading.dropped.values()) == loop.n - windows
    assert all(reason in each for each in reading.dropped), reading.dropped
    assert raised == alerts
    if windows:
        trace_cov, _ = window_by_hand([*gradients], [1, 1], [4, 4], gradients.sum(0))
        assert reading.trace_cov == pytest.approx(trace_cov, rel=1e-5)


def overflowing(backoff: float, windows: int, ends: str, read: Callable[[Any, int], object]) -> None:
    """Windows of a GradScaler whose first scale is far too large."""
    model, generator = small_model(), torch.Generator().manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=backoff, growth_interval=1000)
    optimizer = sgd(model)
    with attached(model, optimizer, grad_scaler=scaler) as probe:
        for window in range(windows):
            for _ in range(2):
                with probe.piece(units=4):
                    scaler.scale(100 * mean_loss(model, *batch(4, generator))).backward()
            if ends == "a clip":
                scaler.unscale_(optimizer)
                probe.clip_grad_norm_(1e3)
            else:
                probe.step()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            read(probe, window)


def test_overflow_under_a_grad_scaler_is_dropped_and_poisons_nothing() -> None:
    def read(probe: Any, window: int) -> None:
        if window == 39:
            reading = probe.reading()
            dropped = sum(reading.dropped.values())
            assert 0 < dropped < 20
            assert reading.windows == 40 - dropped
            assert all("multiplied by the loss scale" in reason for reason in reading.dropped)
            assert math.isfinite(reading.trace_cov or math.nan)
        assert not probe.alerts  # a GradScaler finds its scale by overflows

    overflowing(2.0**-80, 40, "a clip", read)


def test_a_loss_scale_that_overflows_again_and_again_is_an_alert() -> None:
    def read(probe: Any, window: int) -> None:
        probe.reading()
        assert ("loss_scale" in probe.alerts) == (window >= 9)

    overflowing(0.999, 12, "a step", read)


@pytest.mark.parametrize(
    "counts",
    [{"weight": [math.nan]}, {"weight": [-1.0]}, {"unit_weights": [3.0, -1.0, 2.0, -2.0]}, {"tokens": [math.nan]}],
    ids=str,
)
def test_bad_counts_on_the_device_drop_the_window(counts: dict[str, list[float]]) -> None:
    with PretendDevice() as device:
        model = small_model().to(DEVICE)
        given: Any = {name: torch.tensor(each, device="cpu").to(DEVICE) for name, each in counts.items()}
        if "weight" in given:
            given = {"units": 4, "weight": given["weight"][0]}
        if "tokens" in given:
            given = {"units": {"rows": 4, "tokens": given["tokens"][0]}}
        with attached(model, unit=("rows", "tokens") if "tokens" in counts else "rows") as probe:
            with device.no_reads():
                for _ in range(2):
                    with probe.piece(**given):
                        model(torch.randn(4, 12, device=DEVICE)).square().mean().backward()
                probe.step()
            reading = probe.reading()
    assert reading.windows == 0
    assert "not finite and positive" in reading.reason


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


def test_gradients_present_at_attach_are_noticed_but_zeros_are_accepted() -> None:
    model = small_model()
    piece_losses(model, [4])[0]().backward()
    with attached(model) as probe:
        train(model, probe)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        train(model, probe)
        reading = probe.reading()
    assert (reading.windows, sum(reading.dropped.values())) == (1, 1)
    assert "were still in .grad" in next(iter(reading.dropped))


@pytest.mark.parametrize("change", ["scaled", "zeroed", "none"])
def test_a_change_to_a_block_with_small_gradients_is_seen(change: str) -> None:
    """The block is negligible beside the others, but its own noise scale would be wrong."""
    model = nn.ModuleDict({"large": nn.Linear(12, 3), "small": nn.Linear(12, 3)})
    generator = torch.Generator().manual_seed(0)
    with attached(model) as probe:
        for _ in range(5):
            for _ in range(2):
                with probe.piece(units=4):
                    x, y = batch(4, generator)
                    loss = (model["large"](x) - y).square().mean() + 1e-5 * (model["small"](x) - y).square().mean()
                    loss.backward()
            for p in model["small"].parameters():
                p.grad = None if change == "none" else p.grad * (0.9 if change == "scaled" else 0.0)
            probe.step()
            model.zero_grad()
        assert probe.reading().windows == 0
        assert change != "scaled" or NOT_ONE in probe.reading().reason


@pytest.mark.parametrize(("how", "windows"), [("zeroed", 8), ("discarded", 10), ("kept elsewhere", 12)])
def test_windows_whose_gradients_go_between_pieces(how: str, windows: int) -> None:
    """Zeroed without a step, as where a loss has a spike; or added up by the loop itself, which changes nothing."""
    model, generator = small_model(), torch.Generator().manual_seed(0)
    parameters = list(model.parameters())
    with attached(model) as probe:
        for window in range(12):
            own = [torch.zeros_like(p) for p in parameters]
            for _ in range(3):
                with probe.piece(units=4):
                    mean_loss(model, *batch(4, generator)).backward()
                if how == "kept elsewhere":
                    for p, total in zip(parameters, own, strict=True):
                        total += p.grad  # type: ignore[arg-type]
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
    assert reading.windows == windows
    assert list(reading.dropped.values()) == ([2] if how == "zeroed" else [])
    for reason in reading.dropped:
        assert reason.startswith("gradients were zeroed between the pieces of the window: where the loop zeroes them")
