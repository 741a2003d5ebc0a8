"""How long a fold lasts: gradients that it did not clip, closures, and other hooks of the same optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sonde


def two_parameters() -> tuple[nn.Parameter, nn.Parameter, torch.optim.Optimizer]:
    """One with a gradient of norm 100, and one without; a step of SGD with rate 1."""
    p, q = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    p.grad = torch.full((1,), 100.0)
    return p, q, torch.optim.SGD([p, q], lr=1.0, fused=True)


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_gradient_that_came_after_the_clip_is_not_scaled(is_listed: bool) -> None:
    p, q, optimizer = two_parameters()
    sonde.clip_grad_norm_([p, q] if is_listed else [p], 1.0, fold_into=optimizer)
    q.grad = torch.ones(1)
    with pytest.warns(UserWarning, match="folded into SGD is dropped, since gradients were added, .* clip the"):
        optimizer.step()
    assert (p.item(), q.item()) == (-100.0, -1.0)
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_that_makes_gradients_anew_ends_the_fold(by_name: bool) -> None:
    p, _, optimizer = two_parameters()
    sonde.clip_grad_norm_([p], 1.0, fold_into=optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = p.sum()
        loss.backward()
        return loss

    options: dict[str, Any] = {"closure": closure} if by_name else {}
    with pytest.warns(UserWarning, match=r"step\(closure\) makes gradients anew: clip inside the closure"):
        optimizer.step(*([] if by_name else [closure]), **options)  # type: ignore[call-overload]
    assert p.item() == -1.0
    assert not hasattr(optimizer, "grad_scale")


def test_a_clip_inside_the_closure_is_folded() -> None:
    p, _, optimizer = two_parameters()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = 100.0 * p.sum()
        loss.backward()
        sonde.clip_grad_norm_([p], 1.0, fold_into=optimizer)
        return loss

    for n_steps in (1, 2):
        optimizer.step(closure)
        assert p.item() == pytest.approx(-n_steps, rel=1e-5)
        assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("is_stale", [True, False])
@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
@pytest.mark.filterwarnings("ignore:the clip folded into SGD is dropped")
def test_hooks_that_are_registered_after_the_fold_run(register: str, is_stale: bool) -> None:
    p, _, optimizer = two_parameters()
    calls: list[float] = []
    sonde.clip_grad_norm_([p], 1.0, fold_into=optimizer)
    getattr(optimizer, register)(lambda *_: calls.append(p.item()))
    if is_stale:
        p.grad = torch.full((1,), 2.0)
    optimizer.step()
    moved = -2.0 if is_stale else -1.0
    assert p.item() == pytest.approx(moved, rel=1e-5)
    assert calls == [0.0 if "pre" in register else p.item()]


def test_folds_of_many_steps_leave_two_hooks() -> None:
    p, _, optimizer = two_parameters()
    for n_steps in range(1, 4):
        p.grad = torch.full((1,), 100.0)
        sonde.clip_grad_norm_([p], 1.0, fold_into=optimizer)
        optimizer.step()
        assert p.item() == pytest.approx(-n_steps, rel=1e-5)
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    assert [len(h) for h in hooks] == [1, 1]
    p.grad = torch.ones(1)
    optimizer.step()  # without a clip: nothing is scaled
    assert p.item() == pytest.approx(-4.0, rel=1e-5)
