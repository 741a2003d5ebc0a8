"""Prefix weights: their values, their clipping, and the support that they leave to each position."""

from __future__ import annotations

import math

import pytest
import torch

from sonde.policy.stats.entropy_gradient import Responses
from sonde.policy.stats.importance import Support, prefix_log_ratio, support, weights_from


def test_the_ratio_is_that_of_the_responses_own_tokens_before() -> None:
    """A tool's answer in between has no part in it, whatever scores it has."""
    responses = Responses(torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]]), torch.arange(2))
    after = torch.tensor([[-1.0, -2.0, math.nan, -1.0, math.nan], [-1.0] * 5])
    before = torch.tensor([[-1.5, -1.0, 7.0, -3.0, 7.0], [-2.0] * 5])
    ratio = prefix_log_ratio(after, before, responses)
    assert ratio.tolist() == [[0.0, 0.5, -0.5, -0.5, 1.5, 1.5], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]


def test_weights_do_not_overflow() -> None:
    responses = Responses(torch.ones(3, 1), torch.arange(3))
    log_ratio = torch.tensor([[0.0], [900.0], [899.0]], dtype=torch.float64)
    assert weights_from(log_ratio, responses)[:, 0].tolist() == pytest.approx([0.0, 1.0, math.exp(-1)])
    columns = torch.tensor([[0.0, 900.0], [0.0, 899.0], [0.0, 0.0]], dtype=torch.float64)
    assert weights_from(columns, responses, by_column=True)[:, 0].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("clip_at", [10.0, 3.0])
def test_clipped_weights_are_a_multiple_of_the_mean_and_keep_it(clip_at: float) -> None:
    n = 1000
    responses = Responses(torch.ones(n + 1, 2), torch.arange(n + 1))
    log_ratio = torch.zeros(n + 1, 2, dtype=torch.float64)
    log_ratio[-1, 1] = 8.0
    kept, cut = (weights_from(log_ratio, responses, most) for most in (None, clip_at))
    assert float(cut[:, 1].mean()) == pytest.approx(float(kept[:, 1].mean()))
    before_cut = float(kept[-1, 1] / kept[:, 1].mean())
    assert before_cut > 500
    assert float(cut[-1, 1] / cut[0, 1]) == pytest.approx(clip_at * float(kept[:, 1].mean() / kept[0, 1]))
    assert torch.equal(cut[:, 0], kept[:, 0])


def test_each_position_has_a_support_of_its_own() -> None:
    """Four responses. From the second position on, the weights are those of one of them."""
    responses = Responses(torch.ones(4, 3), torch.arange(4))
    weights = torch.tensor([[1.0, 1.0, 1.0], *[[1.0, 0.0, 0.0]] * 3])
    entropy = torch.tensor([[1.0, 2.0, 1.0]] * 4)
    # The first position carries 4 of 7 nats at 4 of 4 responses, the others at 1 of 4.
    found = support(weights, entropy, responses)
    assert found == Support(pytest.approx((4 * 1.0 + 3 * 0.25) / 7), 0.0, None)
    weights = torch.tensor([[1.0, 1.0, 1.0], *[[1.0, 0.0, 0.0]] * 7])
    responses = Responses(torch.ones(8, 3), torch.arange(8))
    found = support(weights, torch.tensor([[1.0, 2.0, 1.0]] * 8), responses)
    assert found == Support(pytest.approx((8 + 3 / 8) / 11), pytest.approx(3 / 11), 1)
    assert found.is_enough


def test_positions_are_counted_without_gaps_and_a_certain_policy_has_support() -> None:
    responses = Responses(torch.tensor([[1, 0, 1], [0, 1, 1]]), torch.arange(2))
    found = support(torch.ones(2, 3), torch.zeros(2, 3), responses)
    assert found == Support(1.0, 0.0, None)
