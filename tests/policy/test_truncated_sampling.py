"""Responses sampled by top-p, top-k or min-p: scored by the truncated policy, beside its exact entropy."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from benchmarks.truncated_policies import Truncated, next_step, sampled, statistics

import sonde
from sonde.contrib.hold_entropy import HoldEntropy
from sonde.policy.policy_entropy import PolicyEntropyProbe
from sonde.policy.prompt_noise import PromptNoiseProbe
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.scorer import Scorer
from sonde.policy.scoring.token_statistics import statistics_of_logits
from tests.policy.entropy_scene import Scene
from tests.small_policy import STATISTICS

WAYS: list[dict[str, Any]] = [{"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.1}]


@pytest.mark.parametrize(
    "how", [*WAYS, {"top_p": 1e-20}, {"top_k": 50}, {"top_k": 9, "top_p": 0.7, "min_p": 0.2}], ids=str
)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_scores_are_those_of_the_samplers_of_transformers(how: dict[str, Any], temperature: float) -> None:
    process = pytest.importorskip("transformers").generation.logits_process
    generator = torch.Generator().manual_seed(0)
    logits = 3.0 * torch.randn(5, 7, 40, generator=generator, dtype=torch.float64)
    logits[0] = logits[0].round()  # tokens that are as likely as others
    tokens = torch.randint(40, (5, 7), generator=generator)
    z = logits.flatten(0, 1) / temperature
    for name, warper in (("top_k", "TopK"), ("top_p", "TopP"), ("min_p", "MinP")):
        if name in how:
            z = getattr(process, f"{warper}LogitsWarper")(how[name])(None, z)
    expected = torch.distributions.Categorical(logits=z.view_as(logits))
    s, h = statistics_of_logits(logits, tokens, temperature=temperature, **how)
    torch.testing.assert_close(h, -(expected.probs * expected.logits.clamp(min=-1e9)).sum(-1))
    torch.testing.assert_close(s, z.log_softmax(-1).view_as(logits).gather(-1, tokens[..., None])[..., 0])
    assert bool(s.isneginf().any()) == (how != {"top_k": 50})


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_intervals_hold_the_exact_change_of_the_truncated_policy(how: dict[str, Any]) -> None:
    """95 % of 160 forecasts have a standard error of 1.7 %."""
    held = n = 0
    for seed in range(4):
        policy, optimizer, after = next_step(seed, how, scale=10.0)
        truth = after.rate(how) - policy.rate(how)
        probe = sonde.EntropyChangeProbe(
            policy, optimizer, sonde.EntropyChangeOptions(micro_batch_prompts=24), token_statistics=statistics
        )
        generator = torch.Generator().manual_seed(seed)
        for _ in range(40):
            forecast = probe.forecast(sampled(policy, 24, generator, how))
            assert forecast.is_valid, forecast.reason
            assert forecast.importance is None
            n, held = n + 1, held + (forecast.low < truth < forecast.high)
    assert held / n > 0.95 - 3 * 0.017, held


def test_the_untruncated_policy_is_another() -> None:
    """Left out of the rollouts, top-p shows in the test of the policy's own responses."""
    how = {"top_p": 0.8}
    policy, optimizer, _ = next_step(0, how, scale=10.0)
    made = sampled(policy, 24, torch.Generator().manual_seed(0), how)
    probe = sonde.EntropyChangeProbe(policy, optimizer, token_statistics=statistics)
    right, wrong = probe.forecast(made), probe.forecast(dataclasses.replace(made, top_p=1.0))
    assert abs(right.own_policy.z) < 4.0
    assert wrong.own_policy.z < -8.0
    assert not wrong.is_valid
    assert wrong.entropy > right.entropy + 0.2


def test_a_token_that_the_step_leaves_out_weighs_nothing_and_one_at_the_edge_before_it_is_unmoved() -> None:
    how = {"top_p": 0.8}
    policy, _, after = next_step(0, how, scale=30.0)
    made = sampled(policy, 24, torch.Generator().manual_seed(0), how)
    taken = made.inputs["tokens"].clone()
    taken[0, 1] = policy.unlikeliest(made, 0, 1)  # as if the sampler had rounded otherwise
    made = dataclasses.replace(made, inputs={**made.inputs, "tokens": taken})
    base = Scorer(policy, statistics, 8, None).scored(made)
    assert base.outside is not None
    assert base.outside.nonzero().tolist() == [[0, 1]]
    assert base.log_prob[0, 1] == -base.entropy[0, 1]
    same = Scorer(policy, statistics, 8, None).scored(made, base)
    assert torch.equal(same.log_prob, base.log_prob)
    now = Scorer(after, statistics, 8, None).scored(made, base)
    assert now.log_prob[0, 1] == base.log_prob[0, 1]
    s, _ = statistics(after, made)
    has_left = made.mask & s.isneginf()
    has_left[0, 1] = False
    assert bool(has_left.any())
    assert float(now.log_prob[has_left].exp().max()) == 0.0
    assert now.is_finite


def test_the_loss_is_scored_without_truncation() -> None:
    """As trainers take log-probabilities: causes and the noise scale in prompts are those of untruncated scores."""
    scene = Scene()
    cut = dataclasses.replace(scene.U, top_p=0.5)

    def noise(update: Rollouts) -> float:
        probe = PromptNoiseProbe(scene.model, token_statistics=STATISTICS)
        return probe.measure(update).trace_cov

    assert noise(cut) == noise(scene.U)
    causes = [scene.probe().forecast(scene.E, update, causes=True).causes for update in (scene.U, cut)]
    assert causes[0] == causes[1]


def test_the_entropy_of_sampled_responses_is_that_of_the_truncated_policy() -> None:
    how = {"min_p": 0.1}
    policy, _, _ = next_step(1, how, scale=1.0)
    made = sampled(policy, 200, torch.Generator().manual_seed(0), how)
    found = PolicyEntropyProbe(policy, token_statistics=statistics).measure(made)
    assert found.token_weighted == pytest.approx(policy.rate(how), abs=4 * found.token_weighted_se)
    assert abs(policy.rate(how) - policy.rate({})) > 10 * found.token_weighted_se


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: dataclasses.replace(e, top_p=0.0), "top_p must be above 0 and at most 1, got 0.0"),
        (lambda e: dataclasses.replace(e, top_p=torch.ones(2)), "top_p must be above 0 and at most 1, got tensor"),
        (lambda e: dataclasses.replace(e, top_k=2.5), "top_k must be a whole number of tokens, got 2.5"),
        (lambda e: dataclasses.replace(e, min_p=1.1), "min_p must be from 0 to 1, got 1.1"),
        (
            lambda e: Scene().probe().forecast(dataclasses.replace(e, top_k=2)),
            "tokens .* are left out by top_k=2",
        ),
        (
            lambda e: Scene().probe().forecast(dataclasses.replace(e, top_p=0.9, log_prob=torch.zeros(e.mask.shape))),
            "evaluation responses have log_prob= and top_p=0.9: another policy left out other tokens",
        ),
        (
            lambda e: Scene().probe().forecast(dataclasses.replace(e, min_p=0.1), causes=True),
            "have min_p=0.1, and causes=True needs derivatives, which do not see tokens that enter or leave",
        ),
        (
            lambda e: Scene().probe(update="gradient").forecast(dataclasses.replace(e, min_p=0.1), e),
            "update='gradient' needs derivatives",
        ),
        (
            lambda e: Scene().probe(beside=HoldEntropy()).forecast(dataclasses.replace(e, min_p=0.1)),
            "beside= needs derivatives",
        ),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(Scene().E)


def test_what_samplers_call_off_is_off() -> None:
    scene = Scene()
    off = dataclasses.replace(scene.E, top_p=None, top_k=-1, min_p=None)
    assert not off.truncation
    assert off.untruncated() is off
    a, b = (scene.probe().forecast(e) for e in (scene.E, off))
    assert (a.delta, a.se, a.low) == (b.delta, b.se, b.low)


def test_a_sample_without_jumps_has_room_for_them() -> None:
    """A step too small for any of the few tokens to enter or leave: the error is at least that of three jumps."""
    how = {"top_p": 0.9}
    policy, optimizer, _ = next_step(0, how, scale=1e-3)
    made = sampled(policy, 24, torch.Generator().manual_seed(0), how)
    forecast = sonde.EntropyChangeProbe(policy, optimizer, token_statistics=statistics).forecast(made)
    assert forecast.se >= math.sqrt(3.0) * math.log(2.0) / float(made.mask.sum())


def test_packed_rows_keep_their_truncation() -> None:
    ids = torch.tensor([5, 6, 7, 2, 5, 6, 2])
    sampled_tokens = torch.tensor([0, 0, 1, 1, 0, 0, 1])
    made = Rollouts.from_packed(
        {"input_ids": ids}, sampled_tokens, torch.tensor([3, 3]), cu_seqlens=torch.tensor([0, 4, 7]), top_k=5, min_p=0.1
    )
    assert made.truncation == {"top_k": 5, "min_p": 0.1}


@torch.no_grad()
def exact_by_enumeration(policy: Truncated, how: dict[str, Any]) -> float:
    """Every response of the policy with two places, one after the other, in float64."""
    short = copy.deepcopy(policy)
    short.longest = 2
    v, end = policy.vocabulary, policy.vocabulary - 1
    total_h = total_t = 0.0
    for prompt in range(policy.n_prompts):
        index = torch.tensor([prompt])
        first = short.next_token(index, torch.zeros(1, 2, dtype=torch.long), 0, how)[0].exp()
        total_h += float(-(first * first.clamp(min=1e-300).log()).sum())
        total_t += 1.0
        for token in range(v):
            if token == end or not float(first[token]):
                continue
            second = short.next_token(index, torch.tensor([[token, 0]]), 1, how)[0].exp()
            total_h += float(first[token]) * float(-(second * second.clamp(min=1e-300).log()).sum())
            total_t += float(first[token])
    return total_h / total_t


@pytest.mark.parametrize("how", [{}, *WAYS], ids=str)
def test_the_exact_entropy_is_that_of_enumeration(how: dict[str, Any]) -> None:
    policy = Truncated(0, longest=2)
    assert policy.rate(how) == pytest.approx(exact_by_enumeration(policy, how), rel=1e-9)
