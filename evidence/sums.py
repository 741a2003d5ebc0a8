"""Policies that answer sums of two digits. All answers can be listed: rewards, gradients and noise are exact."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import jacrev

Weights = dict[str, Tensor]
"""Of many policies: each tensor is [runs, …]."""
Optimizer = Literal["sgd", "adam"]


@dataclass(frozen=True)
class Sums:
    """Each prompt is a sum of two digits. An answer is two digits, of which the second is sampled after the first.

    Many policies, the runs, are trained side by side in the same tensors. They do not touch each other.

    Attributes:
        base: of the digits: there are base² prompts and as many answers.
        exact_match: whether the reward is 1 for a right answer alone, instead of the share of right digits.
        width: hidden units of a policy.
    """

    base: int = 6
    exact_match: bool = False
    width: int = 32

    @property
    def n_prompts(self) -> int:
        """Prompts, each as likely as the others."""
        return self.base**2

    @cached_property
    def rewards(self) -> Tensor:
        """Of each answer to each prompt: [prompts, answers]."""
        digits = torch.arange(self.base)
        total = (digits[:, None] + digits).flatten()
        first, second = (total // self.base)[:, None] == digits, (total % self.base)[:, None] == digits
        both = torch.stack(torch.broadcast_tensors(first[:, :, None], second[:, None, :])).flatten(2).double()
        return both.prod(0) if self.exact_match else both.mean(0)

    def start(self, n_runs: int, seed: int) -> Weights:
        """New policies, which answer nearly at random."""
        generator = torch.Generator().manual_seed(seed)
        n, w = self.base, self.width
        shapes = {"left": (n, w), "right": (n, w), "previous": (n + 1, w), "out": (w, n)}
        drawn = {name: torch.randn(n_runs, *shape, generator=generator) for name, shape in shapes.items()}
        return drawn | {"out": 0.3 * drawn["out"] / math.sqrt(w)}

    def log_digits(self, weights: Weights) -> Tensor:
        """Log-probabilities of a digit after each prompt and each first digit; last after none.

        Returns:
            [runs, prompts, base + 1, base].
        """
        left, right, previous = (weights[name] for name in ("left", "right", "previous"))
        hidden = torch.tanh(left[:, :, None, None] + right[:, None, :, None] + previous[:, None, None])
        return (hidden @ weights["out"][:, None, None]).log_softmax(-1).flatten(1, 2)

    def log_answers(self, log_digits: Tensor) -> Tensor:
        """Log-probabilities of all answers: [runs, prompts, answers]."""
        return (log_digits[:, :, -1, :, None] + log_digits[:, :, :-1]).flatten(2)

    def expected_reward(self, log_digits: Tensor) -> Tensor:
        """The mean over prompts, exactly: [runs]."""
        return (self.log_answers(log_digits).exp() * self.rewards.to(log_digits)).sum(2).mean(1)


@dataclass(frozen=True)
class Batch:
    """One optimizer's batch of rollouts, and what is done with it.

    Attributes:
        prompts: drawn at random, with replacement.
        group: completions of each.
        reuse: optimizer steps on the same rollouts.
        clip: of the ratio of probabilities, as in PPO.
    """

    prompts: int
    group: int
    reuse: int = 1
    clip: float = 0.2

    @property
    def rollouts(self) -> int:
        """Completions of the batch."""
        return self.prompts * self.group


class Rollouts(NamedTuple):
    """Answers that policies gave, and what they are worth.

    Attributes:
        prompt: numbers of prompts, [runs, prompts of the batch].
        answer: numbers of answers, first digit × base + second, [runs, prompts of the batch, group].
        advantage: the reward less the mean reward of the group's other answers, so that a prompt's gradient has the
            true one as its mean at any size of the group. It is not divided by a standard deviation (Dr. GRPO).
    """

    prompt: Tensor
    answer: Tensor
    advantage: Tensor


def sampled(task: Sums, log_digits: Tensor, batch: Batch, generator: torch.Generator) -> Rollouts:
    """A new batch of rollouts of each policy."""
    n_runs = len(log_digits)
    prompt = torch.randint(task.n_prompts, (n_runs, batch.prompts), generator=generator)
    up_to = task.log_answers(log_digits).exp().cumsum(-1)
    up_to = up_to.gather(1, prompt[..., None].expand(-1, -1, up_to.shape[2]))
    u = torch.rand(n_runs, batch.prompts, batch.group, generator=generator, dtype=up_to.dtype)
    answer = torch.searchsorted(up_to, u).clamp_(max=up_to.shape[2] - 1)
    reward = task.rewards.to(u)[prompt[..., None], answer]
    advantage = (reward - reward.mean(2, keepdim=True)) * (batch.group / (batch.group - 1))
    return Rollouts(prompt, answer, advantage)


def credits(task: Sums, log_digits: Tensor, rollouts: Rollouts) -> Tensor:
    """The advantages over their number, added up for each digit that was sampled: what the loss needs of the rollouts.

    Returns:
        Positive and negative ones apart: [2, runs, prompts, base + 1, base].
    """
    n = task.base
    advantage = rollouts.advantage / rollouts.advantage[0].numel()
    # Each digit's place in `log_digits`: the first digit follows none, the second follows the first.
    row, first, second = rollouts.prompt[..., None] * (n + 1), rollouts.answer // n, rollouts.answer % n
    places = [((row + n) * n + first).flatten(1), ((row + first) * n + second).flatten(1)]
    found = torch.zeros(2, *log_digits.shape, dtype=log_digits.dtype)
    for into, part in zip(found, (advantage.clamp(min=0), advantage.clamp(max=0)), strict=True):
        for place in places:
            into.view(len(into), -1).scatter_add_(1, place, part.flatten(1))
    return found


def objective(log_digits: Tensor, sampled_at: Tensor, credit: Tensor, clip: float) -> Tensor:
    """PPO's clipped objective, summed over runs: min(ρA, clip(ρ)A) is min(ρ, 1 + ε)A for A > 0, else max(ρ, 1 − ε)A."""
    ratio = (log_digits - sampled_at).exp()
    return (ratio.clamp(max=1 + clip) * credit[0] + ratio.clamp(min=1 - clip) * credit[1]).sum()


def training(
    task: Sums, batch: Batch, optimizer: Optimizer, rates: Tensor, weights: Weights, seed: int
) -> Iterator[tuple[Weights, Tensor]]:
    """Train all policies, each at its own rate; `rates` is [runs].

    Yields:
        Before each batch of rollouts: the weights as they are, and the expected rewards, [runs].
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
    kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
    # The steps of both are proportional to the rate, which nothing else depends on: each run's is scaled afterwards.
    stepper = kind(weights.values(), lr=1.0)
    while True:
        with torch.no_grad():
            sampled_at = task.log_digits(weights)
        yield weights, task.expected_reward(sampled_at)
        with torch.no_grad():
            credit = credits(task, sampled_at, sampled(task, sampled_at, batch, generator))
        for _ in range(batch.reuse):
            (-objective(task.log_digits(weights), sampled_at, credit, batch.clip)).backward()
            before = [w.detach().clone() for w in weights.values()]
            stepper.step()
            stepper.zero_grad()
            with torch.no_grad():
                for old, new in zip(before, weights.values(), strict=True):
                    new.copy_(torch.lerp(old, new, rates.to(new).view(-1, *[1] * (new.dim() - 1))))


@dataclass(frozen=True)
class PromptNoise:
    """Mean and variance of the gradient of one prompt and its group, each variance a trace.

    Attributes:
        grad_sq: |G|², of the gradient of the expected reward.
        between: variance of a prompt's expected gradient over prompts.
        one: variance of one completion's gradient given the prompt, with the expected reward as its baseline.
        pair: variance of the gradient of a group of two, given the prompt.
    """

    grad_sq: float
    between: float
    one: float
    pair: float

    def within(self, group: int) -> float:
        """The variance that a group's completions add, nearly `one`/group.

        The gradient of a group, with the mean reward of the others as baseline, is the mean over all pairs of
        ½(r₁ − r₂)(s₁ − s₂), a U-statistic.

        Reference:
            Hoeffding, "A class of statistics with asymptotically normal distribution", Ann. Math. Statist. 19 (1948)
            293–325, equation 5.13.
        """
        return ((group - 2) * self.one + 2 * self.pair) / (group * (group - 1))

    def b_simple(self, group: int) -> float:
        """tr Σ/|G|², in prompts."""
        return (self.between + self.within(group)) / self.grad_sq

    def completions_share(self, group: int) -> float:
        """The part of tr Σ that comes from completions."""
        return self.within(group) / (self.between + self.within(group))


def prompt_noise(task: Sums, weights: Weights) -> PromptNoise:
    """The noise of one policy, whose tensors are [1, …], from all answers to all prompts."""
    one = {name: w.detach().double() for name, w in weights.items()}
    each = jacrev(lambda w: task.log_answers(task.log_digits(w)).flatten())(one)
    n = task.n_prompts
    scores = torch.cat([s.flatten(1) for s in each.values()], 1).view(n, n, -1)  # ∇ log π: [prompts, answers, weights]
    p, r = task.log_answers(task.log_digits(one))[0].exp(), task.rewards

    def mean(x: Tensor) -> Tensor:
        return (p * x).sum(1)

    gradient = ((p * r)[..., None] * scores).sum(1)  # [prompts, weights]
    sq, mu = scores.square().sum(2), mean(r)
    of_one = mean((r - mu[:, None]).square() * sq) - gradient.square().sum(1)
    # E|½(r₁ − r₂)(s₁ − s₂)|² − |E|², written out with E s = 0.
    of_pair = 0.5 * mean(r * r * sq) + 0.5 * mean(r * r) * mean(sq) - mu * mean(r * sq)
    grad_sq = gradient.mean(0).square().sum()
    between = gradient.square().sum(1).mean() - grad_sq
    return PromptNoise(float(grad_sq), float(between), float(of_one.mean()), float(of_pair.mean()))
