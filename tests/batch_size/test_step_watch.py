"""The step of whichever optimizer ends the window, and loops that end it by themselves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import sonde
from tests.batch_size.loops import attached, batch, mean_loss, piece_losses, sgd, small_model, train, windows_of


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
        assert "ended twice" in probe.alerts["no_backward"]


def readings(
    make: Callable[[nn.Sequential], Sequence[torch.optim.Optimizer]],
    call: str,
    *,
    are_given: bool = True,
    windows: int = 12,
    **options: Any,
) -> tuple[sonde.NoiseScaleReading, dict[str, str], list[torch.Tensor]]:
    """A loop that ends its windows by `probe.step()` before the step, after it, now and then, or never."""
    model = small_model()
    optimizers, generator = make(model), torch.Generator().manual_seed(0)
    with attached(model, list(optimizers) if are_given else None, **{"every": 1} | options) as probe:
        for window in range(windows):
            for n in (4, 6):
                with probe.piece(units=n):
                    mean_loss(model, *batch(n, generator)).backward()
            if call == "before" or (call == "now and then" and window % 3 == 1):
                probe.step()
            if call == "a clip":
                probe.clip_grad_norm_(1e9)
            for optimizer in optimizers:
                optimizer.step()
            if call == "after":
                probe.step()
            model.zero_grad()
        reading = probe.reading()
        return reading, dict(probe.alerts), [p.detach().clone() for p in model.parameters()]


LOOPS: dict[str, Callable[[nn.Sequential], Sequence[torch.optim.Optimizer]]] = {
    "one": lambda model: [torch.optim.AdamW(model.parameters(), lr=0.01)],
    "two": lambda model: [torch.optim.SGD(model[:2].parameters(), lr=0.01), torch.optim.Adam(model[2:].parameters())],
    "fused": lambda model: [torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)],
}


@pytest.mark.parametrize("call", ["never", "after", "now and then", "a clip"])
@pytest.mark.parametrize("are_given", [True, False])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_step_ends_the_window(loop: str, are_given: bool, call: str) -> None:
    """Whatever the loop calls besides, the numbers are those of a loop that ends each window before the step."""
    expected, _, rested = readings(LOOPS[loop], "before", are_given=are_given)
    reading, alerts, weights = readings(LOOPS[loop], call, are_given=are_given)
    assert (reading.windows, reading.dropped, alerts) == (12, {}, {})
    if call != "a clip":  # which computes |F|² in another order
        assert (reading.trace_cov, reading.grad_sq) == (expected.trace_cov, expected.grad_sq)
    assert reading.trace_cov == pytest.approx(expected.trace_cov, rel=1e-6)
    assert all(map(torch.equal, weights, rested))


def test_a_probe_that_nobody_keeps_lives_as_long_as_its_model() -> None:
    model = small_model()
    optimizer = sgd(model)
    probe = weakref.ref(attached(model, optimizer, units_per_piece="first dim", every=10))
    for _ in range(25):  # most windows are not measured, and have no hook on a parameter
        for loss in piece_losses(model, [4, 4]):
            loss().backward()
        optimizer.step()
        model.zero_grad()
        gc.collect()
    alive = probe()
    assert alive is not None
    assert alive.reading().windows == 3
    del alive, model, optimizer, loss
    gc.collect()
    assert probe() is None


@pytest.mark.parametrize("call", ["never", "before", "after"])
def test_windows_that_are_not_measured_are_ended_too(call: str) -> None:
    reading, alerts, _ = readings(LOOPS["two"], call, windows=40, every=4)
    assert (reading.n_steps, reading.dropped, alerts) == (40, {}, {})
    assert reading.windows == 11


def test_each_optimizer_of_a_model_may_have_windows_of_its_own() -> None:
    """As where a generator and a critic in one module are trained in turn."""
    model = small_model()
    optimizers = LOOPS["two"](model)
    with attached(model, optimizers, every=1) as probe:
        for _ in range(6):
            for optimizer in optimizers:
                for loss in piece_losses(model, [4, 4]):
                    with probe.piece(units=4):
                        loss().backward()
                optimizer.step()
                model.zero_grad()
        reading = probe.reading()
        assert (reading.windows, reading.dropped, probe.alerts) == (12, {}, {})


def test_steps_without_a_gradient_end_no_window() -> None:
    model = small_model()
    optimizer = sgd(model)
    with attached(model, optimizer) as probe:
        for _ in range(3):
            windows_of(model, probe, 1, optimizer, ended=False)
            optimizer.step()
            sgd(small_model()).step()
        reading = probe.reading()
        assert (reading.windows, reading.dropped, probe.alerts) == (3, {}, {})


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("by_keyword", [True, False])
def test_a_steps_closure_may_run_the_backwards(is_given: bool, by_keyword: bool) -> None:
    """The window ends after the closure's run, which the optimizer still gets the loss of."""
    model = small_model()
    optimizer = sgd(model)
    with attached(model, optimizer if is_given else None) as probe:

        def closure() -> float:
            optimizer.zero_grad()
            for loss in piece_losses(model, [4, 4]):
                with probe.piece(units=4):
                    loss().backward()
            return 1.5

        for _ in range(8):
            loss = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
            assert loss == 1.5
        reading = probe.reading()
        assert (reading.windows, reading.dropped, probe.alerts) == (8, {}, {})


class FailsOnce(torch.optim.SGD):
    """As one that runs out of memory."""

    n = 0

    def step(self, closure: Any = None) -> Any:
        self.n += 1
        if self.n == 3:
            raise MemoryError
        return super().step(closure)


def test_windows_after_a_step_that_failed_are_ended() -> None:
    model = small_model()
    optimizers = FailsOnce(model.parameters(), lr=0.0), sgd(model)
    with attached(model) as probe:
        for window in range(8):
            with suppress(MemoryError):
                windows_of(model, probe, 1, optimizers[window > 2], ended=False)
            model.zero_grad()
        reading = probe.reading()
        assert (reading.windows, reading.dropped, probe.alerts) == (8, {}, {})


def test_a_step_inside_a_piece_is_named_and_taken() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with attached(model, optimizer) as probe:
        with probe.piece(units=4):
            piece_losses(model, [4])[0]().backward()
            optimizer.step()
        assert "inside a piece" in probe.alerts["not_ended"]
        assert not any(map(torch.equal, before, model.parameters()))


def scaled(probed: bool) -> tuple[list[torch.Tensor], sonde.NoiseScaleReading | None]:
    """A loop with a GradScaler. The gradients of one window overflow, so torch leaves out the optimizer's step."""
    model = small_model()
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=0.01), torch.Generator().manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    probe = attached(model, optimizer, grad_scaler=scaler, units_per_piece=4) if probed else None
    for window in range(20):
        for _ in range(2):
            loss = mean_loss(model, *batch(4, generator)) * (1e38 if window == 7 else 1.0)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    reading = probe.reading() if probe else None
    if probe:
        probe.close()
    return list(model.parameters()), reading


def test_a_step_that_a_grad_scaler_leaves_out_ends_no_window() -> None:
    """Its gradients are zeroed, and so the window that follows cannot be used."""
    weights, reading = scaled(True)
    plain, _ = scaled(False)
    assert all(map(torch.equal, weights, plain))
    assert reading is not None
    assert (reading.windows, sum(reading.dropped.values())) == (18, 1)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_another_optimizer_than_the_given_one_is_followed(is_replaced: bool) -> None:
    """The given one is another model's, or the loop makes a new one."""
    model = small_model()
    given = sgd(model if is_replaced else small_model())
    with attached(model, given, log_every=1) as probe:
        if is_replaced:
            windows_of(model, probe, 3, given, ended=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
        windows_of(model, probe, 6, optimizer, ended=False)
        assert list(probe.alerts) == ["optimizer_replaced"]
        reading = probe.reading()
        assert (reading.windows, reading.dropped) == (9 if is_replaced else 6, {})
        assert probe._steps.rate == 0.002


def test_of_several_optimizers_of_the_same_parameters_the_first_step_ends_the_window() -> None:
    model = small_model()
    optimizers = [sgd(model), sgd(model)]
    with attached(model) as probe:
        windows_of(model, probe, 6, *optimizers, ended=False)
        reading = probe.reading()
        assert (reading.windows, reading.dropped, probe.alerts) == (6, {}, {})


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("by_keyword", [True, False])
def test_a_window_may_end_inside_a_steps_closure(is_given: bool, by_keyword: bool) -> None:
    """The last backward runs inside the step, as some trainers do it."""
    model = small_model()
    optimizer = sgd(model)
    first, last = piece_losses(model, [4, 4])
    with attached(model, optimizer if is_given else None, log_every=1) as probe:

        def closure() -> float:
            with probe.piece(units=4):
                loss = last()
                loss.backward()
            probe.step()
            return float(loss.detach())

        for _ in range(8):
            with probe.piece(units=4):
                first().backward()
            optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
            model.zero_grad()
        assert probe.reading().windows == 8, probe.reading().dropped
        assert probe.alerts == {}


def test_close_removes_the_hooks() -> None:
    model = small_model()
    optimizer = sgd(model)
    before = len(_global_optimizer_pre_hooks)
    with attached(model, optimizer):
        assert len(_global_optimizer_pre_hooks) == before + 1
    assert len(_global_optimizer_pre_hooks) == before
    assert not optimizer._optimizer_step_pre_hooks


def test_an_optimizer_that_steps_another_inside_its_step_is_one_optimizer() -> None:
    """As ZeroRedundancyOptimizer does."""
    model = small_model()

    class Wrapping(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(model.parameters(), {})
            self.inner = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    optimizer = Wrapping()
    with attached(model) as probe:
        train(model, probe, optimizer, windows=3)
        windows_of(model, probe, 3, optimizer, ended=False)
        reading = probe.reading()
        assert (reading.windows, reading.dropped, probe.alerts) == (6, {}, {})


def step_without_an_optimizer(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=1e-3)  # type: ignore[arg-type]


def test_a_loop_whose_steps_cannot_be_seen_is_told_to_end_its_windows() -> None:
    model = small_model()
    with attached(model) as probe:
        for window in range(18):
            for loss in piece_losses(model, [4, 4]):
                with probe.piece(units=4):
                    loss().backward()
            step_without_an_optimizer(model)
            model.zero_grad()
            assert ("steps_unseen" in probe.alerts) == (window > 15)
    assert "call probe.step() before each step" in probe.alerts["steps_unseen"]


def test_weights_that_rest_need_no_optimizer() -> None:
    """A noise scale measured at one checkpoint, or at a few of them."""
    model, generator = small_model(), torch.Generator().manual_seed(0)
    state = model.state_dict()
    with attached(model, log_every=1) as probe:
        for window in range(60):
            if window % 20 == 0:
                model.load_state_dict(state)
            for _ in range(2):
                with probe.piece(units=4):
                    mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            model.zero_grad()
        assert probe.alerts == {}


@pytest.mark.parametrize("n_optimizers", [1, 2])
@pytest.mark.parametrize("n_calls", [1, 3])
def test_a_window_ended_with_each_micro_batch_is_named(n_calls: int, n_optimizers: int) -> None:
    model = small_model()
    parts = [model] if n_optimizers == 1 else [model[:2], model[2:]]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in parts]
    with attached(model, optimizers) as probe:
        for _ in range(6):
            for number, loss in enumerate(piece_losses(model, [4, 4, 4])):
                with probe.piece(units=4):
                    loss().backward()
                if n_calls == 3 or number == 2:
                    probe.step()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert ("was called 3 times between optimizer steps" in probe.alerts.get("called_often", "")) == (n_calls == 3)


@pytest.mark.parametrize("is_given", [True, False])
def test_an_optimizer_that_the_loop_is_done_with_is_not_kept_alive(is_given: bool) -> None:
    model = small_model()
    optimizer = sgd(model)
    with attached(model, optimizer if is_given else None) as probe:
        windows_of(model, probe, 5, optimizer)
        reference = weakref.ref(optimizer)
        del optimizer
        assert reference() is None
