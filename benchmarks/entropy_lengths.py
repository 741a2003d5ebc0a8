"""Coverage of the finite step's intervals for responses of many tokens, against exact changes."""

from __future__ import annotations

import copy
import statistics as of
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.tiny_policies import Markov, Scores, learn, sampled, statistics
from sonde.policy.stats.entropy_change import EntropyObjective
from sonde.policy.stats.importance import change_by_finite_step, importance_sampled_change

PROMPTS, RESPONSES = 24, 4
"""Of a batch."""


@dataclass(frozen=True)
class Lengths:
    """The size of the measurement.

    Attributes:
        tokens: tokens of the longest responses. They end rarely.
        scales: factors of the optimizer's step.
        batches: forecasts for each length and scale, of new responses each.
        learning_rate: of AdamW.
        trained_for: steps before the one that is measured.
        seeds: of the policy's weights.
    """

    tokens: tuple[int, ...] = (16, 64, 256, 512)
    scales: tuple[float, ...] = (30.0, 10.0, 1.0)
    batches: int = 400
    learning_rate: float = 3e-3
    trained_for: int = 10
    seeds: tuple[int, ...] = (0, 1, 2, 3)


def coverage_by_length(plan: Lengths) -> list[dict[str, Any]]:
    """A row for each length and scale."""
    rows = []
    for tokens in plan.tokens:
        pairs = [_policies(seed, tokens, plan) for seed in plan.seeds]
        for k, scale in enumerate(plan.scales):
            found = [f for before, after in pairs for f in _forecasts(before, after[k], plan.batches // len(pairs))]
            valid = [f["held"] for f in found if f["valid"]]
            rows.append(
                {
                    "tokens": tokens,
                    "scale": scale,
                    "batches": len(found),
                    "truth": of.median(abs(f["truth"]) for f in found),
                    "median_se": of.median(f["se"] for f in found),
                    "support": of.fmean(f["support"] for f in found),
                    "whole": of.fmean(f["whole"] for f in found),
                    "coverage": of.fmean(f["held"] for f in found),
                    "coverage_of_trusted": of.fmean(valid) if valid else None,
                    "trusted": len(valid) / len(found),
                }
            )
    return rows


def _policies(seed: int, tokens: int, plan: Lengths) -> tuple[Markov, list[Markov]]:
    """A policy that has learned a little, and the policy after its next step at each scale."""
    policy, generator = Markov(seed, longest=tokens, end_bias=-9.0), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=plan.learning_rate, weight_decay=0.0)
    for _ in range(plan.trained_for):
        optimizer.zero_grad()
        learn(policy, sampled(policy, 32, generator, RESPONSES))
        optimizer.step()
    optimizer.zero_grad()
    learn(policy, sampled(policy, 32, generator, RESPONSES))
    before = copy.deepcopy(policy)
    optimizer.step()
    after = []
    for scale in plan.scales:
        moved = copy.deepcopy(before)
        with torch.no_grad():
            for p, old, new in zip(moved.parameters(), before.parameters(), policy.parameters(), strict=True):
                p.add_(new - old, alpha=scale)
        after.append(moved)
    return before, after


@torch.no_grad()
def _forecasts(before: Markov, after: Markov, n: int) -> list[dict[str, Any]]:
    truth, generator = after.rate() - before.rate(), torch.Generator().manual_seed(7)
    found = []
    for _ in range(n):
        made = sampled(before, PROMPTS, generator, RESPONSES)
        scores = [Scores(*statistics(p, made), made.responses()) for p in (before, after)]
        step = change_by_finite_step(*scores, EntropyObjective("per_token"))
        low, high = step.change.low, step.change.high
        found.append(
            {
                "truth": truth,
                "held": low is not None and high is not None and low < truth < high,
                "valid": step.support.is_enough,
                "support": step.support.ess_fraction,
                "se": step.change.se or 0.0,
                "whole": importance_sampled_change(*scores, EntropyObjective("per_token")).ess_fraction,
            }
        )
    return found
