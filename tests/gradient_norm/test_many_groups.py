"""Norms of more groups than the summed vector has room for, and ranks whose vectors would have other lengths."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode

import sonde
from tests.gradient_norm.placed_gradients import placed
from tests.ranks import Ranks, mesh_of

ROOM = 64
"""Groups whose norms ride in the one collective."""


def outcome(function: Any, *args: Any, **options: Any) -> str:
    try:
        function(*args, **options)
    except ValueError as error:
        return str(error)
    return "no error"


def _numbers_of_groups_differ(few: int, many: int, order: float, *, with_mesh: bool) -> list[str]:
    mesh = mesh_of((dist.get_world_size(),))
    gradients = [torch.full((2,), 1.0 + k) for k in range(many)]
    if not with_mesh:
        gradients = [placed(g, mesh, [Shard(0)], (2 * mesh.size(),)).grad for g in gradients]  # type: ignore[misc]
    on = mesh if with_mesh else None
    n = few if dist.get_rank() == mesh.size() - 1 else many
    names = [f"g{k % n}" for k in range(many)]
    refused = outcome(sonde.get_total_norm, gradients, order, mesh=on, by_group=names)
    return [refused, outcome(sonde.get_total_norm, gradients, order, mesh=on)]  # and the ranks are still in step


def _numbers_differ_with_mesh(*args: Any) -> list[str]:
    return _numbers_of_groups_differ(*args, with_mesh=True)


def _numbers_differ_without(*args: Any) -> list[str]:
    return _numbers_of_groups_differ(*args, with_mesh=False)


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize(
    ("few", "many"), [(3, 17), (17, 3), (ROOM, ROOM + 1), (ROOM + 1, 300), (300, 1)], ids=lambda n: str(n)
)
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_ranks_with_other_numbers_of_groups_are_refused(
    request: pytest.FixtureRequest, n_ranks: int, few: int, many: int, order: float
) -> None:
    ranks = request.getfixturevalue(f"ranks{n_ranks}")
    few, many = min(few, many), max(few, many)
    for call in (_numbers_differ_with_mesh, _numbers_differ_without):
        for refused, after in ranks(call, few, many, order):
            assert "by_group= differs between ranks" in refused
            assert after == "no error"


def _other_groups_on_one_rank(names: Any, order: float) -> str:
    gradients = [torch.ones(2) for _ in range(100)]
    by_group = names if dist.get_rank() else [str(k) for k in range(100)]
    return outcome(sonde.get_total_norm, gradients, order, mesh=mesh_of((2,)), by_group=by_group)


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize(
    ("names", "on_0", "on_1"),
    [
        (None, "by_group= differs between ranks", "by_group= differs between ranks"),
        ("ab", "another rank was called with something", "got a string: pass a list of names"),
        (["a"], "another rank was called with something", "got 1 names for 100 tensors"),
        ([1] * 100, "another rank was called with something", "by_group must hold names, got 1 among them"),
    ],
    ids=["none", "a string", "too few", "no names"],
)
def test_groups_that_one_rank_alone_lacks_are_refused(
    ranks2: Ranks, names: Any, on_0: str, on_1: str, order: float
) -> None:
    first, second = ranks2(_other_groups_on_one_rank, names, order)
    assert on_0 in first
    assert on_1 in second


def _many_groups(order: float, n: int, scale: float) -> tuple[list[float], list[float], int]:
    """Two gradients in each group, one of them so large that it is read in blocks."""
    mesh = mesh_of((2,))
    made = [placed(torch.full((2,), 1.0 + k), mesh, [Shard(0)], (4,)).grad for k in range(n)]
    large = placed(torch.full((128, 256), scale), mesh, [Shard(0)], (256, 256)).grad
    with CommDebugMode() as counted:
        norm, by_group = sonde.get_total_norm(
            [*made, large], order, mesh=mesh, by_group=[*(f"{k:03}" for k in range(n)), "000"]
        )
    own = [[1.0 + k] * 4 for k in range(n)]
    own[0] += [scale] * 256 * 256
    exact = [float(torch.tensor(g, dtype=torch.float64).norm(order)) for g in own]
    exact.append(float(torch.tensor(exact, dtype=torch.float64).norm(order)))
    return [*by_group.values(), norm], exact, counted.get_total_counts()


@pytest.mark.parametrize("scale", [1.0, 1e25])
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("n", [ROOM, ROOM + 1, 300])
def test_norms_of_any_number_of_groups_are_right(ranks2: Ranks, n: int, order: float, scale: float) -> None:
    """More groups than there is room for take one more collective, once the ranks have agreed."""
    results = ranks2(_many_groups, order, n, scale)
    for norms, exact, n_collectives in results:
        assert [float(x) for x in norms] == pytest.approx(exact, rel=1e-6)
        assert n_collectives == 1 + (n > ROOM)
        assert norms == results[0][0]


def _nan_in_one_group(order: float, n: int) -> tuple[float, list[float]]:
    """One shard of one group is NaN."""
    mesh, rank = mesh_of((2,)), dist.get_rank()
    gradients = [placed(torch.full((2,), 1.0 + k), mesh, [Shard(0)], (4,)).grad for k in range(n)]
    if rank == 1:
        gradients[0].to_local()[1] = math.nan  # type: ignore[union-attr]
    norm, by_group = sonde.get_total_norm(gradients, order, mesh=mesh, by_group=[f"{k:03}" for k in range(n)])  # type: ignore[arg-type]
    return float(norm), [float(x) for x in by_group.values()]


@pytest.mark.parametrize("n", [3, 100])
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_a_group_that_is_nan_leaves_the_others_as_they_are(ranks2: Ranks, order: float, n: int) -> None:
    for norm, by_group in ranks2(_nan_in_one_group, order, n):
        assert math.isnan(norm)
        assert math.isnan(by_group[0])
        assert by_group[1:] == pytest.approx([(2.0 + k) * 4 ** (1 / order) for k in range(n - 1)], rel=1e-6)


def _groups_of_stages(order: float, *, with_mesh: bool) -> list[Any]:
    """Two stages with a group of their own each, and a group on both; each stage's gradients are cut over its ranks."""
    mesh = mesh_of((2, 2), ("stage", "dp"))
    stage = mesh.get_local_rank("stage")
    own, other = (("embed", "head"), ("head", "embed"))[stage]
    options: dict[str, Any] = {"mesh": mesh if with_mesh else None, "pp_mesh": mesh["stage"]}
    values = (1.0 + stage, 3.0 + stage)
    gradients = [placed(torch.tensor([v, 2 * v]), mesh["dp"], [Shard(0)], (4,)).grad for v in values]
    groups = [own, "norms"]
    refused = outcome(sonde.get_total_norm, gradients, order, by_group=groups, **options)
    joined = sonde.get_total_norm([*gradients, torch.empty(0)], order, by_group=[*groups, other], **options)
    exact = {
        name: float(torch.tensor([[v, 2 * v] * 2 for v in values], dtype=torch.float64).norm(order))
        for name, values in (("embed", [1.0]), ("head", [2.0]), ("norms", [3.0, 4.0]))
    }
    return [refused, {name: float(x) for name, x in joined[1].items()}, exact]


def _groups_of_stages_with_mesh(order: float) -> list[Any]:
    return _groups_of_stages(order, with_mesh=True)


def _groups_of_stages_without(order: float) -> list[Any]:
    return _groups_of_stages(order, with_mesh=False)


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("call", [_groups_of_stages_with_mesh, _groups_of_stages_without], ids=["mesh", "no mesh"])
def test_a_stage_joins_the_groups_of_other_stages_by_an_empty_tensor(ranks4: Ranks, call: Any, order: float) -> None:
    for refused, by_group, exact in ranks4(call, order):
        assert re.search("by_group= differs between ranks, got (embed|head), norms on this rank", refused)
        assert "for a group that this rank has no gradient of, pass an empty tensor, torch.empty(0)" in refused
        assert by_group == pytest.approx(exact, rel=1e-6)
