"""A rank without responses: all ranks raise an error, and none of them waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.policy_entropy import PolicyEntropyProbe
from sonde.policy.prompt_noise import PromptNoiseProbe
from sonde.policy.scoring.rollouts import Rollouts
from tests.ranks import Ranks
from tests.small_policy import drawn, loss, optimizer_of, policy

MEASURES: dict[str, Callable[[nn.Module, torch.optim.Optimizer, Rollouts], Any]] = {
    "entropy": lambda model, _, own: PolicyEntropyProbe(model).measure(own),
    "noise scale in prompts": lambda model, _, own: PromptNoiseProbe(model).measure(own),
    "forecast": lambda model, optimizer, own: EntropyChangeProbe(model, optimizer).forecast(own),
    "sampler": lambda model, optimizer, own: EntropyChangeProbe(model, optimizer, sampler=lambda _: own).step(),
}


def raised_on_rank(name: str) -> list[str]:
    """The errors of a rank, where all responses are on the first one."""
    model = policy()
    optimizer, everything = optimizer_of(model), drawn(model, 0, 4, seed=1)
    loss(model, everything).backward()
    own = everything.rows(torch.arange(len(everything) if dist.get_rank() == 0 else 0))
    try:
        MEASURES[name](DistributedDataParallel(model), optimizer, own)
    except (ValueError, RuntimeError) as error:
        return [type(error).__name__, str(error)]
    return []


@pytest.mark.parametrize("name", MEASURES)
def test_a_rank_without_responses_is_refused_on_all_ranks(ranks2: Ranks, name: str) -> None:
    with_responses, without = ranks2(raised_on_rank, name)
    assert without[0] == "ValueError"
    assert without[1].startswith("a rank has no response, expected at least one on each rank")
    assert with_responses[0] == "RuntimeError"
    assert with_responses[1] == f"rank 1 of the group failed: ValueError: {without[1]}"


def test_no_responses_at_all_are_refused() -> None:
    model = policy()
    optimizer = optimizer_of(model)
    none = drawn(model, 0, 4, seed=1).rows(torch.arange(0))
    for measure in MEASURES.values():
        with pytest.raises(ValueError, match="expected at least one on each rank"):
            measure(model, optimizer, none)
