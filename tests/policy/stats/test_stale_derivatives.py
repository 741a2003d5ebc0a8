"""Derivatives of the entropy from responses of another policy, weighted by their prefixes; beside exact ones."""

from __future__ import annotations

import math

import pytest
import torch

from sonde.policy.stats.entropy_change import EntropyChange, EntropyObjective, change_per_token
from sonde.policy.stats.entropy_gradient import Responses, along_tokens, per_token_coefficients
from sonde.policy.stats.importance import change_by_finite_step, fixed_prefix_change, prefix_weights
from tests import tiny_policy as tiny
from tests.policy.stats.tiny_batches import D_H, D_S, DIRECTION, THETA, H, J, S, sampled, scores_at, uniform_log_prob

OLD = THETA + 0.25 * torch.randn(tiny.DIM, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
"""Parameters of some steps ago."""
S_OLD = tiny.tokens(OLD)[0]


@pytest.mark.parametrize("has_baseline", [False, True])
def test_all_responses_once_to_each_prompt_give_the_exact_gradient(has_baseline: bool) -> None:
    """As a policy samples that gives each of them the same probability."""
    prompts, picked = torch.arange(tiny.N_PROMPTS).repeat_interleave(15), torch.arange(15).repeat(tiny.N_PROMPTS)
    at, responses = (prompts, picked), Responses(tiny.MASK[picked], prompts)
    weights = prefix_weights(S[at], uniform_log_prob()[picked], responses)
    c = per_token_coefficients(H[at], responses, has_baseline=has_baseline, prefix_weights=weights)
    terms = c.on_entropy[..., None] * J.entropy[at] + c.on_log_prob[..., None] * J.log_prob[at]
    found = terms.sum((0, 1)) / tiny.N_PROMPTS
    torch.testing.assert_close(found, tiny.gradient(tiny.rate, THETA), rtol=1e-10, atol=1e-12)


def test_intervals_hold_the_exact_derivative_of_the_policy_as_it_is() -> None:
    """600 batches tell 95 % to ± 1.8 %, two standard errors. Without weights, the mean would be 34 % too small."""
    generator = torch.Generator().manual_seed(1)
    exact = float(tiny.gradient(tiny.rate, THETA) @ DIRECTION)
    held, errors, variances = 0, [], []
    for _ in range(600):
        responses, prompts, picked = sampled(48, 4, generator, tiny.probabilities(OLD))
        at = (prompts, picked)
        weights = prefix_weights(S[at], S_OLD[at], responses)
        change = change_per_token(H[at], responses, along_tokens(D_H[at], D_S[at], responses), prefix_weights=weights)
        held += change.low <= exact <= change.high
        errors.append(change.delta - exact)
        variances.append(change.v_x)
    assert 0.93 <= held / 600 <= 0.97
    scatter = float(torch.tensor(errors).std())
    assert math.sqrt(sum(variances) / 600) == pytest.approx(scatter, rel=0.1)
    assert abs(sum(errors) / 600) < 3 * scatter / math.sqrt(600) + abs(exact) / 48


def test_the_standard_error_is_that_of_leaving_out_each_prompt() -> None:
    """Along a direction that changes the length most, where all terms of the influence count."""
    longer = tiny.gradient(lambda theta: (tiny.probabilities(theta) * tiny.LENGTH).sum(), THETA)
    responses, prompts, picked = sampled(200, 4, torch.Generator().manual_seed(3), tiny.probabilities(OLD))

    def change(rows: torch.Tensor) -> EntropyChange:
        at, kept = (prompts[rows], picked[rows]), Responses(responses.mask[rows], responses.index[rows])
        along = along_tokens((J.entropy @ longer)[at], (J.log_prob @ longer)[at], kept)
        return change_per_token(H[at], kept, along, prefix_weights=prefix_weights(S[at], S_OLD[at], kept))

    without_each = [change((responses.index != n).nonzero()[:, 0]).delta for n in range(200)]
    jackknife = torch.tensor(without_each).std(correction=0) * math.sqrt(199)
    assert change(torch.arange(800)).se == pytest.approx(float(jackknife), rel=0.01)


def test_a_tiny_finite_step_has_the_same_change_to_all_digits() -> None:
    """From the same responses and without the baseline, which finite steps do not have."""
    responses, prompts, picked = sampled(20, 4, torch.Generator().manual_seed(2), tiny.probabilities(OLD))
    at, small = (prompts, picked), 1e-6
    weights = prefix_weights(S[at], S_OLD[at], responses)
    c = per_token_coefficients(H[at], responses, has_baseline=False, prefix_weights=weights)
    [shares] = along_tokens(D_H[at], D_S[at], responses)([c])
    before, after = (scores_at(theta, at, responses) for theta in (THETA, THETA + small * DIRECTION))
    step = change_by_finite_step(before, after, EntropyObjective("per_token"), reference=S_OLD[at])
    assert step.change.delta / small == pytest.approx(float(shares.mean()), rel=1e-4)


def test_the_change_at_the_same_prefixes_has_the_weights_too() -> None:
    """A step so small that first order is exact."""
    responses, prompts, picked = sampled(20, 4, torch.Generator().manual_seed(2), tiny.probabilities(OLD))
    at, small = (prompts, picked), 1e-5
    weights = prefix_weights(S[at], S_OLD[at], responses)
    change = change_per_token(H[at], responses, along_tokens(D_H[at], D_S[at], responses), prefix_weights=weights)
    before, after = (scores_at(theta, at, responses) for theta in (THETA, THETA + small * DIRECTION))
    assert fixed_prefix_change(before, after, weights) / small == pytest.approx(change.sharpening, rel=1e-3)
    unweighted = fixed_prefix_change(before, after) / small
    assert unweighted != pytest.approx(change.sharpening, rel=1e-2)
