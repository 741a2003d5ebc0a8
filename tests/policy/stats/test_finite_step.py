"""The change of entropy by a finite step beside the exact change of an enumerable policy, at any step size."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sonde.policy.stats.entropy_change import EntropyObjective
from sonde.policy.stats.entropy_gradient import Responses
from sonde.policy.stats.finite_step import FiniteStep, Scores, change_by_finite_step
from tests import tiny_policy as tiny
from tests.policy.stats.tiny_batches import DIRECTION, THETA, H, S, sampled, uniform_log_prob

STEP = 0.01 * DIRECTION
PER_TOKEN = EntropyObjective("per_token")


def constant(mask: Tensor, prompt: Tensor) -> Tensor:
    """One over the longest response that there can be, as Dr. GRPO's trainers weigh."""
    return torch.full(mask.shape, 1 / tiny.LONGEST)


def enumerated(groups: list[tuple[int, ...]], theta: Tensor, after: Tensor, objective: EntropyObjective) -> FiniteStep:
    """Every group of responses once to each prompt. A policy that samples them equally often makes the mean exact."""
    rows = [(p, i) for p in range(tiny.N_PROMPTS) for group in groups for i in group]
    prompt, picked = (torch.tensor(t) for t in zip(*rows, strict=True))
    numbers = torch.arange(tiny.N_PROMPTS * len(groups)).repeat_interleave(len(groups[0]))
    at = (prompt, picked)
    (s, h), (s_after, h_after) = tiny.tokens(theta), tiny.tokens(after)
    return change_by_finite_step(
        Scores(s[at], h[at]),
        Scores(s_after[at], h_after[at]),
        Responses(tiny.MASK[picked], numbers),
        objective,
        sampled_log_prob=uniform_log_prob()[picked],
    )


def exact_group_entropy(theta: Tensor) -> float:
    """H_w of pairs of responses, each weighted by one over the longer of the two; exactly."""
    p, s = tiny.probabilities(theta), tiny.tokens(theta)[0].sum(-1)
    total = 0.0
    for i, j in itertools.product(range(len(tiny.RESPONSES)), repeat=2):
        longest = float(max(tiny.LENGTH[i], tiny.LENGTH[j]))
        total -= float((p[:, i] * p[:, j] * (s[:, i] + s[:, j]) / 2 / longest).sum())
    return total / tiny.N_PROMPTS


@pytest.mark.parametrize("times", [1, 10, 100])
def test_all_responses_give_the_exact_change_of_entropy_per_token(times: int) -> None:
    after = THETA + times * STEP
    found = enumerated([(i,) for i in range(15)], THETA, after, PER_TOKEN)
    exact = float(tiny.rate(after) - tiny.rate(THETA))
    assert found.change.delta == pytest.approx(exact, rel=1e-10)
    assert found.change.per_prompt.mean() == pytest.approx(exact, rel=1e-10)


WEIGHTS = {
    "one": ("one", lambda: tiny.MASK.double()),
    "length": ("length", lambda: tiny.MASK / tiny.LENGTH[:, None]),
    "constant": (constant, lambda: tiny.MASK / tiny.LONGEST),
}


@pytest.mark.parametrize("times", [1, 10, 100])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_all_responses_give_the_exact_change_of_the_entropy_of_responses(weights: str, times: int) -> None:
    named, per_token = WEIGHTS[weights]
    after = THETA + times * STEP
    found = enumerated([(i,) for i in range(15)], THETA, after, EntropyObjective("sequence", named))  # type: ignore[arg-type]
    exact = float(tiny.weighted_entropy(after, per_token()) - tiny.weighted_entropy(THETA, per_token()))
    assert found.change.delta == pytest.approx(exact, rel=1e-10)


@pytest.mark.parametrize("times", [1, 10, 100])
def test_all_pairs_give_the_exact_change_where_weights_depend_on_the_group(times: int) -> None:
    after = THETA + times * STEP
    pairs = list(itertools.product(range(15), repeat=2))
    found = enumerated(pairs, THETA, after, EntropyObjective("sequence", "longest"))
    exact = exact_group_entropy(after) - exact_group_entropy(THETA)
    assert found.change.delta == pytest.approx(exact, rel=1e-10)


def drawn(n_prompts: int, after: Tensor, generator: torch.Generator, **options: Any) -> FiniteStep:
    s_after, h_after = tiny.tokens(after)
    responses, prompts, picked = sampled(n_prompts, 4, generator)
    at = (prompts, picked)
    objective = options.pop("objective", PER_TOKEN)
    return change_by_finite_step(
        Scores(S[at], H[at]), Scores(s_after[at], h_after[at]), responses, objective, **options
    )


@pytest.mark.parametrize("times", [1, 10, 100])
@pytest.mark.parametrize("kind", ["per_token", "one", "length"])
def test_intervals_hold_the_exact_change_in_95_percent(kind: str, times: int) -> None:
    """600 batches: 95 % have a standard error of 0.9 %."""
    after = THETA + times * STEP
    objective = PER_TOKEN if kind == "per_token" else EntropyObjective("sequence", kind)  # type: ignore[arg-type]
    exact = float(tiny.rate(after) - tiny.rate(THETA))
    if kind != "per_token":
        w = WEIGHTS[kind][1]()
        exact = float(tiny.weighted_entropy(after, w) - tiny.weighted_entropy(THETA, w))
    generator = torch.Generator().manual_seed(times)
    found = [drawn(32, after, generator, objective=objective).change for _ in range(600)]
    held = sum(f.low < exact < f.high for f in found) / len(found)
    assert 0.925 < held < (0.98 if times < 100 else 0.995)  # where support falls, intervals are too wide
    errors = torch.tensor([f.delta - exact for f in found])
    ratio = math.sqrt(sum(f.se**2 for f in found) / len(found)) / float(errors.std())
    assert ratio == pytest.approx(1.0, abs=0.12)
    assert abs(float(errors.mean())) < 4 * float(errors.std()) / math.sqrt(len(found)) + 0.1 * float(errors.std())
