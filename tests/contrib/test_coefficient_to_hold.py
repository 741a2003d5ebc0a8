"""The entropy coefficient that would hold the entropy, beside the exact one of an enumerable policy."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from torch import Tensor

from sonde.contrib.coefficient_to_hold import (
    CoefficientToHold,
    Trial,
    coefficient_to_hold,
    wanted_effects,
    without_each_prompt,
)
from sonde.policy.stats.entropy_change import EntropyObjective
from sonde.policy.stats.importance import FiniteStep, Support, change_by_finite_step
from tests import tiny_policy as tiny
from tests.policy.stats.tiny_batches import DIRECTION, THETA, J, P, Scores, sampled, scores_at

PER_TOKEN = EntropyObjective("per_token")
GRADIENT = tiny.gradient(tiny.rate, THETA)
STEP = -0.02 * DIRECTION * torch.sign(GRADIENT @ DIRECTION)
"""A step that lowers the entropy."""
BONUS = (P[..., None] * J.entropy.sum(2)).sum((0, 1)) / (P * tiny.LENGTH).sum()
"""∇H̄ of all responses, exactly; the optimizer's answer D with η = 1."""


def exact(step: Tensor) -> float:
    """c with R(θ + Δ + c D) = R(θ), by Newton's method."""
    c = torch.zeros((), dtype=torch.float64)
    for _ in range(30):
        at = c.clone().requires_grad_()
        gap = tiny.rate(THETA + step + at * BONUS) - tiny.rate(THETA)
        [slope] = torch.autograd.grad(gap, at)
        c = c - gap.detach() / slope
    return float(c)


def forecast(n_prompts: int, generator: torch.Generator, step: Tensor = STEP) -> tuple[FiniteStep, Trial]:
    """A step and its trial from sampled responses, as `EntropyBonus` makes them."""
    responses, prompts, picked = sampled(n_prompts, 4, generator)

    def at(theta: Tensor) -> Scores:
        return scores_at(theta, (prompts, picked), responses)

    before, now = at(THETA), at(THETA + step)
    c = PER_TOKEN.coefficients(before)
    x_terms = (
        c.on_entropy[..., None] * J.entropy[prompts, picked] + c.on_log_prob[..., None] * J.log_prob[prompts, picked]
    )
    halves = responses.halves()
    bonus, entropy = [], []
    for half in halves:
        share = responses.share[half]
        token_sum = (share[:, None] * J.entropy[prompts, picked][half].sum(1)).sum(0)
        bonus.append(token_sum / (share * responses.length[half]).sum())
        entropy.append(x_terms[half].sum((0, 1)) / share.sum())
    change = functools.partial(change_by_finite_step, before, objective=PER_TOKEN)
    found = change(now)
    assert found.change.delta is not None
    wanted, _ = wanted_effects(found.change.delta, found.change.se)
    size = wanted / abs(float(bonus[0] @ bonus[1]) or 1.0)
    log_prob, h = now.log_prob.clone(), now.entropy.clone()
    slopes = []
    for half, d, x in zip(halves, reversed(bonus), reversed(entropy), strict=True):
        there = at(THETA + step + size * d)
        log_prob[half], h[half] = there.log_prob[half], there.entropy[half]
        slopes.append((at(THETA + step + 1e-4 * x).entropy - now.entropy) / 1e-4)
    return found, Trial(size, change(Scores(log_prob, h, responses)), without_each_prompt(slopes, halves, responses))


@functools.cache
def found(n_prompts: int, times: float) -> list[CoefficientToHold]:
    generator = torch.Generator().manual_seed(5)
    drawn = (forecast(n_prompts, generator, times * STEP) for _ in range(200))
    return [coefficient_to_hold(step, trial, present=0.0) for step, trial in drawn]


@pytest.mark.parametrize(("n_prompts", "times"), [(16, 1.0), (64, 0.3), (64, 10.0)])
def test_intervals_hold_the_exact_coefficient_at_any_step(n_prompts: int, times: float) -> None:
    c = exact(times * STEP)
    held = [
        (f.low if f.low is not None else -math.inf) <= c <= (f.high if f.high is not None else math.inf)
        for f in found(n_prompts, times)
    ]
    assert sum(held) / len(held) > 0.95 - 3 * math.sqrt(0.05 * 0.95 / len(held))


def test_the_bonus_s_effect_is_not_too_large() -> None:
    """∇H̄ and ∇R of the same prompts would give 1.47 of it, by the noise that they have in common."""
    slopes = torch.tensor([f.change_per_unit for f in found(16, 1.0)], dtype=torch.float64)
    truth = float(GRADIENT @ BONUS)
    assert float(slopes.mean()) == pytest.approx(truth, abs=4 * float(slopes.std()) / math.sqrt(len(slopes)))


def test_the_effect_s_standard_error_is_its_scatter() -> None:
    """Without the scatter of the bonus's own gradient, it would be 0.54 of it."""
    slopes = torch.tensor([f.change_per_unit for f in found(64, 0.3)], dtype=torch.float64)
    errors = torch.tensor([f.change_per_unit_se for f in found(64, 0.3)], dtype=torch.float64)
    assert float(errors.square().mean().sqrt() / slopes.std()) == pytest.approx(1.0, abs=0.2)


def test_most_coefficients_are_resolved_with_64_prompts() -> None:
    statuses = [f.status for f in found(64, 0.3)]
    assert statuses.count("resolved") > 190
    assert {f.status for f in found(16, 1.0)} >= {"resolved", "lower_bound", "unresolved"}


def test_the_present_coefficient_is_added() -> None:
    step, trial = forecast(64, torch.Generator().manual_seed(2))
    alone, beside = (coefficient_to_hold(step, trial, present=c) for c in (0.0, 0.25))
    assert alone.value is not None
    assert (beside.value, beside.low, beside.high) == pytest.approx(
        (0.25 + alone.value, 0.25 + (alone.low or 0.0), 0.25 + (alone.high or 0.0))
    )
    assert beside.for_change(0.0) == beside.value
    assert alone.change_per_unit is not None
    assert alone.for_change(0.01) == pytest.approx(alone.value + 0.01 / alone.change_per_unit)


def test_a_step_that_raises_the_entropy_has_a_negative_coefficient() -> None:
    step, trial = forecast(800, torch.Generator().manual_seed(2), -STEP)
    hold = coefficient_to_hold(step, trial, present=0.0)
    assert hold.high is not None
    assert hold.high < 0
    assert str(hold).startswith("entropy coefficient to hold: −")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((-0.02, 1e-4), (0.02, 0.02)),  # as much as the step
        ((0.02, 0.03), (-0.06, -0.02)),  # seen above the scatter
        ((0.0, None), (1e-5, 1e-5)),  # something, where the step changes nothing
    ],
)
def test_a_trial_is_as_large_as_the_step(arguments: tuple[float, float | None], expected: tuple[float, float]) -> None:
    assert wanted_effects(*arguments) == pytest.approx(expected)


def test_a_trial_that_the_responses_do_not_represent_gives_none() -> None:
    step, trial = forecast(64, torch.Generator().manual_seed(2))
    change = dataclasses.replace(trial.change, support=Support(0.1, 0.51, 2))
    hold = coefficient_to_hold(step, dataclasses.replace(trial, change=change), present=0.0)
    assert (hold.value, hold.reason[:56]) == (None, "with a bonus, the evaluation responses do not represent ")


def test_scores_that_are_not_finite_have_a_reason() -> None:
    step, trial = forecast(16, torch.Generator().manual_seed(2))
    hold = coefficient_to_hold(step, Trial(trial.size, None, trial.without_each), present=0.1)
    assert (hold.value, hold.status, hold.present) == (None, "unresolved", 0.1)
    assert "not finite" in hold.reason
