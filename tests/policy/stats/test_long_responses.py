"""The finite step on long responses, beside the exact change of a policy with a short memory."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from benchmarks.tiny_policies import Markov, Scores, learn, sampled, statistics

import sonde
from sonde.policy.stats.entropy_change import EntropyObjective
from sonde.policy.stats.importance import FiniteStep, change_by_finite_step

PROMPTS, EACH, N_BATCHES = 24, 4, 100


@torch.no_grad()
def found(before: Markov, after: Markov, made: sonde.Rollouts) -> list[FiniteStep]:
    """The finite step from each batch of prompts."""
    each = []
    for rows in torch.arange(len(made)).split(PROMPTS * EACH):
        batch = made.rows(rows)
        scores = (Scores(*statistics(policy, batch), batch.responses()) for policy in (before, after))
        each.append(change_by_finite_step(*scores, EntropyObjective("per_token")))
    return each


@pytest.mark.parametrize(
    ("longest", "scale", "support"),
    [
        (16, 0.03, (0.9, 1.0)),
        (16, 0.3, (0.2, 0.5)),
        (64, 0.02, (0.8, 1.0)),
        (128, 0.1, (0.1, 0.5)),
        (256, 0.015, (0.6, 0.95)),
    ],
)
def test_intervals_hold_the_exact_change(longest: int, scale: float, support: tuple[float, float]) -> None:
    """95 % of 100 batches have a standard error of 2.2 %. Where support falls, intervals are too wide."""
    before, generator = Markov(3, end_bias=-math.log(longest), longest=longest), torch.Generator().manual_seed(longest)
    after = copy.deepcopy(before)
    with torch.no_grad():
        for p in after.parameters():
            p += scale * torch.randn(*p.shape, generator=generator, dtype=torch.float64)
    exact = after.rate() - before.rate()
    each = found(before, after, sampled(before, N_BATCHES * PROMPTS, generator, EACH))
    held = sum(f.change.low < exact < f.change.high for f in each) / N_BATCHES
    low, high = support
    assert 0.95 - 2.8 * math.sqrt(0.05 * 0.95 / N_BATCHES) < held, held
    assert low < sum(f.support.ess_fraction for f in each) / N_BATCHES <= high
    deltas = torch.tensor([f.change.delta for f in each])
    assert float(deltas.mean()) == pytest.approx(exact, abs=4 * float(deltas.std()) / math.sqrt(N_BATCHES))
    # The jackknife's errors are those of the batches, as long as there is support, and intervals are not far wider.
    if low > 0.5:
        width = sum(f.change.high - f.change.low for f in each) / N_BATCHES
        assert width / 2 < 1.8 * 1.96 * float(deltas.std())
        errors = math.sqrt(sum(f.change.se**2 for f in each) / N_BATCHES)
        assert errors == pytest.approx(float(deltas.std()), rel=0.15)


def test_forecasts_that_call_themselves_valid_hold_where_a_few_prompts_dominate() -> None:
    """After a reward that few prompts can earn. Student's t by the weights alone held 70 of 105 at 15 times a step."""
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    policy = Markov(0, longest=128)
    policy.features.copy_(randn(200, 8))
    for p, scale in ((policy.last, 1.0), (policy.mix, 0.6), (policy.out, 8**-0.5)):
        p.data.copy_(scale * randn(*p.shape))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(4)
    for k in range(11):
        if k:
            optimizer.step()
        optimizer.zero_grad()
        learn(policy, _rewarded(sampled(policy, 32, generator, EACH)))
    before, moments = copy.deepcopy(policy), copy.deepcopy(optimizer.state_dict())
    made = sampled(before, N_BATCHES * PROMPTS, generator, EACH)
    for times, (low, high) in ((15, (0.6, 1.0)), (25, (0.0, 0.1))):
        policy.load_state_dict(before.state_dict())
        optimizer.load_state_dict(copy.deepcopy(moments))
        optimizer.param_groups[0]["lr"] *= times
        optimizer.step()
        exact = policy.rate() - before.rate()
        valid = [f for f in found(before, policy, made) if f.support.is_enough]
        n_held = sum(f.change.low < exact < f.change.high for f in valid)
        assert low <= len(valid) / N_BATCHES <= high, len(valid)
        assert n_held >= 0.85 * len(valid) or len(valid) < 20, (n_held, len(valid))


def _rewarded(made: sonde.Rollouts) -> sonde.Rollouts:
    tokens, prompt = made.inputs["tokens"], made.inputs["prompt"]
    right = (tokens == 0).double() + 0.5 * (tokens == (prompt % 6)[:, None])
    reward = ((right * made.mask).sum(1) / made.mask.sum(1)).view(-1, EACH)
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-3)
    return dataclasses.replace(made, advantage=advantage.flatten())
