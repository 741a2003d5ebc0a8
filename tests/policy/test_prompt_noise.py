"""The noise scale in prompts beside gradients of single prompts, alone and on ranks."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sonde.policy.prompt_noise import PromptNoiseProbe, PromptNoiseReading
from sonde.policy.scoring.rollouts import Rollouts
from tests.ranks import Ranks
from tests.small_policy import STATISTICS, SmallPolicy, drawn, loss, policy


def row_gradients(model: SmallPolicy, rollouts: Rollouts) -> Tensor:
    """Gradients of each completion's Σ credit·s; [completions, parameters], fp64."""
    twin, gradients = copy.deepcopy(model).double(), []
    for i in range(len(rollouts)):
        row = rollouts.rows(torch.tensor([i]))
        s, _ = STATISTICS(twin, row)
        grads = torch.autograd.grad((row.credit() * s).sum(), list(twin.parameters()))
        gradients.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(gradients)


def by_hand(model: SmallPolicy, rollouts: Rollouts) -> tuple[float, float, float]:
    """tr Σ, |G|² and the completions' part, for groups of 4 with equal weights."""
    rows = row_gradients(model, rollouts).view(-1, 4, sum(p.numel() for p in model.parameters()))
    n = len(rows)
    h = rows.sum(1)
    small, big = float((n * h).square().sum(1).mean()), float(h.sum(0).square().sum())
    trace_cov = (small - big) / (1 - 1 / n)
    within = float((n * (rows[:, ::2].sum(1) - rows[:, 1::2].sum(1))).square().sum(1).mean())
    return trace_cov, small - trace_cov, within


def assert_same(reading: PromptNoiseReading, expected: tuple[float, float, float], n_prompts: int) -> None:
    assert reading.trace_cov == pytest.approx(expected[0], rel=1e-4)
    assert reading.grad_sq == pytest.approx(expected[1], rel=1e-3, abs=1e-4 * expected[0])
    assert reading.completions_share == pytest.approx(expected[2] / expected[0], rel=1e-4)
    assert (reading.prompts_per_window, reading.windows) == (n_prompts, 1)


@pytest.mark.shows("prompts", "one process")
def test_one_window_agrees_with_gradients_of_single_completions() -> None:
    model = policy()
    model.train()
    rollouts = drawn(model, 0, 8, seed=1)
    loss(model, rollouts).backward()
    grads = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in grads if g is not None]
    probe = PromptNoiseProbe(model)
    assert probe.metrics() == {}
    reading = probe.measure(rollouts)
    assert_same(reading, by_hand(model, rollouts), 8)
    assert (reading.status, reading.b_simple) == ("unresolved", None)
    assert "too few windows for an interval" in reading.reason
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(g, c) for g, c in zip(grads, copies, strict=True))  # type: ignore[arg-type]
    assert model.training
    assert probe.metrics()["gns_prompts/trace_cov"] == reading.trace_cov


def test_many_windows_resolve_the_noise_scale_and_more_completions_reduce_their_part() -> None:
    model = policy()
    readings = []
    for n_each in (4, 16):
        probe = PromptNoiseProbe(model)
        for k in range(25):
            probe.measure(drawn(model, 40 * k, 8, seed=k, n_each=n_each))
        readings.append(probe.reading())
    few, many = readings
    for reading in readings:
        assert reading.status == "resolved", reading.reason
        assert reading.completions_share is not None
        assert reading.trace_cov is not None
        assert 0.05 < reading.completions_share < 1.2
    # Sums over groups: a prompt's gradient grows with its completions, and its variance with the square of that.
    from_few, from_many = (r.completions_share * r.trace_cov for r in (few, many))  # type: ignore[operator]
    assert from_many / 16 < from_few / 2  # per completion's share of the group, in the same unit


def on_rank() -> PromptNoiseReading:
    model = policy()
    everything = drawn(model, 0, 8, seed=1)
    own = everything.prompt < 5 if dist.get_rank() == 0 else everything.prompt >= 5
    return PromptNoiseProbe(DistributedDataParallel(model)).measure(everything.rows(own.nonzero()[:, 0]))


@pytest.mark.shows("prompts", "DDP")
def test_uneven_ranks_agree_with_one_process(ranks2: Ranks) -> None:
    first, second = ranks2(on_rank)
    assert first == second
    model = policy()
    assert_same(first, by_hand(model, drawn(model, 0, 8, seed=1)), 8)


def test_single_completions_with_weights_by_tokens() -> None:
    model = policy()
    rollouts = drawn(model, 0, 6, seed=1, n_each=1)
    rollouts = dataclasses.replace(rollouts, advantage=torch.linspace(-1, 1, 6))
    reading = PromptNoiseProbe(model, weighs="tokens").measure(rollouts)
    assert reading.completions_share is None
    h, w = row_gradients(model, rollouts), rollouts.mask.sum(1).double()
    a = w / w.sum()
    small, big = float((h.square().sum(1) / a).sum()), float(h.sum(0).square().sum())
    assert reading.trace_cov == pytest.approx((small - big) / float(1 - a.square().sum()), rel=1e-4)


def test_bad_input() -> None:
    model = policy()
    with pytest.raises(ValueError, match="weighs must be 'completions' or 'tokens', got 'rows'"):
        PromptNoiseProbe(model, weighs="rows")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass advantage= to Rollouts"):
        PromptNoiseProbe(model).measure(dataclasses.replace(drawn(model, 0, 4, seed=1), advantage=None))
    with pytest.raises(ValueError, match="need at least 2 prompts"):
        PromptNoiseProbe(model).measure(drawn(model, 0, 1, seed=1))
