"""Reinforcement learning: do prompts × completions count, and does reuse of samples raise the critical batch?

Policies answer sums of two digits (`evidence.sums`) until their exact expected reward reaches a target. The unit is a
rollout: one completion. With N rollouts a step, they need 1 + N/N_crit times the fewest rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import sonde
from evidence.sums import Batch, Optimizer, Sums, Weights, prompt_noise, sampled, training
from evidence.work import Arguments, Study

Reward = Literal["digits", "exact"]
"""The share of right digits, or 1 for a right answer alone."""
GROUPS = (2, 4, 8, 16)
REUSES = (1, 2, 4, 8)
BATCHES = (32, 64, 128, 256, 512, 1024)
"""Rollouts of a step."""
N_RATES = 9
"""That are tried, each √2 times smaller than the one before."""
LAST = 1.5
"""Trainings go on for so many times the steps after which some rate has brought half of its seeds to the target."""


@dataclass(frozen=True)
class Setting:
    """What one pair of reward and optimizer needs.

    Attributes:
        target: expected reward at which a training ends.
        rate: the largest that is tried, for the largest batch; for others it goes with the batch's root.
        good: a good one for 128 rollouts, at which noise is measured.
    """

    target: float
    rate: float
    good: float


SETTINGS: Mapping[tuple[Reward, Optimizer], Setting] = {
    ("digits", "sgd"): Setting(0.7, 32.0, 4.0),
    ("digits", "adam"): Setting(0.7, 0.4, 0.035),
    ("exact", "sgd"): Setting(0.3, 64.0, 4.0),
    ("exact", "adam"): Setting(0.3, 0.8, 0.05),
}


def task_of(reward: Reward) -> Sums:
    """The sums, with this reward."""
    return Sums(exact_match=reward == "exact")


def sweep(
    reward: Reward, optimizer: Optimizer, rollouts: int, group: int, reuse: int, *, seeds: int = 32, most: int = 2000
) -> Mapping[str, Any]:
    """Train with one batch size at all rates, with all seeds.

    Args:
        reward: of an answer.
        optimizer: plain SGD, or Adam with torch's defaults.
        rollouts: of a batch, which is sampled anew for each step.
        group: completions of each prompt.
        reuse: updates of the weights in each step.
        seeds: trainings at each rate.
        most: steps after which trainings are given up.

    Returns:
        The rates, and the steps to the target: [rates, seeds], None where it was not reached.
    """
    task, setting = task_of(reward), SETTINGS[reward, optimizer]
    rates = [setting.rate * math.sqrt(rollouts / BATCHES[-1]) / 2 ** (k / 2) for k in range(N_RATES)]
    batch = Batch(rollouts // group, group, reuse)
    start = {name: torch.cat([w] * N_RATES) for name, w in task.start(seeds, seed=1).items()}
    of_runs = torch.tensor(rates).repeat_interleave(seeds)
    steps = torch.full((N_RATES, seeds), math.inf)
    before, end = torch.zeros(N_RATES, seeds), most
    for step, (_, rewards) in enumerate(training(task, batch, optimizer, of_runs, start, seed=2)):
        now = rewards.view_as(steps)
        # Between steps, the reward is taken to rise by a straight line.
        at = step - (now - setting.target) / (now - before).clamp(min=1e-9)
        steps = torch.where(steps.isinf() & (now >= setting.target), at, steps)
        before = now
        if end == most and bool((steps.isfinite().float().mean(1) >= 0.5).any()):
            end = min(most, math.ceil(LAST * step))
        if step >= end:
            break
    return {"rates": rates, "steps": [[s if math.isfinite(s) else None for s in row] for row in steps.tolist()]}


class Policy(nn.Module):
    """One policy, as sonde measures it.

    Args:
        task: that it answers.
        weights: its tensors, [1, …].
    """

    def __init__(self, task: Sums, weights: Weights) -> None:
        super().__init__()
        self.task = task
        self.weights = nn.ParameterDict({name: w.detach().clone() for name, w in weights.items()})


def scores(policy: nn.Module, rollouts: sonde.Rollouts) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the digits: [responses, 2]."""
    assert isinstance(policy, Policy)
    table = policy.task.log_digits(dict(policy.weights.items()))[0]
    prompt, answer = rollouts.inputs["prompt"], rollouts.inputs["answer"]
    first, second = answer // policy.task.base, answer % policy.task.base
    log_p = torch.stack([table[prompt, -1], table[prompt, first]], 1)
    taken = log_p.gather(2, torch.stack([first, second], 1)[..., None])[..., 0]
    return taken, -(log_p.exp() * log_p).sum(2)


def measured(task: Sums, weights: Weights, batch: Batch, n_windows: int, seed: int) -> sonde.PromptNoiseReading:
    """What sonde says of one policy, after some batches of its rollouts."""
    policy, generator = Policy(task, weights), torch.Generator().manual_seed(seed)
    probe = sonde.PromptNoiseProbe(policy, token_statistics=scores)
    with torch.no_grad():
        table = task.log_digits(weights)
    for _ in range(n_windows):
        prompt, answer, advantage = (part[0] for part in sampled(task, table, batch, generator))
        inputs = {"prompt": prompt.repeat_interleave(batch.group), "answer": answer.flatten()}
        numbers = torch.arange(batch.prompts).repeat_interleave(batch.group)
        probe.measure(sonde.Rollouts(inputs, torch.ones(batch.rollouts, 2), numbers, advantage=advantage.flatten()))
    return probe.reading()


def noise(
    reward: Reward, optimizer: Optimizer, *, seeds: int = 8, points: int = 13, windows: int = 20, most: int = 2000
) -> Mapping[str, Any]:
    """The exact noise along trainings with 16 prompts × 8 completions, and what sonde says of it along one of them.

    Args:
        reward: of an answer.
        optimizer: as for `sweep`.
        seeds: trainings; the first half of them that reach the target are looked at.
        points: evenly spaced in the steps of each until it reaches the target.
        windows: that sonde measures at every third point of the first training.
        most: steps after which trainings end.

    Returns:
        Of each training, the four parts of the noise at its points. Of the first, sonde's
        readings: the point, the group, B_simple in prompts with its interval, and the completions' share.
    """
    task, setting = task_of(reward), SETTINGS[reward, optimizer]
    path: list[Weights] = []
    reached = torch.full((seeds,), math.inf)
    of_runs = torch.full((seeds,), setting.good)
    for weights, rewards in training(task, Batch(16, 8), optimizer, of_runs, task.start(seeds, seed=1), seed=3):
        reached = torch.where(reached.isinf() & (rewards >= setting.target), float(len(path)), reached)
        path.append({name: w.detach().clone() for name, w in weights.items()})
        if len(path) > most or int(reached.isfinite().sum()) >= seeds / 2:
            break
    trainings, readings = [], []
    for seed in reached.isfinite().nonzero().flatten().tolist():
        steps = sorted({int(reached[seed]) * k // (points - 1) for k in range(points)})
        at = [{name: w[seed : seed + 1] for name, w in path[step].items()} for step in steps]
        trainings.append([asdict(prompt_noise(task, weights)) for weights in at])
        if len(trainings) == 1:
            readings = [
                {"point": k, "group": group} | _brief(measured(task, at[k], Batch(32, group), windows, seed=4))
                for k in range(0, len(at), 3)
                for group in GROUPS
            ]
    return {"trainings": trainings, "readings": readings}


def _brief(reading: sonde.PromptNoiseReading) -> dict[str, Any]:
    kept = ("b_simple", "low", "high", "completions_share", "completions_share_low", "completions_share_high")
    return {name: getattr(reading, name) for name in kept}


def pieces_of_sweep(smoke: bool) -> Sequence[Arguments]:
    """All batches with each size of the group, without reuse, and with each reuse, in groups of 8."""
    if smoke:
        return [
            {"reward": "digits", "optimizer": "adam", "rollouts": 16, "group": 8, "reuse": 2, "seeds": 2, "most": 3}
        ]
    cuts = [(group, 1) for group in GROUPS] + [(8, reuse) for reuse in REUSES[1:]]
    return [
        {"reward": reward, "optimizer": optimizer, "rollouts": rollouts, "group": group, "reuse": reuse}
        for reward, optimizer in SETTINGS
        for group, reuse in cuts
        for rollouts in BATCHES
    ]


def pieces_of_noise(smoke: bool) -> Sequence[Arguments]:
    """One for each reward and optimizer."""
    tiny = {"seeds": 2, "points": 2, "windows": 2, "most": 2} if smoke else {}
    settings = [*SETTINGS][:1] if smoke else [*SETTINGS]
    return [{"reward": reward, "optimizer": optimizer} | tiny for reward, optimizer in settings]


SWEEP = Study("rl", pieces_of_sweep, sweep)
NOISE = Study("rl-noise", pieces_of_noise, noise)
