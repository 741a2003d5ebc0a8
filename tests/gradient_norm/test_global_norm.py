"""The norm by parts of the model, ranks with nothing to add, and the order of reads and collectives.

Whole models are in test_clip_on_ranks.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

import sonde
from sonde.gradient_norm.global_norm import global_norm
from sonde.gradient_norm.plan import NormPlan
from tests.gradient_norm.placed_gradients import placed
from tests.ranks import Ranks, mesh_of
from tests.sharded import fsdp


def _some_missing(with_mesh: bool) -> tuple[float, float]:
    """One rank has no gradient at all, and one parameter has none on both ranks: an empty rank takes part."""
    cut = fsdp()
    missing = {"back.head.weight"} if dist.get_rank() == 0 else set(cut.parameters)
    for name in missing:
        cut.parameters[name].grad = None
    locals_ = [p.grad.to_local() for p in cut.parameters.values() if p.grad is not None]  # type: ignore[operator]
    mine = sum(float(t.double().square().sum()) for t in locals_)
    plan = NormPlan(list(cut.parameters.values()), mesh=cut.mesh if with_mesh else None)
    return float(global_norm(plan, 2.0).norm), mine


@pytest.mark.parametrize("with_mesh", [True, False])
def test_an_empty_rank_takes_part(ranks2: Ranks, with_mesh: bool) -> None:
    (first, mine), (second, nothing) = ranks2(_some_missing, with_mesh)
    assert first == second == pytest.approx(math.sqrt(mine), rel=1e-6)
    assert nothing == 0


def _no_parameters() -> float:
    """A parameter on one rank alone, declared so."""
    mesh, p = mesh_of((2,)), torch.nn.Parameter(torch.zeros(4))
    p.grad = torch.ones(4)
    mine = [("p", p)] if dist.get_rank() == 0 else []
    plan = sonde.group_parameters_for_norm(mine, mesh=mesh, replicas={name: 1 for name, _ in mine})
    return float(sonde.clip_grad_norm_distributed_(plan, 1.0))


def test_a_rank_without_parameters_takes_part(ranks2: Ranks) -> None:
    assert ranks2(_no_parameters) == [2.0, 2.0]


def _opened() -> set[tuple[int, ...]]:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    p = placed(torch.ones(3), mesh, [Shard(0), Partial()], (6,), [Shard(0), Replicate()])
    reduced: list[set[tuple[int, ...]]] = [set(), set()]
    real = dist.all_reduce

    def spy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced[-1].add(tuple(dist.get_process_group_ranks(kwargs.get("group") or dist.group.WORLD)))
        return real(tensor, *args, **kwargs)

    dist.all_reduce = spy
    try:
        plan = sonde.group_parameters_for_norm([p], mesh=mesh)
        reduced.append(set())
        sonde.clip_grad_norm_distributed_(plan, 1.0)
    finally:
        dist.all_reduce = real
    return reduced[2] - reduced[1]


def test_every_communicator_is_opened_by_the_plan(ranks4: Ranks) -> None:
    assert ranks4(_opened) == [set()] * 4
