"""Norms of many groups, and ranks that were given different groups."""

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
@pytest.mark.parametrize("n", [64, 300])
def test_norms_of_any_number_of_groups_are_right(ranks2: Ranks, n: int, order: float, scale: float) -> None:
    results = ranks2(_many_groups, order, n, scale)
    for norms, exact, n_collectives in results:
        assert [float(x) for x in norms] == pytest.approx(exact, rel=1e-6)
        assert n_collectives == 1
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


def _groups_of_stages(order: float, with_mesh: bool) -> list[Any]:
    """Two stages with a group of their own each, and a group on both; each stage's gradients are cut over its ranks."""
    mesh = mesh_of((2, 2), ("stage", "dp"))
    stage = mesh.get_local_rank("stage")
    own, other = (("embed", "head"), ("head", "embed"))[stage]
    options: dict[str, Any] = {"mesh": mesh if with_mesh else None, "pp_mesh": mesh["stage"]}
    values = (1.0 + stage, 3.0 + stage)
    gradients = [placed(torch.tensor([v, 2 * v]), mesh["dp"], [Shard(0)], (4,)).grad for v in values]
    groups = [own, "norms"]
    with pytest.raises(ValueError, match="by_group= differs between ranks") as refused:
        sonde.get_total_norm(gradients, order, by_group=groups, **options)
    joined = sonde.get_total_norm([*gradients, torch.empty(0)], order, by_group=[*groups, other], **options)
    exact = {
        name: float(torch.tensor([[v, 2 * v] * 2 for v in values], dtype=torch.float64).norm(order))
        for name, values in (("embed", [1.0]), ("head", [2.0]), ("norms", [3.0, 4.0]))
    }
    return [str(refused.value), {name: float(x) for name, x in joined[1].items()}, exact]


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("with_mesh", [True, False])
def test_a_stage_joins_groups_of_other_stages_by_an_empty_tensor(ranks4: Ranks, with_mesh: bool, order: float) -> None:
    for refused, by_group, exact in ranks4(_groups_of_stages, order, with_mesh):
        assert re.search("by_group= differs between ranks, got (embed|head), norms on this rank", refused)
        assert "for a group without a gradient here, pass an empty tensor, torch.empty(0)" in refused
        assert by_group == pytest.approx(exact, rel=1e-6)
