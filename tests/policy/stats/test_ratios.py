"""The change of a ratio of means, beside a loop that leaves out one prompt after the other."""

from __future__ import annotations

import math

import pytest
import torch

from sonde.policy.stats.entropy_change import EntropyObjective
from sonde.policy.stats.entropy_gradient import Responses
from sonde.policy.stats.importance import WeightedSums, change_by_finite_step, effective_number, rate_change
from sonde.stats.intervals import student_t_quantile
from tests.policy.stats.tiny_batches import Scores


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
    found = change_by_finite_step(before, Scores(log_prob, entropy, responses), EntropyObjective("per_token"))
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
