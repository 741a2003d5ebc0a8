"""The finite step on long responses, beside the exact change of a policy with a short memory."""

from __future__ import annotations

import math

import pytest
import torch

from sonde.policy.stats.entropy_change import EntropyObjective
from sonde.policy.stats.entropy_gradient import Responses
from sonde.policy.stats.finite_step import FiniteStep, Scores, change_by_finite_step
from tests.markov_policy import N_PROMPTS, MarkovPolicy

PROMPTS, EACH, N_BATCHES = 24, 4, 150


@pytest.mark.parametrize(
    ("longest", "scale", "support"),
    [
        (16, 0.03, (0.9, 1.0)),
        (16, 0.3, (0.2, 0.7)),
        (64, 0.02, (0.8, 1.0)),
        (128, 0.06, (0.1, 0.5)),
        (256, 0.01, (0.8, 1.0)),
        (512, 0.01, (0.6, 0.9)),
    ],
)
def test_intervals_hold_the_exact_change(longest: int, scale: float, support: tuple[float, float]) -> None:
    """95 % of 150 batches have a standard error of 1.8 %. At 0.06, intervals grow."""
    policy = MarkovPolicy(longest)
    after = policy.after(scale)
    exact = policy.rate(after) - policy.rate(policy.theta)
    generator = torch.Generator().manual_seed(longest)
    n = N_BATCHES * PROMPTS
    prompt = torch.randint(N_PROMPTS, (n,), generator=generator).repeat_interleave(EACH)
    tokens, mask = policy.sample(prompt, generator)
    scores = [policy.score(theta, prompt, tokens) for theta in (policy.theta, after)]
    numbers = torch.arange(n).repeat_interleave(EACH)

    def found(rows: slice) -> FiniteStep:
        before, now = (Scores(s[rows], h[rows]) for s, h in scores)
        return change_by_finite_step(before, now, Responses(mask[rows], numbers[rows]), EntropyObjective("per_token"))

    size = PROMPTS * EACH
    each = [found(slice(k * size, (k + 1) * size)) for k in range(N_BATCHES)]
    held = sum(f.change.low < exact < f.change.high for f in each) / N_BATCHES
    assert 0.95 - 2.8 * math.sqrt(0.05 * 0.95 / N_BATCHES) < held, held
    assert held < 0.995, held
    low, high = support
    assert low < sum(f.support.ess_fraction for f in each) / N_BATCHES <= high
    whole = found(slice(None)).change
    assert abs(whole.delta - exact) < 4 * whole.se
    # The jackknife's errors are those of the batches, as long as there is support.
    if low > 0.5:
        ratio = math.sqrt(sum(f.change.se**2 for f in each) / N_BATCHES)
        scatter = float(torch.tensor([f.change.delta for f in each]).std())
        assert ratio == pytest.approx(scatter, rel=0.15)
