"""The probe of a policy's entropy beside torch's own distributions, alone and on ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sonde.policy.policy_entropy import PolicyEntropyProbe
from sonde.policy.scoring.token_statistics import CausalLMStatistics
from tests.ranks import Ranks
from tests.small_policy import drawn, policy


@pytest.mark.shows("policy entropy", "one process")
def test_entropy_is_that_of_the_policys_own_distributions() -> None:
    model = policy()
    model.train()
    rollouts = drawn(model, 0, 20, seed=1)
    probe = PolicyEntropyProbe(model)
    assert probe.metrics() == {}
    measured = probe.measure(rollouts)
    logits = model(rollouts.inputs["input_ids"])[:, 1:-1].detach().double()
    h = torch.distributions.Categorical(logits=logits).entropy()[rollouts.mask]
    assert measured.token_weighted == pytest.approx(float(h.mean()), rel=1e-6)
    assert measured.n_prompts == 20
    correlation = measured.advantage_correlation
    assert correlation is not None
    assert -1 < correlation.low < correlation.r < correlation.high < 1  # type: ignore[operator]
    metrics = probe.metrics()
    assert metrics["entropy/update_token_weighted"] == measured.token_weighted
    assert metrics["length/update_mean"] == pytest.approx(float(rollouts.mask.sum(1).float().mean()))
    assert model.training


def measured_on_rank(n_all: int) -> tuple[float, float, int]:
    """Each rank has other prompts; the first rank has more."""
    model = policy()
    rank = dist.get_rank()
    first, n = (0, n_all - 3) if rank == 0 else (n_all - 3, 3)
    everything = drawn(model, 0, n_all, seed=1)
    own = (everything.prompt >= first) & (everything.prompt < first + n)
    probe = PolicyEntropyProbe(DistributedDataParallel(model), micro_batch_prompts=2)
    measured = probe.measure(everything.rows(own.nonzero()[:, 0]))
    assert measured.advantage_correlation is not None
    return measured.sequence_weighted, measured.advantage_correlation.r, measured.n_prompts


@pytest.mark.shows("policy entropy", "DDP")
def test_uneven_ranks_agree_with_one_process(ranks2: Ranks) -> None:
    first, second = ranks2(measured_on_rank, 12)
    assert first == second
    model = policy()
    alone = PolicyEntropyProbe(model).measure(drawn(model, 0, 12, seed=1))
    assert alone.advantage_correlation is not None
    assert first[0] == pytest.approx(alone.sequence_weighted, rel=1e-6)
    assert first[1] == pytest.approx(alone.advantage_correlation.r, rel=1e-4)
    assert first[2] == 12


def test_without_advantages_there_is_no_correlation() -> None:
    model = policy()
    rollouts = drawn(model, 0, 4, seed=1)
    probe = PolicyEntropyProbe(model)
    probe.measure(type(rollouts)(rollouts.inputs, rollouts.mask, rollouts.prompt))
    assert probe.metrics()["entropy/update_advantage_correlation"] is None


def test_bad_input() -> None:
    model = policy()
    with pytest.raises(ValueError, match="micro_batch_prompts must be"):
        PolicyEntropyProbe(model, micro_batch_prompts=0)


def test_a_policy_that_has_diverged_is_named() -> None:
    model = policy()
    with torch.no_grad():
        model.out.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="the policy's scores are not finite: has the training diverged"):
        PolicyEntropyProbe(model, token_statistics=CausalLMStatistics()).measure(drawn(policy(), 0, 4, seed=1))
