"""What twice the completions and twice the prompts do to the noise, beside windows of each."""

from __future__ import annotations

import pytest
import torch

from sonde.policy.prompt_noise import PromptNoiseProbe
from sonde.policy.scoring.rollouts import Rollouts
from tests.small_policy import SmallPolicy, loss, policy, sample

N_PROMPTS, N_EACH, N_WINDOWS = 8, 8, 120


def drawn(model: SmallPolicy, n_prompts: int, n_each: int, seed: int) -> Rollouts:
    """A window whose prompts are drawn from 25."""
    kinds = torch.randint(25, (n_prompts,), generator=torch.Generator().manual_seed(seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1_000_000 + seed)
        return sample(model, [int(kind) + 25 * i for i, kind in enumerate(kinds)], n_each)


def noise_to_signal(model: SmallPolicy, n_prompts: int, n_each: int) -> float:
    """tr Cov(F)/|E[F]|² of the windows' gradients F, at the same weights."""
    gradients = []
    for seed in range(N_WINDOWS):
        model.zero_grad()
        loss(model, drawn(model, n_prompts, n_each, seed)).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    window = torch.stack(gradients)
    noise = float(window.var(0).sum())
    return noise / (float(window.mean(0).square().sum()) - noise / N_WINDOWS)


def test_the_advice_is_what_runs_with_more_completions_and_with_more_prompts_measure() -> None:
    """The ratio of noise to signal, since advantages that are centred within a group scale both with its size.

    The scatter of the three measured ratios moves their quotients by about 0.04.
    """
    model = policy(dtype=torch.float64)
    probe = PromptNoiseProbe(model)
    for seed in range(60):
        reading = probe.measure(drawn(model, N_PROMPTS, N_EACH, seed))
    now = noise_to_signal(model, N_PROMPTS, N_EACH)
    by_completions = 1 - noise_to_signal(model, N_PROMPTS, 2 * N_EACH) / now
    by_prompts = 1 - noise_to_signal(model, 2 * N_PROMPTS, N_EACH) / now
    assert reading.cut_by_twice_completions == pytest.approx(by_completions, abs=0.1)
    assert by_prompts == pytest.approx(0.5, abs=0.1)
    assert reading.completions_share_low < reading.completions_share < reading.completions_share_high
    assert reading.advice.startswith("twice the completions to each prompt would cut the noise of a step by 4")
    assert reading.advice.endswith("twice the prompts by 50\xa0%, both with twice the tokens")


def test_without_an_interval_there_is_no_advice() -> None:
    model = policy()
    probe = PromptNoiseProbe(model)
    assert probe.reading().advice == ""
    assert probe.measure(drawn(model, 4, 4, 0)).advice == ""
    assert probe.metrics()["gns_prompts/cut_by_twice_completions"] is not None
