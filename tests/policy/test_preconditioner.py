"""Adam's preconditioner, element by element, and for elements that never had a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonde.policy.mean_gradients import Preconditioner
from tests.ranks import Ranks
from tests.sharded import fsdp, whole

N_STEPS, BETA2, EPS = 4, 0.9, 1e-8
NEVER = torch.tensor([False, True, False, True, True, False])
"""Elements that never had a gradient."""


def trained(kind: Any = torch.optim.AdamW, **options: Any) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """A parameter of six elements after a few steps; some of them never had a gradient."""
    parameter = nn.Parameter(torch.ones(6, dtype=torch.float64))
    optimizer: torch.optim.Optimizer = kind([parameter], lr=0.01, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(N_STEPS):
        parameter.grad = torch.randn(6, generator=generator, dtype=torch.float64).masked_fill(NEVER, 0.0)
        optimizer.step()
    return parameter, optimizer


def adam(**options: Any) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    return trained(betas=(0.0, BETA2), eps=EPS, weight_decay=0.0, **options)


def on_ones(parameter: Tensor, optimizer: Any, *parts: list[float]) -> Tensor:
    """P of each element, where the update's gradient has these parts."""
    gradients = [{parameter: torch.tensor(part, dtype=torch.float64)} for part in parts]
    vector = {parameter: torch.ones_like(parameter)}
    Preconditioner(optimizer, gradients)(vector)
    return vector[parameter].detach()


@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_first_gradient_moves_an_element_as_far_as_adams_real_step(amsgrad: bool) -> None:
    """Without momentum, Adam's step is −lr·P·g. P of the previous step would give 10⁸·lr·g."""
    parameter, optimizer = adam(amsgrad=amsgrad)
    gradient = [0.3, 0.2, -5.0, -1e-3, 1e-12, 1.0]
    p = on_ones(parameter, optimizer, gradient)
    before = parameter.detach().clone()
    parameter.grad = torch.tensor(gradient, dtype=torch.float64)
    optimizer.step()
    taken = parameter.detach() - before
    torch.testing.assert_close((-0.01 * p * parameter.grad)[NEVER], taken[NEVER], rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("eps", [EPS, 0.0])
def test_an_element_without_any_gradient_does_not_move(eps: float) -> None:
    """Evaluation responses may depend on rows of an embedding that no batch has used: P would be 1/ε, or infinite."""
    parameter, optimizer = trained(eps=eps)
    p = on_ones(parameter, optimizer, [0.0] * 6)
    assert not p[NEVER].any()
    assert (p[~NEVER] > 0).all()


def test_gradients_that_cancel_over_the_batch_do_not_make_p_huge() -> None:
    """The halves' root mean square is 0.2, whether they agree or cancel to 1e-9."""
    parameter, optimizer = adam()
    agree = on_ones(parameter, optimizer, [0.2] * 6, [0.2] * 6)
    cancel = on_ones(parameter, optimizer, [0.2] * 6, [-0.2 + 1e-9] * 6)
    torch.testing.assert_close(cancel, agree, rtol=1e-8, atol=0.0)


def test_parameters_that_were_never_used_and_those_of_others() -> None:
    parameter, optimizer = adam()
    outside, never, idle = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(3))
    optimizer.add_param_group({"params": [never, idle], "lr": 0.01})
    gradient = {
        parameter: torch.ones(6),
        outside: torch.ones(2),
        never: torch.tensor([0.5, -4.0]),
        idle: torch.zeros(2),
    }
    vector = {p: torch.ones_like(p) for p in gradient}
    Preconditioner(optimizer, [gradient])(vector)
    assert not vector[outside].any()
    assert not vector[idle].any()
    assert vector[never].tolist() == pytest.approx([2.0, 0.25])  # Adam's first step: lr·sign(g)


def _sharded() -> list[tuple[Tensor, Tensor, Tensor]]:
    """P·1 of each sharded parameter, with the second moment and the gradient that it comes from."""
    cut = fsdp()
    parameters = list(cut.parameters.values())
    optimizer = torch.optim.AdamW(parameters, lr=0.1, betas=(0.9, BETA2), eps=EPS)
    optimizer.step()
    for p in parameters:
        moment = optimizer.state[p]["exp_avg_sq"].to_local()
        moment[: len(moment) // 2] = 0.0
    gradient = {p: p.grad for p in parameters if p.grad is not None}
    vector = {p: torch.ones_like(p) for p in gradient}
    Preconditioner(optimizer, [gradient])(vector)
    return [(whole(vector[p].detach()), whole(optimizer.state[p]["exp_avg_sq"]), whole(g)) for p, g in gradient.items()]


def test_each_rank_preconditions_its_own_shards(ranks2: Ranks) -> None:
    for rows in ranks2(_sharded):
        assert len(rows) == 9
        for p, moment, gradient in rows:
            v = torch.where(moment > 0, moment.double() / (1 - BETA2), 0.0)
            new = (1 - BETA2) / (1 - BETA2**2) * gradient.double().square()
            expected = 1.0 / (torch.where(v.sqrt() <= EPS, new, v).sqrt() + EPS)
            expected = torch.where((v.sqrt() <= EPS) & (gradient == 0), 0.0, expected)
            torch.testing.assert_close(p.double(), expected, rtol=1e-4, atol=0.0)
