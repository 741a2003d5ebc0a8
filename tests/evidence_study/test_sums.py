"""The policies of the reinforcement-learning study: their exact rewards and noise, against enumeration and sampling."""

from __future__ import annotations

import itertools

import pytest
import torch
from evidence.sums import Batch, Sums, Weights, credits, objective, prompt_noise, sampled, training
from torch import Tensor

SMALL = Sums(base=2, width=3)
"""4 prompts with 4 answers each: all groups of three can be listed."""


def policy(task: Sums, seed: int = 5) -> Weights:
    """One policy that is far from uniform, in float64."""
    return {name: 2.0 * w.double() for name, w in task.start(1, seed).items()}


def flat_gradient(value: Tensor, weights: Weights) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(weights.values()), retain_graph=True)])


@pytest.mark.parametrize(
    ("base", "prompt", "answer", "digits", "exact"),
    [
        (6, 6 * 5 + 4, 6 * 1 + 3, 1.0, 1.0),
        (6, 6 * 5 + 4, 6 * 1 + 2, 0.5, 0.0),
        (10, 99, 18, 1.0, 1.0),
        (10, 99, 81, 0, 0),
    ],
)
def test_a_reward_is_that_of_the_sum_written_in_the_base(
    base: int, prompt: int, answer: int, digits: float, exact: float
) -> None:
    assert Sums(base).rewards[prompt, answer] == digits
    assert Sums(base, exact_match=True).rewards[prompt, answer] == exact


def test_answers_are_as_likely_as_their_digits_one_after_the_other() -> None:
    task, weights = Sums(), policy(Sums())
    table = task.log_digits(weights)
    a, b, first, second = 4, 2, 3, 5
    by_hand = 0.0
    for previous, digit in ((task.base, first), (first, second)):
        hidden = torch.tanh(weights["left"][0, a] + weights["right"][0, b] + weights["previous"][0, previous])
        by_hand += (hidden @ weights["out"][0]).log_softmax(0)[digit]
    assert task.log_answers(table)[0, 6 * a + b, 6 * first + second] == pytest.approx(float(by_hand), rel=1e-12)
    torch.testing.assert_close(task.log_answers(table).exp().sum(2), torch.ones(1, 36).double())


@pytest.mark.parametrize("exact_match", [False, True])
@pytest.mark.parametrize("group", [2, 3])
def test_noise_of_a_prompt_is_that_of_all_groups_of_answers(group: int, exact_match: bool) -> None:
    """Each prompt and each group of answers, weighed by its probability, gives the mean and variance in float64."""
    task = Sums(SMALL.base, exact_match, SMALL.width)
    weights = {name: w.requires_grad_() for name, w in policy(task).items()}
    log_p, rewards = task.log_answers(task.log_digits(weights))[0], task.rewards
    score = [[flat_gradient(log_p[q, y], weights) for y in range(4)] for q in range(4)]
    mean, square = torch.zeros(len(score[0][0])).double(), 0.0
    for q, answers in itertools.product(range(4), itertools.product(range(4), repeat=group)):
        chance = float(log_p[q, list(answers)].detach().sum().exp()) / 4
        r = rewards[q, list(answers)]
        others = (r.sum() - r) / (group - 1)
        gradient = sum((r[k] - others[k]) * score[q][y] for k, y in enumerate(answers)) / group
        mean, square = mean + chance * gradient, square + chance * float(gradient.square().sum())
    noise = prompt_noise(task, weights)
    assert noise.grad_sq == pytest.approx(float(mean.square().sum()), rel=1e-9)
    assert noise.between + noise.within(group) == pytest.approx(square - float(mean.square().sum()), rel=1e-9)
    assert noise.b_simple(group) == pytest.approx(square / noise.grad_sq - 1, rel=1e-9)


def test_the_true_gradient_is_that_of_the_expected_reward() -> None:
    task = Sums()
    weights = {name: w.requires_grad_() for name, w in policy(task).items()}
    gradient = flat_gradient(task.expected_reward(task.log_digits(weights)).sum(), weights)
    assert prompt_noise(task, weights).grad_sq == pytest.approx(float(gradient.square().sum()), rel=1e-9)


def test_large_groups_leave_the_noise_of_prompts() -> None:
    noise = prompt_noise(Sums(), policy(Sums()))
    assert noise.within(10_000) == pytest.approx(noise.one / 10_000, rel=1e-3)
    assert noise.completions_share(2) > noise.completions_share(16) > 0


def test_gradients_of_a_batch_are_those_of_its_rollouts() -> None:
    """The table of credits gives the gradient of a loop over rollouts, of each policy by itself."""
    task, batch = Sums(), Batch(prompts=3, group=4)
    weights = {name: w.double().requires_grad_() for name, w in task.start(2, seed=1).items()}
    table = task.log_digits(weights)
    rollouts = sampled(task, table.detach(), batch, torch.Generator().manual_seed(0))
    found = flat_gradient(objective(table, table.detach(), credits(task, table, rollouts), clip=0.2), weights)
    log_p, loop = task.log_answers(table), torch.zeros(())
    for run, k, i in itertools.product(range(2), range(3), range(4)):
        q, y = int(rollouts.prompt[run, k]), rollouts.answer[run, k]
        r = task.rewards[q, y]
        loop = loop + (r[i] - (r.sum() - r[i]) / 3) * log_p[run, q, y[i]] / batch.rollouts
    torch.testing.assert_close(found, flat_gradient(loop, weights), rtol=1e-9, atol=1e-12)


def test_the_clip_is_that_of_ppo() -> None:
    task = Sums()
    old, new = (task.log_digits(policy(task, seed)) for seed in (1, 2))
    rollouts = sampled(task, old, Batch(8, 4), torch.Generator().manual_seed(0))
    n, by_hand = task.base, 0.0
    for q, y, a in zip(
        rollouts.prompt.repeat_interleave(4), rollouts.answer.flatten(), rollouts.advantage.flatten(), strict=True
    ):
        for previous, digit in ((n, y // n), (y // n, y % n)):
            ratio = float((new[0, q, previous, digit] - old[0, q, previous, digit]).exp())
            by_hand += min(ratio * float(a), min(max(ratio, 0.8), 1.2) * float(a)) / 32
    assert float(objective(new, old, credits(task, old, rollouts), 0.2)) == pytest.approx(by_hand, rel=1e-9)


def test_rollouts_come_as_often_as_they_are_likely() -> None:
    task, n = SMALL, 40_000
    table = task.log_digits(policy(task))
    rollouts = sampled(task, table, Batch(n, 2), torch.Generator().manual_seed(0))
    counts = torch.zeros(4, 4).double()
    counts.index_put_((rollouts.prompt[0, :, None].expand(-1, 2), rollouts.answer[0]), torch.tensor(1.0).double(), True)
    expected = task.log_answers(table)[0].exp() / 4
    scatter = (expected * (1 - expected) / (2 * n)).sqrt()
    assert ((counts / (2 * n) - expected).abs() < 7 * scatter).all()  # completions of a prompt share it: up to √2 wider


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_each_policy_is_trained_as_if_it_were_alone(optimizer: str) -> None:
    """Rates of runs are theirs: torch's own optimizer at that rate makes the same steps."""
    task, batch = Sums(), Batch(4, 4, reuse=2)
    start = {name: w.double() for name, w in task.start(2, seed=1).items()}
    rates = torch.tensor([0.3, 0.01]).double()
    path = training(task, batch, optimizer, rates, start, seed=2)
    seen = [{name: w.detach().clone() for name, w in next(path)[0].items()} for _ in range(3)]
    generator = torch.Generator().manual_seed(2)
    weights = {name: w.clone().requires_grad_() for name, w in start.items()}
    kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
    of_each = [
        {name: w[run : run + 1].detach().clone().requires_grad_() for name, w in weights.items()} for run in range(2)
    ]
    steppers = [kind(w.values(), lr=float(rate)) for w, rate in zip(of_each, rates, strict=True)]
    for step in range(2):
        both = {name: torch.cat([w[name] for w in of_each]).detach() for name in start}
        for name in start:
            torch.testing.assert_close(both[name], seen[step][name], rtol=1e-9, atol=1e-12)
        old = task.log_digits(both)
        credit = credits(task, old, sampled(task, old, batch, generator))
        for _ in range(2):
            for run, (own, stepper) in enumerate(zip(of_each, steppers, strict=True)):
                stepper.zero_grad()
                mine = slice(run, run + 1)
                (-objective(task.log_digits(own), old[mine], credit[:, mine], 0.2)).backward()
                stepper.step()
    for name in start:
        torch.testing.assert_close(torch.cat([w[name] for w in of_each]).detach(), seen[2][name], rtol=1e-9, atol=1e-12)
