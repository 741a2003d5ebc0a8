"""Optimizers that step inside backward: no window has its whole gradient at a time."""

from __future__ import annotations

import pytest
import torch

from tests.batch_size.loops import attached, small_model, windows_of


def test_steps_inside_backward_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    optimizers = {p: torch.optim.SGD([p], lr=0.0) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    with attached(model, log_every=1, verbose=True) as probe:
        assert "post-accumulate-grad hooks on 8 parameters:" in capsys.readouterr().err
        windows_of(model, probe, 3)
        assert probe.reading().windows == 0
        assert "stepped inside backward" in probe.reading().reason
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
        assert list(probe.alerts) == ["taken_in_backward" if by_hand else "stepped_in_backward"]
        assert "step after the last backward" in next(iter(probe.alerts.values()))


def test_hooks_that_leave_the_gradient_alone_are_no_cause_for_alarm() -> None:
    model = small_model()
    with attached(model, log_every=1) as probe:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: None)
        windows_of(model, probe, 3)
        assert probe.reading().windows == 3
        assert probe.alerts == {}
