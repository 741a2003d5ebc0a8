"""A plan that is used while gradients come, go and change their placements, and its pipeline stages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import sonde
from tests.gradient_norm.placed_gradients import placed
from tests.ranks import Ranks, mesh_of


def _plan_that_learns() -> list[tuple[float, int]]:
    """The plan is made before any gradient exists, and used while gradients come, go and change their placement."""
    mesh, rank = mesh_of((2,)), dist.get_rank()
    p = placed(torch.ones(2), mesh, [Shard(0)], (4,))
    q = placed(torch.full((3,), 0.5 * (rank + 1)), mesh, [Partial()], (3,), [Replicate()])
    later, p.grad = p.grad, None
    partial, q.grad = q.grad, None
    plan = sonde.group_parameters_for_norm([p, q], mesh=mesh)
    norms_and_counts = []
    for step in range(4):
        p.grad = later if step else None
        q.grad = partial if step == 2 else None
        with CommDebugMode() as counted:
            norm = sonde.clip_grad_norm_distributed_(plan, None)
        norms_and_counts.append((float(norm), counted.get_total_counts()))
    return norms_and_counts


def test_a_plan_follows_gradients_that_come_and_go(ranks2: Ranks) -> None:
    for norms_and_counts in ranks2(_plan_that_learns):
        assert [norm for norm, _ in norms_and_counts] == pytest.approx([0, 2, math.sqrt(4 + 3 * 1.5**2), 2], rel=1e-6)
        # Once a gradient has been partial, this rank takes part with zeros when it is missing: its peers may have it.
        assert [n for _, n in norms_and_counts] == [1, 1, 2, 2]


def _twice_a_step() -> list[float]:
    """The second clip finds the gradient summed; in the next step it is missing on one rank."""
    mesh, rank = mesh_of((2,)), dist.get_rank()
    p = placed(torch.ones(3), mesh, [Partial()], (3,), [Replicate()])
    partial, plan = p.grad, sonde.group_parameters_for_norm([p], mesh=mesh)
    norms = [float(sonde.clip_grad_norm_distributed_(plan, 100.0)) for _ in range(2)]
    p.grad = partial if rank == 0 else None
    return [*norms, float(sonde.clip_grad_norm_distributed_(plan, 100.0))]


def test_a_gradient_that_was_partial_once_may_be_partial_again(ranks2: Ranks) -> None:
    for norms in ranks2(_twice_a_step):
        assert norms == pytest.approx([math.sqrt(12), math.sqrt(12), math.sqrt(3)])


def _stages() -> tuple[list[float], list[str]]:
    mesh = mesh_of((2, 2), ("pp", "dp"))
    p = placed(torch.ones(2), mesh["dp"], [Shard(0)], (4,))  # each stage has its own
    plan = sonde.group_parameters_for_norm([p], mesh=mesh, pp_mesh=mesh["pp"])
    late = sonde.group_parameters_for_norm([p])
    norms = [
        float(sonde.clip_grad_norm_distributed_(plan, None)),
        float(sonde.clip_grad_norm_distributed_(plan, None, 2.0, mesh["pp"])),
        float(sonde.clip_grad_norm_distributed_(late, None, 2.0, mesh["pp"])),
    ]
    messages = []
    wrong: list[dict[str, Any]] = [
        {"mesh": mesh},
        {"mesh": mesh, "pp_mesh": mesh},
        {"mesh": mesh, "pp_mesh": mesh["dp"]},
        {"pp_mesh": mesh["dp"]},
        {"mesh": "world"},
    ]
    for options in wrong:
        try:
            messages.append(str(float(sonde.clip_grad_norm_([p], None, **options))))
        except ValueError as error:
            messages.append(str(error))
    try:
        messages.append(str(float(sonde.clip_grad_norm_distributed_(plan, None, 2.0, mesh["dp"]))))
    except ValueError as error:
        messages.append(str(error))
    return norms, messages


def test_pipeline_stages_are_remembered_and_wrong_ones_refused(ranks4: Ranks) -> None:
    for norms, messages in ranks4(_stages):
        assert norms == pytest.approx([math.sqrt(8)] * 3)
        assert "pass pp_mesh=mesh['pp']" in messages[0]
        assert "pp_mesh must have 1 axis, got 2" in messages[1]
        for message in messages[2:4]:
            assert "of pp_mesh=, whose ranks are pipeline stages" in message
        assert "mesh must be a DeviceMesh, got 'world'" in messages[4]
        assert "pp_mesh has other ranks than the plan's pp_mesh" in messages[5]
