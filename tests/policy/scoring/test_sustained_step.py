"""The step that an optimizer adds for a gradient which every step has: beside real optimizers that are given it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonde.policy.scoring.sustained_step import SustainedStep

LR, STEPS, LAST, RUNS = 1e-3, 400, 100, 1000
SPREAD = torch.tensor([1.0, 1.0, 1.0, 1e-3, 1e-3], dtype=torch.float64)
"""Of a training's gradients, whose mean is 0."""
BONUS = torch.tensor([0.01, 1.0, 30.0, 1.0, -1.0], dtype=torch.float64)


def trained(kind: Any, bonus: Tensor | None, **options: Any) -> tuple[torch.optim.Optimizer, nn.Parameter, Tensor]:
    """An optimizer of many runs at once, after steps of random gradients, perhaps with a bonus; loss −bonus·θ.

    Returns:
        The optimizer, its parameter, and the mean of the last steps over runs.
    """
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(5, RUNS, dtype=torch.float64))
    optimizer = kind([p], lr=LR, **options)
    at = torch.zeros_like(p)
    for step in range(STEPS):
        if step == STEPS - LAST:
            at = p.detach().clone()
        signs = torch.randint(2, p.shape, generator=generator) * 2 - 1
        p.grad = SPREAD[:, None] * signs - (0.0 if bonus is None else bonus[:, None])
        optimizer.step()
    return optimizer, p, (p.detach() - at).mean(1) / LAST


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"weight_decay": 0.0}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_the_step_is_the_mean_one_of_an_optimizer_that_is_given_the_gradient(
    kind: Any, options: dict[str, Any]
) -> None:
    """Also where the bonus is 30 or 1000 times the training's gradients: an element of Adam's moves by η at most."""
    optimizer, p, without = trained(kind, None, **options)
    _, _, moved = trained(kind, BONUS, **options)
    bonus = BONUS[:, None].expand_as(p)
    answer = SustainedStep(optimizer, [p], gradient_scale=1.0, applied_scale=1.0)({p: bonus}, 1.0)[p].mean(1)
    torch.testing.assert_close(answer, moved - without, rtol=0.01, atol=1e-3 * LR)  # of the scatter over runs
    assert kind is torch.optim.SGD or float(answer.abs().max()) <= LR


def test_the_derivative_is_that_of_the_step() -> None:
    optimizer, p, _ = trained(torch.optim.Adam, None)
    answer = SustainedStep(optimizer, [p], gradient_scale=0.5, applied_scale=2.0)
    along = torch.tensor([1.0, -2.0, 0.5, 1e-3, 1.0], dtype=torch.float64)[:, None].expand_as(p)
    bonus = BONUS[:, None].expand_as(p)
    up, down = (answer({p: 0.3 * bonus + h * along}, 1.0)[p] for h in (1e-6, -1e-6))
    torch.testing.assert_close(
        answer.derivative({p: bonus}, 0.3, {p: along})[p], (up - down) / 2e-6, rtol=1e-5, atol=1e-12
    )


def test_elements_that_no_gradient_has_reached_do_not_move() -> None:
    """As rows of an embedding whose tokens no batch has had: 1/(√v̂ + ε) is 1e8 there."""
    p = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([p], lr=LR)
    for _ in range(3):
        p.grad = torch.tensor([0.5, 0.0, 1e-4])
        optimizer.step()
    answer = SustainedStep(optimizer, [p], gradient_scale=1.0, applied_scale=1.0)
    step = answer({p: torch.full((3,), 1e-6)}, 1.0)[p]
    assert step[1] == 0.0
    assert step[0] == pytest.approx(LR * 1e-6 / 0.5, rel=1e-3)
    assert step[2] == pytest.approx(LR * 1e-6 / 1e-4, rel=1e-3)
