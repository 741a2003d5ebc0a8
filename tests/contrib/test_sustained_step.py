"""The step that an optimizer adds for a gradient which every step has: beside real optimizers that are given it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonde.contrib.sustained_step import SustainedStep

LR, RUNS, ENDLESS = 1e-3, 1000, 10**6
SPREAD = torch.tensor([1.0, 1.0, 1.0, 1e-3, 1e-3, 1.0, 1.0, 1.0], dtype=torch.float64)
"""Of a training's gradients around their mean."""
MEAN = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -0.5, 1.0, 1.0], dtype=torch.float64)
"""Of a training's gradients, downhill."""
BONUS = torch.tensor([0.01, 1.0, 30.0, 1.0, -1.0, 0.1, 0.1, 3.0], dtype=torch.float64)
KINDS = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"maximize": True}),
    (torch.optim.Adam, {"eps": 1.0}),
    (torch.optim.AdamW, {"weight_decay": 0.0, "betas": (0.9, 0.99)}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "maximize": True}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {}),
]


def trained(
    kind: Any, options: dict[str, Any], *, steps: int, bonus_from: int | None, last: int
) -> tuple[torch.optim.Optimizer, nn.Parameter, Tensor]:
    """An optimizer of many runs at once, after random gradients, at the end with a bonus; the loss has −bonus·θ.

    Returns:
        The optimizer, its parameter, and the mean of the last steps over runs.
    """
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(len(MEAN), RUNS, dtype=torch.float64))
    optimizer = kind([p], lr=LR, **options)
    at = torch.zeros_like(p)
    sign = -1.0 if options.get("maximize") else 1.0
    for step in range(steps):
        if step == steps - last:
            at = p.detach().clone()
        signs = torch.randint(2, p.shape, generator=generator) * 2 - 1
        p.grad = MEAN[:, None] + SPREAD[:, None] * signs
        if bonus_from is not None and step >= bonus_from:
            p.grad -= BONUS[:, None]
        p.grad *= sign
        optimizer.step()
    # The mean itself, and not one batch's estimate of it.
    p.grad = sign * MEAN[:, None].expand_as(p).clone()
    if "exp_avg" in optimizer.state[p]:
        optimizer.state[p]["exp_avg"].copy_(MEAN[:, None])
    return optimizer, p, (p.detach() - at).mean(1) / last


def answer(optimizer: torch.optim.Optimizer, p: nn.Parameter, n_steps: float | None) -> Tensor:
    step = SustainedStep(optimizer, [p], gradient_scale=1.0, applied_scale=1.0, n_steps=n_steps)
    return step({p: BONUS[:, None].expand_as(p)}, 1.0)[p].mean(1)


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_in_the_end_the_step_is_that_of_an_optimizer_which_always_had_the_gradient(
    kind: Any, options: dict[str, Any]
) -> None:
    """Also where the bonus is 30 or 1000 times the training's gradients, and where these have a mean."""
    optimizer, p, without = trained(kind, options, steps=400, bonus_from=None, last=100)
    _, _, moved = trained(kind, options, steps=400, bonus_from=0, last=100)
    found = answer(optimizer, p, ENDLESS)
    torch.testing.assert_close(found, moved - without, rtol=0.02, atol=2e-3 * LR)  # of the scatter over runs
    assert kind is torch.optim.SGD or float(found.abs().max()) <= 2 * LR


@pytest.mark.parametrize(("kind", "options"), [*KINDS[:4], (torch.optim.Adam, {"amsgrad": True})], ids=str)
def test_after_some_steps_the_second_moment_is_of_old_and_new_gradients(kind: Any, options: dict[str, Any]) -> None:
    """60 steps with the bonus after 300 without: the momentum is new, most of the second moment is old."""
    optimizer, p, _ = trained(kind, options, steps=300, bonus_from=None, last=10)
    _, _, without = trained(kind, options, steps=362, bonus_from=None, last=5)
    _, _, moved = trained(kind, options, steps=362, bonus_from=300, last=5)
    # Scatter of the steps themselves, and the few per cent by which w still grows in the five last steps.
    torch.testing.assert_close(answer(optimizer, p, 60), moved - without, rtol=0.04, atol=0.02 * LR)


def test_by_default_it_is_after_twice_the_memory_of_the_first_moment() -> None:
    optimizer, p, _ = trained(torch.optim.Adam, {}, steps=100, bonus_from=None, last=10)
    assert torch.equal(answer(optimizer, p, None), answer(optimizer, p, 20))
    assert not torch.allclose(answer(optimizer, p, None), answer(optimizer, p, 10))


@pytest.mark.parametrize("options", [{}, {"betas": (0.0, 0.9)}, {"amsgrad": True}, {"eps": 0.1}], ids=str)
def test_the_derivative_is_that_of_the_step(options: dict[str, Any]) -> None:
    optimizer, p, _ = trained(torch.optim.Adam, options, steps=50, bonus_from=None, last=10)
    step = SustainedStep(optimizer, [p], gradient_scale=0.5, applied_scale=2.0)
    along = torch.linspace(-1.0, 1.0, len(MEAN), dtype=torch.float64)[:, None].expand_as(p)
    bonus = BONUS[:, None].expand_as(p)
    up, down = (step({p: 0.3 * bonus + h * along}, 1.0)[p] for h in (1e-6, -1e-6))
    torch.testing.assert_close(
        step.derivative({p: bonus}, 0.3, {p: along})[p], (up - down) / 2e-6, rtol=1e-4, atol=1e-10
    )


def test_elements_that_no_gradient_has_reached_do_not_move() -> None:
    """As rows of an embedding whose tokens no batch has had: 1/(√v̂ + ε) is 1e8 there."""
    p = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([p], lr=LR)
    for sign in (1.0, -1.0, 1.0):
        p.grad = sign * torch.tensor([0.5, 0.0, 1e-4])
        optimizer.step()
    answer = SustainedStep(optimizer, [p], gradient_scale=1.0, applied_scale=1.0)
    step = answer({p: torch.full((3,), 1e-6)}, 1.0)[p]
    assert step[1] == 0.0
    assert 0.5 * LR * 1e-6 / 0.5 < step[0] < 2.0 * LR * 1e-6 / 0.5
    assert step[2] == pytest.approx(5000 * float(step[0]), rel=0.02)
    assert not answer.is_zero()


def test_without_a_learning_rate_or_a_second_moment_nothing_moves() -> None:
    p = nn.Parameter(torch.zeros(3))
    for optimizer, gradient in (
        (torch.optim.SGD([p], lr=0.0), 1.0),
        (torch.optim.Adam([p], lr=0.0), 1.0),
        (torch.optim.Adam([p], lr=LR), 0.0),
    ):
        p.grad = torch.full((3,), gradient)
        assert SustainedStep(optimizer, [p], gradient_scale=1.0, applied_scale=1.0).is_zero()
