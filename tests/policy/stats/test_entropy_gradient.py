"""Gradients of the entropy beside those of a policy whose responses can all be enumerated."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from sonde.policy.stats.entropy_gradient import (
    Coefficients,
    Responses,
    covariance,
    per_token_coefficients,
    weighted_entropy_rate,
)
from tests import tiny_policy as tiny

THETA = tiny.parameters()
S, H = tiny.tokens(THETA)
P = tiny.probabilities(THETA)
J = tiny.jacobians(THETA)


def batch(prompts: list[int], picked: list[int]) -> tuple[Responses, Tensor, Tensor]:
    """Responses as a sampler gives them, one row each."""
    responses = Responses(tiny.MASK[picked], torch.tensor(prompts))
    return responses, S[prompts, picked], H[prompts, picked]


def x_by_prompt(c: Coefficients, responses: Responses, prompts: list[int], picked: list[int]) -> Tensor:
    """X_n of each prompt; [prompts, parameters]."""
    terms = (
        c.on_entropy[..., None] * J.entropy[prompts, picked] + c.on_log_prob[..., None] * J.log_prob[prompts, picked]
    )
    by_prompt = torch.zeros(responses.n_prompts, tiny.DIM, dtype=torch.float64)
    return by_prompt.index_add_(0, torch.tensor(prompts).unique(return_inverse=True)[1], terms.sum(1))


def test_probabilities_of_the_policy_add_up_to_1() -> None:
    assert len(tiny.RESPONSES) == 15
    torch.testing.assert_close(P.sum(1), torch.ones(tiny.N_PROMPTS, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("has_baseline", [False, True])
def test_the_gradient_of_the_rate_is_exact(has_baseline: bool) -> None:
    """All pairs of responses to two prompts, weighted by their probabilities."""
    exact = tiny.gradient(tiny.rate, THETA)
    rate, length = float(tiny.rate(THETA)), tiny.mean_length(THETA)
    mean = torch.zeros(tiny.DIM, dtype=torch.float64)
    n_prompts = 0
    for a, b in [(0, 1), (2, 3), (4, 0), (1, 2), (3, 4)]:  # each prompt twice
        for i, j in itertools.product(range(15), repeat=2):
            responses, _, h = batch([a, b], [i, j])
            c = per_token_coefficients(h, responses, rate=rate, mean_length=length, has_baseline=has_baseline)
            mean += P[a, i] * P[b, j] * x_by_prompt(c, responses, [a, b], [i, j]).sum(0)
        n_prompts += 2
    torch.testing.assert_close(mean / n_prompts, exact, rtol=1e-10, atol=1e-12)


def test_all_prompts_weigh_the_same_in_the_rate_whatever_the_size_of_their_groups() -> None:
    responses, _, h = batch([0, 0, 0, 1], [3, 5, 7, 9])
    by_prompt = [h[:3].sum(1).mean(), h[3].sum()]
    lengths = [tiny.LENGTH[[3, 5, 7]].mean(), tiny.LENGTH[9]]
    rate, _ = weighted_entropy_rate(h, responses, None)
    assert rate == pytest.approx(float(sum(by_prompt) / sum(lengths)), rel=1e-14)


def test_values_outside_the_mask_do_not_matter() -> None:
    responses, _, h = batch([0, 1], [0, 4])  # one token and two tokens
    spoiled = torch.where(tiny.MASK[[0, 4]], h, torch.nan)
    assert weighted_entropy_rate(spoiled, responses, None) == weighted_entropy_rate(h, responses, None)


def test_a_baseline_does_not_depend_on_its_own_prompt() -> None:
    responses, _, h = batch([0, 0, 1, 2], [14, 9, 11, 13])
    baseline = responses.mean_at_position_of_other_prompts(h)
    torch.testing.assert_close(baseline[0], h[2:].mean(0))
    changed = h.clone()
    changed[:2] += 1.0
    torch.testing.assert_close(responses.mean_at_position_of_other_prompts(changed)[:2], baseline[:2])


def test_the_covariance_is_over_tokens() -> None:
    responses, s, _ = batch([0, 1], [0, 14])
    advantage = torch.tensor([1.0, -2.0])
    flat = torch.cat([s[0, :1], s[1]])
    a = torch.tensor([1.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    assert covariance(s, advantage, responses) == pytest.approx(float((flat * a).mean() - flat.mean() * a.mean()))


def rate_of(entropy: torch.Tensor) -> tuple[float, float | None]:
    return weighted_entropy_rate(entropy, Responses(torch.ones(2, 2), torch.zeros(2)), None)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Responses(torch.ones(3), torch.ones(3)), r"mask must be \[responses, tokens\]"),
        (lambda: Responses(torch.ones(3, 2), torch.ones(2)), r"got \(3, 2\) and \(2,\)"),
        (lambda: Responses(torch.tensor([[1, 0], [0, 0]]), torch.zeros(2)), "response 1 has no token"),
        (lambda: rate_of(torch.ones(2, 3)), "the mask's shape"),
        (
            lambda: rate_of(torch.full((2, 2), torch.nan)),
            "entropy must be finite wherever a token was sampled",
        ),
    ],
)
def test_bad_input_is_refused(make: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()  # type: ignore[operator]
