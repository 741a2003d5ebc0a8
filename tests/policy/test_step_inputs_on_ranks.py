"""What one rank's step begins with counts on all ranks, since they share one forecast."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.rollouts import Rollouts
from tests.policy.entropy_scene import Scene
from tests.policy.step_blocks import BF16, CLIPPED, FP32, scale_gradients, scene_of
from tests.ranks import Ranks
from tests.small_policy import drawn, loss


def probe_on_all(scene: Scene) -> tuple[EntropyChangeProbe, Rollouts]:
    """A probe over all ranks, and this rank's own responses."""
    options = EntropyChangeOptions(coefficient_to_hold=True)
    probe = EntropyChangeProbe(scene.model, scene.optimizer, options, process_group=dist.group.WORLD)
    return probe, drawn(scene.model, 0, 12, seed=dist.get_rank())


def clipped_on(rank: int, dtype: torch.dtype) -> tuple[str, float | None]:
    scene = scene_of("sgd", dtype)
    probe, evaluation = probe_on_all(scene)
    with probe.around_step(evaluation) as around:
        if dist.get_rank() == rank:
            scale_gradients(scene, 0.6)
        scene.optimizer.step()
    hold = around.forecast.coefficient_to_hold
    assert hold is not None
    return hold.reason, around.forecast.rounded_away


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("rank", [0, 1, None])
def test_a_clip_on_one_rank(ranks2: Ranks, rank: int | None, dtype: torch.dtype) -> None:
    for reason, rounded_away in ranks2(clipped_on, -1 if rank is None else rank, dtype):
        assert (CLIPPED in reason) == (rank is not None)
        assert (rounded_away is None) == (rank is not None and dtype is BF16)


def sparse_on(rank: int) -> list[str]:
    """A layer's gradient is sparse on one rank; the others have none of it, and no gradient for this layer."""
    scene = Scene("sgd", lr=0.1)
    probe, evaluation = probe_on_all(scene)
    scene.optimizer.zero_grad()
    scene.model.token.sparse = dist.get_rank() == rank
    loss(scene.model, scene.U).backward()
    if dist.get_rank() != rank:
        scene.model.token.weight.grad = None
    with probe.around_step(evaluation) as around:
        scene.optimizer.step()
    forecast = around.forecast
    assert forecast.coefficient_to_hold is not None
    return [forecast.coefficient_to_hold.reason, str(forecast.delta)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sparse_gradient_on_one_rank(ranks2: Ranks, rank: int) -> None:
    answers = ranks2(sparse_on, rank)
    assert answers[0] == answers[1]
    assert answers[0][0].startswith("the optimizer's answer to a bonus is not known for a sparse gradient")
