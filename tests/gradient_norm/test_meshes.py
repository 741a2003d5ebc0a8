"""The meshes around those of gradients: undeclared experts, another model's mesh, stages that come with the clip."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

import sonde
from tests.gradient_norm.placed_gradients import placed, plain
from tests.ranks import Ranks, mesh_of


def _message(call: Any, *args: Any, **options: Any) -> str:
    try:
        return f"norm {float(call(*args, **options)):.4f}"
    except ValueError as error:
        return str(error)


def _beside_plain_weights() -> list[str]:
    mesh = mesh_of((2, 2), ("ep", "efsdp"))
    of_expert = torch.full((2, 3), 1.0 + mesh["ep"].get_local_rank())
    parameters = [plain(torch.ones(8)), placed(of_expert, mesh["efsdp"], [Shard(0)], (4, 3))]
    declared = {"mesh": mesh, "replicas": {parameters[1]: 1}}
    return [_message(sonde.clip_grad_norm_, parameters, None, **options) for options in ({}, declared)]


def test_experts_beside_plain_weights_have_to_be_declared(ranks4: Ranks) -> None:
    for bare, declared in ranks4(_beside_plain_weights):
        assert "pass mesh= (all ranks that hold the model), and replicas= for parameters" in bare
        assert declared == f"norm {(8 + 12 * (1 + 4)) ** 0.5:.4f}"


def _experts_of_equal_scale(seeds: int) -> list[str]:
    """Independent gradients of many elements have nearly the same norm."""
    mesh, said = mesh_of((2, 2), ("ep", "efsdp")), []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(100 * seed + mesh["ep"].get_local_rank())
        expert = torch.randn(200, 300, generator=generator)[100 * mesh["efsdp"].get_local_rank() :][:100]
        parameters = [plain(torch.ones(8)), placed(expert, mesh["efsdp"], [Shard(0)], (200, 300))]
        said.append(_message(sonde.clip_grad_norm_, parameters, None, mesh=mesh))
    return said


def test_undeclared_experts_of_equal_scale_are_seen_in_every_call(ranks4: Ranks) -> None:
    for said in ranks4(_experts_of_equal_scale, 20):
        assert all("gradients that differ between ranks that should hold the same" in message for message in said)


def _of_a_second_model() -> str:
    def model(*names: str) -> Any:
        mesh = mesh_of((2, 2), names)
        return placed(torch.ones(4, 8), mesh["dp"], [Shard(0)], (8, 8))

    model("pp", "dp")  # torch gives parameters the first of two equal sub-meshes
    return _message(sonde.clip_grad_norm_, [model("x", "dp")], None)


def test_a_mesh_that_another_model_shares_does_not_count(ranks4: Ranks) -> None:
    assert set(ranks4(_of_a_second_model)) == {"norm 8.0000"}


def _stages_at_the_clip() -> list[str]:
    mesh = mesh_of((2, 2), ("pp", "dp"))
    stage = torch.full((4, 8), 1.0 + mesh["pp"].get_local_rank())
    plan = sonde.group_parameters_for_norm([placed(stage, mesh["dp"], [Shard(0)], (8, 8))])
    clip = sonde.clip_grad_norm_distributed_
    return [_message(clip, plan, None, 2.0, pp_mesh) for pp_mesh in (None, mesh["pp"])]


def test_stages_may_be_given_at_the_clip(ranks4: Ranks) -> None:
    for without, given in ranks4(_stages_at_the_clip):
        assert "has pipeline stages, and each has gradients that the others lack" in without
        assert given == f"norm {(64 + 256) ** 0.5:.4f}"


def _partial_of_a_shard() -> tuple[str, str, float]:
    mesh = mesh_of((2,), ("dp",))
    full = torch.full((8, 3), 1.0 + dist.get_rank())
    cut = placed(full, mesh, [Partial()], (8, 3), [Shard(0)])
    whole = placed(full, mesh, [Partial()], (8, 3), [Replicate()])
    sonde.clip_grad_norm_([cut, whole], 0.1)
    return str(cut.grad.placements[0]), str(whole.grad.placements[0]), float(cut.grad.full_tensor().norm())


def test_a_partial_gradient_of_a_shard_stays_partial(ranks2: Ranks) -> None:
    """As torch's clip leaves it. That of a whole parameter is left summed, so that the optimizer sums it no more."""
    for cut, whole, norm in ranks2(_partial_of_a_shard):
        assert (cut, whole) == ("P(sum)", "R")
        assert abs(norm - 0.1 / 2**0.5) < 1e-6
