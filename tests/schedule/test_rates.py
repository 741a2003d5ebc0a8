"""Rules of the learning rate against their formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from sonde.decision.law import Range
from sonde.decision.rate import rate_row
from sonde.decision.rate_rules import rate_factor
from sonde.parallel.unwrap import settings_of
from sonde.schedule.rates import options_at, usual_rule_of


def adam(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.zeros(2))], **{"lr": 1e-3} | options)


@pytest.mark.parametrize(
    ("rule", "factor"),
    [
        ("none", 1),
        ("linear", 8),
        ("sqrt", math.sqrt(8)),
        ({128: 3.5}, 3.5),
        ("sgd=64", (1 + 64 / 16) / (1 + 64 / 128)),
        ("sign=64", math.sqrt((1 + 64 / 16) / (1 + 64 / 128))),
    ],
)
def test_a_rule_gives_the_multiple_of_each_groups_rate(rule: Any, factor: float) -> None:
    optimizer = adam()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.5})
    assert options_at(optimizer, rule, 128, 16) == [{"lr": 1e-3 * factor}, {"lr": 0.5 * factor}]
    assert options_at(optimizer, rule, 16, 16) == [{"lr": 1e-3}, {"lr": 0.5}]


def test_far_below_its_noise_scale_sgd_has_the_linear_rule_and_a_sign_the_root() -> None:
    for rule, limit in (("sgd=1e12", "linear"), ("sign=1e12", "sqrt"), ("sgd=1e-12", "none")):
        assert rate_factor(rule, 128, 16) == pytest.approx(rate_factor(limit, 128, 16))


@pytest.mark.parametrize("rule", ["square", "sgd", "sgd=0", "sgd=x", "sign=inf", "sqrt=3", "linear="])
def test_other_rules_are_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="the rule of the rate must be sqrt, linear, none, sgd=N, sign=N"):
        rate_factor(rule, 128, 16)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_a_multiple_must_be_positive(factor: float) -> None:
    with pytest.raises(ValueError, match="a positive multiple of the rate is needed"):
        options_at(adam(), {128: factor}, 128, 16)


def test_adams_moments_follow_the_batch() -> None:
    """Malladi et al.: 1 − β grows with the batch, ε falls with its root; beyond 1 there is no such β."""
    optimizer = adam(betas=(0.9, 0.99), eps=1e-8)
    [found] = options_at(optimizer, "adam", 64, 16)
    assert found == {"lr": 2e-3, "betas": pytest.approx((0.6, 0.96)), "eps": 5e-9}
    [far] = options_at(optimizer, "adam", 256, 16)
    assert far == {"lr": 4e-3, "betas": pytest.approx((0.5, 0.95)), "eps": 2.5e-9}


def test_the_usual_rule_is_that_of_the_optimizer() -> None:
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.5)
    assert (usual_rule_of([plain]), usual_rule_of([adam()]), usual_rule_of([plain, adam()])) == (
        "linear",
        "sqrt",
        "sqrt",
    )


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Muon])
def test_advice_far_below_the_critical_batch_has_the_rate_of_a_schedule(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(2, 2))], lr=0.5)  # type: ignore[call-arg]
    for critical, rel in ((math.inf, 1e-12), (1e9, 1e-6), (64.0, None)):
        row = rate_row(settings_of([optimizer])[0], 64, 16, Range(critical, critical, critical))
        [options] = options_at(optimizer, usual_rule_of([optimizer]), 64, 16)
        is_same = row.settings[0].then == pytest.approx(options["lr"], rel=rel or 1e-6)
        assert is_same == (rel is not None)
