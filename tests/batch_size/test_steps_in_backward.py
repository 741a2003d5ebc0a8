"""Optimizers that step inside backward: no window has its whole gradient at a time."""

from __future__ import annotations

import pytest
import torch

from tests.batch_size.loops import attached, small_model, windows_of


def test_steps_inside_backward_are_named() -> None:
    model = small_model()
    optimizers = {p: torch.optim.SGD([p], lr=0.0) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    with attached(model, log_every=1) as probe:
        windows_of(model, probe, 3)
        assert probe.reading().windows == 0
        assert "stepped inside backward" in probe.reading().reason
        assert list(probe.alerts) == ["stepped_in_backward"]


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # the import compiles a function
def test_an_optimizer_that_torch_applies_in_backward_is_named() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = small_model()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with attached(model) as probe:
        windows_of(model, probe, 2)
        assert probe.reading().windows == 0
        assert list(probe.alerts) == ["stepped_in_backward"]


def step_by_hand(parameter: torch.Tensor) -> None:
    parameter.data.sub_(parameter.grad, alpha=0.0)  # type: ignore[arg-type]
    parameter.grad = None


@pytest.mark.parametrize("by_hand", [True, False])
def test_steps_inside_backward_by_hooks_that_come_after_attach_are_named(by_hand: bool) -> None:
    model = small_model()
    optimizers = {p: torch.optim.SGD([p], lr=0.0) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    with attached(model, log_every=1) as probe:
        windows_of(model, probe, 2)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step_by_hand if by_hand else step)
        windows_of(model, probe, 3)
        assert probe.reading().windows == 2
        assert list(probe.alerts) == ["zero" if by_hand else "stepped_in_backward"]
        assert ("taken by a hook" if by_hand else "step after the last") in next(iter(probe.alerts.values()))


def test_hooks_that_leave_the_gradient_alone_are_no_cause_for_alarm() -> None:
    model = small_model()
    with attached(model, log_every=1) as probe:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: None)
        windows_of(model, probe, 3)
        assert probe.reading().windows == 3
        assert probe.alerts == {}
