"""The measured change of entropy beside the exact change of an enumerable policy."""

from __future__ import annotations

import pytest
import torch

from sonde.policy.stats.entropy_gradient import Responses
from sonde.policy.stats.importance import (
    MeasuredChange,
    fixed_prefix_change,
    importance_sampled_change,
    resampled_change,
)
from tests import tiny_policy as tiny
from tests.policy.stats.tiny_batches import DIRECTION, THETA, H, S, sampled

AFTER = THETA + 0.2 * DIRECTION
S_AFTER, H_AFTER = tiny.tokens(AFTER)
EXACT = float(tiny.rate(AFTER) - tiny.rate(THETA))


def measured(n_prompts: int, generator: torch.Generator, **options: str) -> MeasuredChange:
    responses, prompts, picked = sampled(n_prompts, 4, generator)
    at = (prompts, picked)
    return importance_sampled_change(H[at], H_AFTER[at], S[at], S_AFTER[at], responses, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("weighting", ["snis", "clip"])
def test_importance_sampling_gives_the_exact_change_within_its_standard_error(weighting: str) -> None:
    generator = torch.Generator().manual_seed(0)
    results = [measured(64, generator, weighting=weighting) for _ in range(1000)]
    # No weight comes near 10 times the mean here, so clipping changes nothing.
    z = [(m.delta - EXACT) / m.se for m in results]
    assert abs(sum(z) / len(z)) < 0.25  # a ratio over 64 prompts has a bias of about 1/64 of its scatter
    assert sum(abs(v) < 2.0 for v in z) / len(z) == pytest.approx(0.95, abs=0.025)
    assert 0.3 < results[0].ess_fraction < 1.0
    assert results[0].ess == pytest.approx(256 * results[0].ess_fraction)


def test_responses_in_proportion_to_their_probability_give_the_exact_change() -> None:
    """Each response comes as often as expected in 100,000 draws for a prompt."""
    counts = (tiny.probabilities(THETA) * 100_000).round().long()
    prompts = [p for p in range(tiny.N_PROMPTS) for i in range(15) for _ in range(int(counts[p, i]))]
    picked = [i for p in range(tiny.N_PROMPTS) for i in range(15) for _ in range(int(counts[p, i]))]
    responses, at = Responses(tiny.MASK[picked], torch.tensor(prompts)), (prompts, picked)
    change = importance_sampled_change(H[at], H_AFTER[at], S[at], S_AFTER[at], responses)
    assert change.delta == pytest.approx(EXACT, rel=2e-3)  # counts are rounded to 1e-5 each


def test_no_update_is_no_change() -> None:
    responses, prompts, picked = sampled(8, 4, torch.Generator().manual_seed(1))
    at = (prompts, picked)
    change = importance_sampled_change(H[at], H[at], S[at], S[at], responses)
    assert (change.delta, change.se, change.ess_fraction) == (0.0, 0.0, pytest.approx(1.0))
    assert fixed_prefix_change(H[at], H[at], responses) == 0.0


@pytest.mark.parametrize("weighting", ["snis", "clip"])
def test_the_entropy_of_sequences_after_the_update(weighting: str) -> None:
    """H = E[−S], which importance sampling estimates from the log-probabilities alone."""
    ones = torch.ones(len(tiny.RESPONSES), tiny.LONGEST, dtype=torch.float64)
    exact = float(tiny.weighted_entropy(AFTER, ones) - tiny.weighted_entropy(THETA, ones))
    generator = torch.Generator().manual_seed(0)
    z = []
    for _ in range(600):
        responses, prompts, picked = sampled(64, 4, generator)
        at = (prompts, picked)
        result = importance_sampled_change(
            -S[at],
            -S_AFTER[at],
            S[at],
            S_AFTER[at],
            responses,
            weighting=weighting,
            per="response",  # type: ignore[arg-type]
        )
        z.append((result.delta - exact) / result.se)
    assert abs(sum(z) / len(z)) < 0.3
    assert sum(abs(v) < 2.0 for v in z) / len(z) == pytest.approx(0.95, abs=0.03)


def drawn_after(prompts: list[int], generator: torch.Generator) -> list[int]:
    p = tiny.probabilities(AFTER)[prompts]
    return torch.multinomial(p, 1, generator=generator)[:, 0].tolist()  # type: ignore[no-any-return]


def test_fresh_responses_to_the_same_prompts() -> None:
    generator = torch.Generator().manual_seed(0)
    z = []
    for _ in range(600):
        responses, prompts, picked = sampled(64, 4, generator)
        after = drawn_after(prompts, generator)
        responses_after = Responses(tiny.MASK[after], torch.arange(64).repeat_interleave(4))
        result = resampled_change(H[prompts, picked], responses, H_AFTER[prompts, after], responses_after)
        z.append((result.delta - EXACT) / result.se)
    assert abs(sum(z) / len(z)) < 0.2
    assert sum(abs(v) < 2.0 for v in z) / len(z) == pytest.approx(0.95, abs=0.03)


def test_other_prompts_cannot_be_compared() -> None:
    responses, prompts, picked = sampled(4, 4, torch.Generator().manual_seed(0))
    others = Responses(responses.mask, torch.arange(4).repeat_interleave(4) + 1)
    with pytest.raises(ValueError, match="must answer the same prompts"):
        resampled_change(H[prompts, picked], responses, H[prompts, picked], others)


def test_few_different_responses_leave_an_interval_that_holds() -> None:
    """A step that turns one response in 50 into one of more entropy. Two of 96 differ on average, one sample in seven
    has none. By the scatter of the prompts alone, the interval of such a sample has no width.
    """
    generator = torch.Generator().manual_seed(0)
    before, held, scatter_held, n_differ = Responses(torch.ones(96, 1), torch.arange(24).repeat_interleave(4)), 0, 0, []
    for _ in range(400):
        entropy = 1.0 + 0.3 * torch.randn(96, 1, generator=generator, dtype=torch.float64)
        jumps = torch.rand(96, 1, generator=generator) < 0.02
        after = torch.where(jumps, 1.0 + 0.3, entropy)
        n = int((after != entropy).sum())
        change = resampled_change(entropy, before, after, before, n_differ=n)
        assert change.n_differ == n
        held += abs(change.delta - 0.02 * 0.3) < 1.96 * change.se
        per_prompt = (after - entropy).view(24, 4).mean(1)
        scatter_held += abs(change.delta - 0.02 * 0.3) < 1.96 * float(per_prompt.std()) / 24**0.5
        n_differ.append(n)
    assert 1.5 < sum(n_differ) / 400 < 2.5
    assert held / 400 > 0.93
    assert scatter_held / 400 < 0.87
    assert str(change).endswith(f"({n} of 96 responses differ)")
