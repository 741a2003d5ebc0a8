"""Which axes of a mesh some ranks lie along, where this rank is along them, and which ranks are in its stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sonde.parallel.placements import axes_over, place_along, stage_ranks
from sonde.parallel.process_groups import group_over
from tests.ranks import Ranks, mesh_of


def _axes() -> dict[str, Any]:
    """In a grid of 2 × 2 × 1 ranks and in a line of 4: the ranks along some axes of the grid."""
    rank, grid, line = dist.get_rank(), mesh_of((2, 2, 1), ("a", "b", "c")), mesh_of((4,))
    near, far = {rank, rank ^ 1}, {rank, rank ^ 2}
    return {
        "near": axes_over(grid, near),
        "far": axes_over(grid, far),
        "all": axes_over(grid, range(4)),
        "alone": (axes_over(grid, {rank}), axes_over(grid, ())),
        "across": axes_over(grid, {rank, 3 - rank}),
        "three": axes_over(grid, {rank, rank ^ 1, rank ^ 2}),
        "in a line": (axes_over(line, near), axes_over(line, far), axes_over(line, range(4))),
        "places": [place_along(grid, axes) for axes in ((), (0,), (1,), (0, 1, 2))],
    }


def test_the_axes_that_ranks_lie_along(ranks4: Ranks) -> None:
    for rank, found in enumerate(ranks4(_axes)):
        assert found.pop("places") == [(0, 1), (rank // 2, 2), (rank % 2, 2), (rank, 4)]
        assert found == {
            "near": (1,),
            "far": (0,),
            "all": (0, 1),
            "alone": ((), ()),
            "across": None,
            "three": None,
            "in a line": (None, None, (0,)),
        }


def _stages(shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    grid = mesh_of(shape, names)
    return stage_ranks(grid, grid["pp"]), stage_ranks(mesh_of((8,)), grid["pp"])


@pytest.mark.parametrize("names", [("pp", "dp", "tp"), ("dp", "pp", "tp"), ("dp", "tp", "pp")], ids=str)
@pytest.mark.parametrize("n_stages", [2, 4])
def test_the_ranks_of_a_stage_are_known_from_any_grid(ranks8: Ranks, names: tuple[str, ...], n_stages: int) -> None:
    shape = tuple({"pp": n_stages, "dp": 4 // n_stages, "tp": 2}[name] for name in names)
    ranks = torch.arange(8).reshape(shape).movedim(names.index("pp"), 0).reshape(n_stages, -1)
    for rank, (in_the_grid, in_a_line) in enumerate(ranks8(_stages, shape, names)):
        stage = next(row for row in ranks.tolist() if rank in row)
        assert in_the_grid == in_a_line == tuple(stage)


def _irregular() -> str:
    grid = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("pp", "dp"))
    try:
        return str(stage_ranks(mesh_of((4,)), grid["pp"]))
    except ValueError as error:
        return str(error)


def test_the_ranks_of_a_stage_are_not_guessed(ranks4: Ranks) -> None:
    for rank, message in enumerate(ranks4(_irregular)):
        assert f"pp_mesh= has ranks {'0, 3' if rank in (0, 3) else '1, 2'}, and mesh= has no such axis" in message


def _groups() -> tuple[bool, bool, list[int]]:
    pair = sorted((dist.get_rank(), dist.get_rank() ^ 1))
    group = group_over(pair[::-1])
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=group)
    return group is group_over(pair), group_over(range(4)) is dist.group.WORLD, [*total.tolist(), group.size()]


def test_a_group_of_ranks_is_made_once(ranks4: Ranks) -> None:
    for rank, (is_same, is_world, (total, size)) in enumerate(ranks4(_groups)):
        assert is_same
        assert is_world
        assert (total, size) == (rank + (rank ^ 1), 2)


def _root_axes() -> list[Any]:
    mesh = mesh_of((2, 1), ("whole", "part"))
    return [mesh["part"]._get_root_mesh().mesh_dim_names, mesh._get_root_mesh() is mesh]


def test_guard_an_axis_of_a_mesh_knows_the_whole(ranks2: Ranks) -> None:
    """A clip without `mesh=` asks it whether there are pipeline stages."""
    assert ranks2(_root_axes) == [[("whole", "part"), True]] * 2
