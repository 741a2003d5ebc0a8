"""Rules of the learning rate against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sonde.decision.law import Range
from sonde.decision.rate import adam_settings, rate_factor, rate_row
from sonde.parallel.unwrap import settings_of
from sonde.schedule.scaled_rate import usual_rule_of


@pytest.mark.parametrize(
    ("rule", "factor"),
    [
        ("none", 1),
        ("linear", 8),
        ("sqrt", math.sqrt(8)),
        ("sgd=64", (1 + 64 / 16) / (1 + 64 / 128)),
        ("sign=64", math.sqrt((1 + 64 / 16) / (1 + 64 / 128))),
    ],
)
def test_a_rule_gives_the_multiple_of_the_rate(rule: str, factor: float) -> None:
    assert (rate_factor(rule, 128, 16), rate_factor(rule, 16, 16)) == (factor, 1)


def test_far_below_its_noise_scale_sgd_has_the_linear_rule_and_a_sign_the_root() -> None:
    for rule, limit in (("sgd=1e12", "linear"), ("sign=1e12", "sqrt"), ("sgd=1e-12", "none")):
        assert rate_factor(rule, 128, 16) == pytest.approx(rate_factor(limit, 128, 16))


@pytest.mark.parametrize("rule", ["square", "sgd", "sgd=0", "sgd=x", "sign=inf", "sqrt=3", "linear="])
def test_other_rules_are_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="the rule of the rate must be sqrt, linear, none, sgd=N, sign=N"):
        rate_factor(rule, 128, 16)


def test_adams_moments_follow_the_batch() -> None:
    """Malladi et al.: 1 − β grows with the batch, ε falls with its root; beyond 1 there is no such β."""
    for kappa, expected in ((4, (0.6, 0.96, 5e-9)), (16, (0.5, 0.95, 2.5e-9))):
        found = adam_settings(kappa, beta1=0.9, beta2=0.99, eps=1e-8)
        assert tuple(found.values()) == pytest.approx(expected)


def test_the_usual_rule_is_that_of_the_optimizer() -> None:
    sgd, adam = (kind([nn.Parameter(torch.zeros(2))], lr=0.5) for kind in (torch.optim.SGD, torch.optim.AdamW))
    assert [usual_rule_of(of) for of in ([sgd], [adam], [sgd, adam])] == ["linear", "sqrt", "sqrt"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Muon])
def test_advice_far_below_the_critical_batch_has_the_rate_of_a_schedule(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(2, 2))], lr=0.5)  # type: ignore[call-arg]
    for critical, rel in ((math.inf, 1e-12), (1e9, 1e-6), (64.0, None)):
        row = rate_row(settings_of([optimizer])[0], 64, 16, Range(critical, critical, critical))
        rate = 0.5 * rate_factor(usual_rule_of([optimizer]), 64, 16)
        is_same = row.settings[0].then == pytest.approx(rate, rel=rel or 1e-6)
        assert is_same == (rel is not None)
