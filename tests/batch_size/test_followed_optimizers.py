"""Optimizers that are replaced, that have no hooks, or that nobody keeps; and the learning rate that a probe reads."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

import sonde
from sonde.batch_size.last_words import decision_of
from tests.batch_size.loops import attached, batch, mean_loss, piece_losses, sgd, small_model, windows_of
from tests.pretend_device import DEVICE, PretendDevice


class Lookahead(torch.optim.Optimizer):
    """As often written: its class skips `super().__init__()`, so it has no hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.mark.parametrize("metric", ["euclidean", "adam"])
def test_an_optimizer_without_hooks_is_watched_by_the_one_inside(metric: str) -> None:
    weights = []
    for is_probed in (True, False):
        model = small_model()
        optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.01))
        with attached(model, optimizer if is_probed else None, metric=metric if is_probed else "euclidean") as probe:
            windows_of(model, probe, 8, optimizer)
            windows_of(model, probe, 3, optimizer, ended=False)
            if is_probed:
                assert (probe.reading().windows, dict(probe.alerts)) == (11 - (metric == "adam"), {})
        weights.append(list(model.parameters()))
    assert all(map(torch.equal, *weights))


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
        assert (probe.reading().windows, probe.reading().dropped) == (9 if is_replaced else 6, {})
        assert probe._steps.rate == 0.002


def scaled(probed: bool) -> tuple[list[Tensor], sonde.NoiseScaleReading | None]:
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


def test_a_probe_that_nobody_keeps_lives_as_long_as_its_model_and_keeps_no_optimizer() -> None:
    model = small_model()
    optimizer = sgd(model)
    probe = weakref.ref(attached(model, optimizer, units_per_piece="first dim", every=10))
    for _ in range(25):  # most windows are not measured, and have no hook on a parameter
        for loss in piece_losses(model, [4, 4]):
            loss().backward()
        optimizer.step()
        model.zero_grad()
        gc.collect()
    alive, of_optimizer = probe(), weakref.ref(optimizer)
    assert alive is not None
    assert alive.reading().windows == 3
    del optimizer
    assert of_optimizer() is None
    del alive, model, loss
    gc.collect()
    assert probe() is None


def test_close_removes_the_hooks_and_may_be_called_again() -> None:
    model = small_model()
    optimizer, before = sgd(model), len(_global_optimizer_pre_hooks)
    with attached(model, optimizer) as probe:
        assert len(_global_optimizer_pre_hooks) == before + 1
        assert all(p._backward_hooks for p in model.parameters())
    probe.close()
    assert len(_global_optimizer_pre_hooks) == before
    assert not optimizer._optimizer_step_pre_hooks
    assert not any(p._backward_hooks for p in model.parameters())


def test_a_forked_process_that_trains_is_left_alone() -> None:
    model = small_model()
    optimizer = sgd(model)
    with attached(model, optimizer) as probe:
        windows_of(model, probe, 2, optimizer)
        end, other_end = os.pipe()
        if not (child := os.fork()):
            status = 1
            with contextlib.suppress(BaseException):
                windows_of(model, probe, 4, optimizer, ended=False)
                os.write(other_end, str((probe._ends.n_windows, list(probe.alerts))).encode())
                status = 0
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert os.read(end, 1000) == b"(2, [])"
        windows_of(model, probe, 2, optimizer, ended=False)
        assert (probe.reading().windows, probe.alerts) == (4, {})


# No batch is judged while the learning rate rises; a verdict comes once it stays.


@pytest.mark.parametrize(("is_given", "kind"), [(False, "number"), (True, "tensor"), (True, "device")])
def test_the_rate_of_the_optimizer_decides_when_the_warm_up_is_over(is_given: bool, kind: str) -> None:
    """Also of an optimizer that is found by its steps. A rate on the device is not waited for."""
    pretended = PretendDevice() if kind == "device" else None
    with pretended or contextlib.nullcontext():
        device = DEVICE if pretended else torch.device("cpu")
        model, generator = small_model().to(device), torch.Generator(device="cpu").manual_seed(0)
        rate: Any = 0.0 if kind == "number" else torch.zeros((), device=device)
        # The other group's rate is smaller, and a plain number.
        groups = [{"params": list(model[:3].parameters()), "lr": rate}, {"params": list(model[3:].parameters())}]
        optimizer, kinds = torch.optim.SGD(groups, lr=1e-12, foreach=False), {}
        every = 1 if pretended is None else 5  # the pretended device is slow
        with attached(model, optimizer if is_given else None, every=every) as probe:
            for window in range(1, 216):
                new = 1e-9 * min(window, 110)  # so small that the weights stay
                if kind == "number":
                    optimizer.param_groups[0]["lr"] = new
                else:
                    rate.fill_(new)
                with pretended.no_reads() if pretended is not None else contextlib.nullcontext():
                    for _ in range(2):
                        x, y = (t.to(device, non_blocking=True) for t in batch(4, generator))
                        with probe.piece(units=4):
                            mean_loss(model, x, y).backward()
                    probe.step()
                optimizer.step()
                optimizer.zero_grad()
                if pretended is not None:
                    pretended.catch_up(but=5)  # the device lags behind
                if window in (105, 215):
                    reading = probe.reading()
                    decision = decision_of(probe, reading)
                    known = decision.kind != "wait", probe.metrics()["gns/warms_up"]
                    kinds[window] = reading.warms_up, *known
                    assert window == 215 or "learning rate is still rising" in decision.reason
            assert probe.alerts == {}
    assert kinds == {105: (True, False, 1.0), 215: (False, True, 0.0)}
