"""Rules of the learning rate against their formulas, and rates that hold against a schedule."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from sonde.evidence.rates import held_rates, largest_rate, options_at, rate_factor, usual_rule


@pytest.mark.parametrize(
    ("rule", "factor"),
    [("none", 1), ("linear", 8), ("sqrt", math.sqrt(8)), ("adam", math.sqrt(8)), (math.log, math.log(8))],
)
def test_a_rule_gives_the_multiple_of_the_rate(rule: Any, factor: float) -> None:
    assert rate_factor(rule, 128, 16) == factor
    assert rate_factor(rule, 16, 16) == 1


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_a_multiple_must_be_positive(factor: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        rate_factor({128: factor}, 128, 16)


def test_adams_moments_follow_the_batch() -> None:
    """Malladi et al.: 1 − β grows with the batch, ε falls with its root; beyond 1 there is no such β."""
    group = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8}
    found = options_at(group, "adam", 64, 16)
    assert found == {"lr": 2e-3, "betas": pytest.approx((0.6, 0.96)), "eps": 5e-9}
    with pytest.raises(ValueError, match=r"1 − β is below 0\.0625"):
        options_at(group, "adam", 256, 16)


def test_the_usual_rule_is_that_of_the_optimizer() -> None:
    weights = [nn.Parameter(torch.zeros(2))]
    plain, adam = torch.optim.SGD(weights, lr=0.5), torch.optim.AdamW(weights, lr=0.25)
    assert (usual_rule([plain]), usual_rule([adam]), usual_rule([plain, adam])) == ("linear", "sqrt", "sqrt")
    assert largest_rate([adam, plain]) == 0.5
    assert largest_rate([]) is None


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)])
def test_steps_are_taken_at_the_held_rate_whatever_a_schedule_sets(rate: Any) -> None:
    weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=rate)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    with held_rates([optimizer], "linear", 32, 16) as take:
        for part in (1.0, 0.25):
            take(part)
            for _ in range(2):
                weight.grad = -torch.ones_like(weight)
                optimizer.step()
                schedule.step()
    assert weight.item() == 2 * 1.0 + 2 * 0.25
    weight.grad = -torch.ones_like(weight)
    optimizer.param_groups[0]["lr"] = 8.0
    optimizer.step()
    assert weight.item() == 10.5  # held no longer
