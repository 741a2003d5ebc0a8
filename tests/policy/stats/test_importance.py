"""The change of entropy by scores before and after a step, beside the exact change of an enumerable policy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sonde.policy.stats.entropy_change import EntropyObjective
from sonde.policy.stats.entropy_gradient import Responses, WeightedSums
from sonde.policy.stats.importance import (
    change_by_finite_step,
    effective_number,
    fixed_prefix_change,
    importance_sampled_change,
    rate_change,
    resampled_change,
)
from sonde.stats.intervals import student_t_quantile
from tests import tiny_policy as tiny
from tests.policy.stats.tiny_batches import DIRECTION, THETA, Scores, sampled, scores_at, uniform_log_prob

PER_TOKEN = EntropyObjective("per_token")


def weighted(weights: Tensor) -> Callable[[Tensor], Any]:
    return lambda theta: tiny.weighted_entropy(theta, weights)


OBJECTIVES: dict[str, tuple[EntropyObjective, Callable[[Tensor], Any]]] = {
    "per token": (PER_TOKEN, tiny.rate),
    "one": (EntropyObjective("sequence"), weighted(tiny.MASK.double())),
    "length": (EntropyObjective("sequence", "length"), weighted(tiny.MASK / tiny.LENGTH[:, None])),
}
"""Each entropy, with its exact value."""


def exact(objective: str, after: Tensor) -> float:
    of = OBJECTIVES[objective][1]
    return float(of(after)) - float(of(THETA))


@pytest.mark.parametrize("times", [0, 1, 10, 100])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("estimate", [change_by_finite_step, importance_sampled_change])
def test_all_responses_give_the_exact_change(estimate: Callable[..., Any], objective: str, times: int) -> None:
    """Each response once to each prompt, as a policy samples them that finds all equally likely; at any step size."""
    rows = itertools.product(range(tiny.N_PROMPTS), range(15))
    prompt, picked = (torch.tensor(t) for t in zip(*rows, strict=True))
    numbers = torch.arange(tiny.N_PROMPTS * 15)
    responses, after = Responses(tiny.MASK[picked], numbers), THETA + 0.01 * times * DIRECTION
    before, now = (scores_at(theta, (prompt, picked), responses) for theta in (THETA, after))
    found = estimate(before, now, OBJECTIVES[objective][0], reference=uniform_log_prob()[picked])
    change = found.change if estimate is change_by_finite_step else found
    assert change.delta == pytest.approx(exact(objective, after), rel=1e-10, abs=1e-14)
    if estimate is change_by_finite_step:
        assert float(change.per_prompt.mean()) == pytest.approx(change.delta, rel=1e-10, abs=1e-14)


def finite(before: Scores, after: Scores, objective: EntropyObjective, **_: Any) -> Any:
    return change_by_finite_step(before, after, objective).change


def whole(before: Scores, after: Scores, objective: EntropyObjective, **_: Any) -> Any:
    return importance_sampled_change(before, after, objective)


def clipped(before: Scores, after: Scores, objective: EntropyObjective, **_: Any) -> Any:
    """No weight comes near 10 times the mean here, so clipping changes nothing."""
    return importance_sampled_change(before, after, objective, clip_at=10.0)


def fresh(before: Scores, after: Scores, objective: EntropyObjective, *, theta: Tensor, at: Any, draw: Any) -> Any:
    picked = torch.multinomial(tiny.probabilities(theta)[at[0]], 1, generator=draw)[:, 0]
    responses = Responses(tiny.MASK[picked], before.responses.prompts[before.responses.index])
    return resampled_change(before, scores_at(theta, (at[0], picked), responses), objective)


@pytest.mark.parametrize(
    ("estimate", "objective", "times"),
    [
        *((finite, objective, times) for objective in ("per token", "one", "length") for times in (1, 100)),
        *((whole, objective, 20) for objective in ("per token", "one")),
        (clipped, "per token", 20),
        (fresh, "per token", 20),
    ],
)
def test_intervals_hold_the_exact_change_in_95_percent(
    estimate: Callable[..., Any], objective: str, times: int
) -> None:
    """400 batches: 95 % have a standard error of 1.1 %. Where support falls, intervals are too wide."""
    after, draw = THETA + 0.01 * times * DIRECTION, torch.Generator().manual_seed(times)
    true, found = exact(objective, after), []
    for _ in range(400):
        responses, prompts, picked = sampled(32 if estimate is finite else 64, 4, draw)
        at = (prompts, picked)
        before, now = (scores_at(theta, at, responses) for theta in (THETA, after))
        found.append(estimate(before, now, OBJECTIVES[objective][0], theta=after, at=at, draw=draw))
    half = [f.high - f.delta if estimate is finite else 2.0 * f.se for f in found]
    held = sum(abs(f.delta - true) < h for f, h in zip(found, half, strict=True)) / len(found)
    assert 0.92 < held < (0.98 if times < 100 else 0.995)
    errors = torch.tensor([f.delta - true for f in found])
    assert math.sqrt(sum(f.se**2 for f in found) / 400) / float(errors.std()) == pytest.approx(1.0, abs=0.15)
    # A ratio over 32 prompts has a bias of about 1/32 of its scatter.
    assert abs(float(errors.mean())) < 4 * float(errors.std()) / 400**0.5 + 0.1 * float(errors.std())


def test_other_prompts_cannot_be_compared_and_no_step_changes_nothing_at_the_same_prefixes() -> None:
    responses, *at = sampled(4, 4, torch.Generator().manual_seed(0))
    others = Responses(responses.mask, torch.arange(4).repeat_interleave(4) + 1)
    before, other = (scores_at(THETA, tuple(at), of) for of in (responses, others))
    with pytest.raises(ValueError, match="must answer the same prompts"):
        resampled_change(before, other, PER_TOKEN)
    assert fixed_prefix_change(before, before) == 0.0
    found = importance_sampled_change(before, before, PER_TOKEN)
    assert (found.se, found.ess_fraction) == (0.0, pytest.approx(1.0))


def test_few_different_responses_leave_an_interval_that_holds() -> None:
    """A step that turns one response in 50 into one of more entropy. Two of 96 differ on average, one sample in seven
    has none. By the scatter of the prompts alone, the interval of such a sample has no width.
    """
    generator = torch.Generator().manual_seed(0)
    before, held, scatter_held, n_differ = Responses(torch.ones(96, 1), torch.arange(24).repeat_interleave(4)), 0, 0, 0
    for _ in range(400):
        entropy = 1.0 + 0.3 * torch.randn(96, 1, generator=generator, dtype=torch.float64)
        jumps = torch.rand(96, 1, generator=generator) < 0.02
        after = torch.where(jumps, 1.0 + 0.3, entropy)
        made = (Scores(-entropy, h, before) for h in (entropy, after))
        change = resampled_change(*made, PER_TOKEN)
        held += abs(change.delta - 0.02 * 0.3) < 1.96 * change.se
        per_prompt = (after - entropy).view(24, 4).mean(1)
        scatter_held += abs(change.delta - 0.02 * 0.3) < 1.96 * float(per_prompt.std()) / 24**0.5
        n_differ += int((after != entropy).sum())
    assert 1.5 < n_differ / 400 < 2.5
    assert held / 400 > 0.93
    assert scatter_held / 400 < 0.87


# Changes of a ratio of means, beside a loop that leaves out one prompt after the other.


def sums(seed: int, n: int = 7, columns: int = 2) -> WeightedSums:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(n, columns, generator=generator, dtype=torch.float64) + 0.1
    return WeightedSums(weight * torch.randn(n, columns, generator=generator, dtype=torch.float64), weight)


@pytest.mark.parametrize("columns", [1, 3])
def test_the_standard_error_is_that_of_a_loop_over_the_prompts(columns: int) -> None:
    before, after = sums(1, columns=columns), sums(2, columns=columns)

    def rate(of: WeightedSums, kept: list[int]) -> float:
        return sum(
            float(sum(of.value[i, k] for i in kept) / sum(of.weight[i, k] for i in kept)) for k in range(columns)
        )

    everyone = list(range(7))
    without = [[i for i in everyone if i != left] for left in everyone]
    changes = [rate(after, kept) - rate(before, kept) for kept in without]
    mean = sum(changes) / 7
    found = rate_change(before, after)
    assert found.delta == pytest.approx(rate(after, everyone) - rate(before, everyone))
    assert found.se == pytest.approx(math.sqrt(6 / 7 * sum((c - mean) ** 2 for c in changes)))
    assert float(found.per_prompt.mean()) == pytest.approx(found.delta)


def test_a_common_factor_of_a_columns_weights_changes_nothing() -> None:
    before, after = sums(1), sums(2)
    factor = torch.tensor([1e-30, 1e30], dtype=torch.float64)
    scaled = rate_change(before, WeightedSums(after.value * factor, after.weight * factor))
    plain = rate_change(before, after)
    assert (scaled.delta, scaled.se) == (pytest.approx(plain.delta), pytest.approx(plain.se))
    assert scaled.n_effective == pytest.approx(plain.n_effective)


def test_degrees_of_freedom_are_those_of_the_prompts_that_carry_the_weight() -> None:
    weight = torch.tensor([[1.0]] * 3 + [[0.0]] * 9, dtype=torch.float64)
    found = rate_change(sums(1, 12, 1), WeightedSums(weight * torch.randn(12, 1), weight))
    assert (found.n_effective, found.degrees_of_freedom) == (pytest.approx(3.0), pytest.approx(2.0))
    one = torch.tensor([[1.0]] + [[0.0]] * 11, dtype=torch.float64)
    alone = rate_change(sums(1, 12, 1), WeightedSums(one, one))
    assert (alone.se, alone.degrees_of_freedom) == (None, 1.0)  # without this prompt there is no rate


def test_the_interval_takes_them() -> None:
    """Two of six prompts become so unlikely that they do not count."""
    responses = Responses(torch.ones(6, 2), torch.arange(6))
    before = Scores(torch.full((6, 2), -1.0), torch.tensor([[1.0, 2.0]] * 6), responses)
    log_prob = before.log_prob.clone()
    log_prob[:2, 0] = -60.0
    entropy = before.entropy + 0.1 * torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    found = change_by_finite_step(before, Scores(log_prob, entropy, responses), PER_TOKEN)
    # The first token always counts: weights of 1, 1, 2, 2, 2 and 2.
    assert found.degrees_of_freedom == pytest.approx(10.0**2 / (1 + 1 + 4 * 4) - 1)
    half = student_t_quantile(0.975, effective_number(found.without_each)) * found.change.se
    assert found.change.high - found.change.delta == pytest.approx(half / math.sqrt(found.support.ess_fraction))
    assert 0.8 < found.support.ess_fraction < 1.0


def test_prompts_that_make_the_scatter_count_by_its_fourth_powers() -> None:
    normal = torch.randn(3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert effective_number(normal) == pytest.approx(1000, rel=0.15)
    assert effective_number(torch.tensor([1.0, -1.0, 1.0, -1.0])) == pytest.approx(4.0)
    assert effective_number(torch.tensor([100.0, 1.0, -1.0, 0.0, 0.0])) == pytest.approx(1.5, abs=0.1)
    assert effective_number(torch.zeros(4)) == 1.0
