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
    policy, after = MarkovPolicy(longest), MarkovPolicy(longest, moved=scale)
    exact = after.rate() - policy.rate()
    generator = torch.Generator().manual_seed(longest)
    prompts = torch.randint(N_PROMPTS, (N_BATCHES, PROMPTS), generator=generator).repeat_interleave(EACH, 1)
    tokens, mask = (t.unflatten(0, prompts.shape) for t in policy.sample(prompts.flatten(), generator))
    index = torch.arange(PROMPTS).repeat_interleave(EACH)

    def found(batch: int) -> FiniteStep:
        before, now = (Scores(*p.score(prompts[batch], tokens[batch])) for p in (policy, after))
        return change_by_finite_step(before, now, Responses(mask[batch], index), EntropyObjective("per_token"))

    each = [found(batch) for batch in range(N_BATCHES)]
    held = sum(f.change.low < exact < f.change.high for f in each) / N_BATCHES
    assert 0.95 - 2.8 * math.sqrt(0.05 * 0.95 / N_BATCHES) < held < 0.995, held
    low, high = support
    assert low < sum(f.support.ess_fraction for f in each) / N_BATCHES <= high
    deltas = torch.tensor([f.change.delta for f in each])
    assert float(deltas.mean()) == pytest.approx(exact, abs=4 * float(deltas.std()) / math.sqrt(N_BATCHES))
    # The jackknife's errors are those of the batches, as long as there is support.
    if low > 0.5:
        errors = math.sqrt(sum(f.change.se**2 for f in each) / N_BATCHES)
        assert errors == pytest.approx(float(deltas.std()), rel=0.15)
