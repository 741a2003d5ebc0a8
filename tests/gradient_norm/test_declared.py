"""Parameters that are declared to be on some ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import sonde
from tests.gradient_norm.placed_gradients import Call, Case, check_on_ranks, each_of, noise, placed, plain
from tests.ranks import mesh_of

rank = dist.get_rank


def planned(parameters: list[tuple[str, nn.Parameter]], mesh: Any, **options: Any) -> Call:
    return Call(parameters, {"mesh": mesh, **options}, by=sonde.group_parameters_for_norm)


def tied_over_stages() -> Call:
    """The first stage's embedding is the last stage's head: each has a copy, and the sum of both gradients."""
    mesh = mesh_of((2,), ("pp",))
    named = [(("embed", "head")[rank()], plain(noise(5, 4, 3))), (f"stages.{rank()}", plain(noise(6 + rank(), 4, 3)))]
    for _, p in named:
        p.data.copy_(p.grad)  # type: ignore[arg-type]
    options = {"mesh": mesh, "pp_mesh": mesh, "replicas": {named[0][0]: 2}}
    sonde.group_parameters_for_norm(named, **options)
    return Call(named, options, None)


def experts_over_dp_alone() -> Call:
    """Experts fully sharded over dp, different on each rank of ep: DTensors of the same shape and name."""
    mesh = mesh_of((2, 2), ("dp", "ep"))
    mine = noise(mesh.get_local_rank("ep"), 6).chunk(2)[mesh.get_local_rank("dp")]
    p = placed(mine.clone(), mesh["dp"], [Shard(0)], (6,))
    return Call([("w", p)], {"mesh": mesh, "replicas": {"w": 1}}, None)


def explained(**options: Any) -> Call:
    """A parameter of another shape on each rank."""
    mesh = mesh_of((2,), ("stage",))
    p = nn.Parameter(torch.zeros(4 + rank()))
    return planned([("w", p)], mesh, **{name: value or mesh for name, value in options.items()})


SQUARES = [float(noise(seed, 4, 3).double().square().sum()) for seed in (5, 6, 7)]
CASES = [
    Case("tied over stages", 2, tied_over_stages, sum(SQUARES) ** 0.5),
    Case(
        "their norm",
        4,
        experts_over_dp_alone,
        float(torch.cat([noise(0, 6), noise(1, 6)]).double().norm()),
    ),
    Case("stages explain other shapes", 2, lambda: explained(pp_mesh=None), "^$"),
    Case("replicas explain other shapes", 2, lambda: explained(replicas={"w": 1}), "^$"),
]


@each_of(CASES)
def test_a_declaration_tells_on_how_many_ranks_a_parameter_is(request: pytest.FixtureRequest, index: int) -> None:
    check_on_ranks(request, __name__, index)
