"""The gradient of the entropy of whole responses beside that of an enumerable policy, for any token weights."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from sonde.policy.stats.entropy_change import sequence_coefficients, token_weights
from sonde.policy.stats.entropy_gradient import Responses
from tests import tiny_policy as tiny
from tests.policy.stats.tiny_batches import THETA, H, J, P, S, sampled


def entropy_of_pairs(theta: Tensor, weights: Any) -> Tensor:
    """H_w of a group of 2 responses, exactly."""
    p, s = tiny.probabilities(theta), tiny.tokens(theta)[0]
    total = torch.zeros((), dtype=torch.float64)
    for i, j in itertools.product(range(15), repeat=2):
        w = token_weights(weights, Responses(tiny.MASK[[i, j]], torch.zeros(2)))
        total = total - (p[:, i] * p[:, j] * ((w[0] * s[:, i]).sum(-1) + (w[1] * s[:, j]).sum(-1)) / 2).sum()
    return total / tiny.N_PROMPTS


def mean_of_x(weights: Any) -> Tensor:
    """E[X] over all pairs of responses to each prompt; a pair is a group."""
    pairs = [(p, i, j) for p in range(tiny.N_PROMPTS) for i, j in itertools.product(range(15), repeat=2)]
    at = ([p for p, _, _ in pairs for _ in range(2)], [y for _, i, j in pairs for y in (i, j)])
    groups = torch.arange(len(pairs)).repeat_interleave(2)
    responses = Responses(tiny.MASK[at[1]], groups)
    chance = torch.stack([P[p, i] * P[p, j] for p, i, j in pairs])[groups]
    c = sequence_coefficients(S[at], H[at], responses, weights)
    terms = c.on_log_prob[..., None] * J.log_prob[at] + c.on_entropy[..., None] * J.entropy[at]
    return (chance[:, None] * terms.sum(1)).sum(0) / tiny.N_PROMPTS


# The baseline by position of other prompts weighs all pairs alike here, and not by their probability. So its part is
# not 0 in the sum of all pairs, unless it is left out.


@pytest.mark.parametrize("weights", ["one", "length"])
def test_the_gradient_is_exact_whatever_the_weights(weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Responses, "mean_at_position_of_other_prompts", lambda self, values: torch.zeros_like(values))
    exact = tiny.gradient(lambda theta: entropy_of_pairs(theta, weights), THETA)
    torch.testing.assert_close(mean_of_x(weights), exact, rtol=1e-11, atol=1e-12)


def test_a_baseline_takes_nothing_from_the_mean() -> None:
    """Batches of independent prompts; a mean of 4,000 batches has a standard error of 1.6 % of their scatter."""
    exact = tiny.gradient(lambda theta: entropy_of_pairs(theta, "one"), THETA)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(4000):
        responses, prompts, picked = sampled(4, 2, generator)
        at = (prompts, picked)
        c = sequence_coefficients(S[at], H[at], responses)
        terms = c.on_log_prob[..., None] * J.log_prob[at] + c.on_entropy[..., None] * J.entropy[at]
        found.append(terms.sum((0, 1)) / 4)
    rows = torch.stack(found)
    z = (rows.mean(0) - exact) / (rows.std(0) / len(rows) ** 0.5)
    assert float(z.abs().max()) < 4.0


@pytest.mark.parametrize("wrong", ["plus", "without the term"])
def test_known_mistakes_give_another_gradient(wrong: str) -> None:
    """The plus sign in circulation, and one over the length without E[∇S_w]."""
    exact = tiny.gradient(lambda theta: entropy_of_pairs(theta, "length"), THETA)
    if wrong == "plus":
        assert float(torch.cosine_similarity(-mean_of_x("length"), exact, dim=0)) == pytest.approx(-1.0, abs=1e-9)
        return
    left_out = (P[..., None, None] * (tiny.MASK / tiny.LENGTH[:, None])[None, :, :, None] * J.log_prob).sum((1, 2))
    without = mean_of_x("length") + left_out.mean(0)
    assert float((without - exact).norm() / exact.norm()) > 0.05


def test_the_entropy_to_go_has_a_fraction_of_the_variance_of_the_log_probability_to_go() -> None:
    """−S in place of Σ H: the same mean, and 5 times the variance, along a direction."""
    direction = torch.randn(tiny.DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    variances = []
    for is_score_function in (False, True):
        generator = torch.Generator().manual_seed(3)
        values = []
        for _ in range(200):
            responses, prompts, picked = sampled(16, 4, generator)
            at = (prompts, picked)
            c = sequence_coefficients(S[at], H[at], responses)
            if is_score_function:  # alone
                total = S[at].sum(1)
                c = type(c)(
                    torch.zeros_like(c.on_entropy),
                    -responses.share[:, None] * (total - responses.leave_one_out(total))[:, None] * responses.mask,
                )
            terms = c.on_log_prob[..., None] * J.log_prob[at] + c.on_entropy[..., None] * J.entropy[at]
            values.append(float(terms.sum((0, 1)) @ direction) / 16)
        variances.append(float(torch.tensor(values).var()))
    assert 4 < variances[1] / variances[0] < 6


def test_one_response_to_a_prompt_is_enough_unless_weights_depend_on_it() -> None:
    alone = Responses(torch.ones(2, 2), torch.arange(2))
    assert sequence_coefficients(-torch.ones(2, 2), torch.ones(2, 2), alone).on_log_prob.isfinite().all()
    with pytest.raises(ValueError, match="at least 2 responses to every prompt"):
        sequence_coefficients(-torch.ones(2, 2), torch.ones(2, 2), alone, "length")
