"""Shards that several sets of ranks should hold alike are compared, also if `mesh=` has no axes of the cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import sonde
from sonde.gradient_norm import agreement
from tests.gradient_norm.placed_gradients import placed
from tests.ranks import Ranks, mesh_of
from tests.sharded import WAYS, exact_gradients, norm_of


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shard_of(seed: int, mesh: DeviceMesh, n: int = 24) -> nn.Parameter:
    """This rank's shard, over a mesh of one axis, of the gradient of n elements that the seed gives."""
    return placed(noise(seed, n).chunk(mesh.size())[mesh.get_local_rank()].clone(), mesh, [Shard(0)], (n,))


def clipped(parameters: Any, **options: Any) -> str:
    try:
        return f"no error: {float(sonde.clip_grad_norm_(parameters, None, **options))}"
    except ValueError as error:
        return str(error)


def squares(*seeds: int) -> float:
    return sum(float(noise(seed, 24).double().square().sum()) for seed in seeds)


def norm_in(message: str) -> float:
    return float(message.removeprefix("no error: "))


def _experts(sharded_over: str, kind: str) -> str:
    """An expert of one name and shape, cut over one axis of a grid; `mesh=` has all ranks along one axis."""
    grid = mesh_of((2, 2), ("a", "b"))
    other = "b" if sharded_over == "a" else "a"
    which = grid.get_local_rank(other) if kind != "copies" else 0
    options: dict[str, Any] = {"replicas": {"w": 1}} if kind == "declared" else {}
    return clipped([("w", shard_of(which, grid[sharded_over]))], mesh=mesh_of((4,)), **options)


@pytest.mark.parametrize("sharded_over", ["a", "b"])
def test_undeclared_experts_are_refused_where_mesh_has_no_axis_of_their_cut(ranks4: Ranks, sharded_over: str) -> None:
    for message in ranks4(_experts, sharded_over, "undeclared"):
        assert "DTensors on a part of mesh= (here 1, the first is w) have gradients that differ" in message
        assert "declare experts and shards by replicas=" in message
    for message in ranks4(_experts, sharded_over, "declared"):
        assert norm_in(message) == pytest.approx(math.sqrt(squares(0, 1)), rel=1e-6)
    for message in ranks4(_experts, sharded_over, "copies"):
        assert norm_in(message) == pytest.approx(math.sqrt(squares(0)), rel=1e-6)


def _whole_models(way: str) -> list[float]:
    """`mesh=` is one axis of all ranks, as an engine's world mesh is."""
    cut = WAYS[way][1]()
    mesh = mesh_of((dist.get_world_size(),))
    norms = [sonde.clip_grad_norm_(cut.parameters.items(), None, mesh=m, pp_mesh=cut.pp_mesh) for m in (mesh, cut.mesh)]
    return [float(norm) for norm in norms]


@pytest.mark.parametrize("way", ["HSDP", "FSDP2 over context parallelism", "FSDP2 over TP", "PP × FSDP2", "PP × TP"])
def test_a_mesh_of_one_axis_serves_any_cut(ranks4: Ranks, way: str) -> None:
    exact = norm_of(exact_gradients(), 2.0)
    for of_one_axis, of_the_grid in ranks4(_whole_models, way):
        assert of_one_axis == of_the_grid == pytest.approx(exact, rel=1e-6)


def _around_an_axis() -> list[str]:
    """Cut over the outer and the inner axis of a grid together, with copies along the axis between."""
    grid = mesh_of((2, 2, 2), ("dp", "tp", "cp"))
    around = grid["dp", "cp"]._flatten("dp_cp")
    mesh, tp = mesh_of((8,)), grid.get_local_rank("tp")
    return [clipped([("w", shard_of(seed, around))], mesh=mesh) for seed in (0, tp)]


def test_copies_along_an_axis_inside_the_cut(ranks8: Ranks) -> None:
    for copies, experts in ranks8(_around_an_axis):
        assert norm_in(copies) == pytest.approx(math.sqrt(squares(0)), rel=1e-6)
        assert "have gradients that differ" in experts


def _model_on_a_part_of_the_mesh() -> float:
    """FSDP2 over each half of the ranks, its gradients averaged over the halves by hand."""
    grid = mesh_of((2, 2), ("replicate", "shard"))
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(6, 5), mesh=grid["shard"])
    model(noise(dist.get_rank(), 3, 6)).square().sum().backward()
    for p in model.parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad.to_local(), group=grid.get_group("replicate"))  # type: ignore[attr-defined]
    exact = math.sqrt(sum(float(p.grad.full_tensor().double().square().sum()) for p in model.parameters()))  # type: ignore[union-attr]
    return float(sonde.clip_grad_norm_(model.named_parameters(), None, mesh=mesh_of((4,)))) / exact


def test_data_parallel_copies_of_shards_are_no_experts(ranks4: Ranks) -> None:
    assert ranks4(_model_on_a_part_of_the_mesh) == [pytest.approx(1.0, rel=1e-6)] * 4


def _stages(kind: str) -> str:
    """Two stages of two ranks, whose axis `mesh=` does not have; each stage has other parameters."""
    grid = mesh_of((2, 2), ("pp", "dp"))
    stage, dp = grid.get_local_rank("pp"), grid.get_local_rank("dp")
    name = f"w{stage}{dp}" if kind == "other names in a stage" else f"w{stage}"
    p = nn.Parameter(torch.zeros(24))
    if kind != "missing on one rank" or dist.get_rank() != 3:
        p.grad = noise(2 * stage + dp if kind == "experts" else stage, 24)
    return clipped([(name, p)], mesh=mesh_of((4,)), pp_mesh=grid["pp"])


def test_stages_that_mesh_has_no_axis_of_are_compared_within(ranks4: Ranks) -> None:
    for message in ranks4(_stages, "stages"):
        assert norm_in(message) == pytest.approx(math.sqrt(squares(0, 1)), rel=1e-6)
    for message in ranks4(_stages, "other names in a stage"):
        assert "ranks of one pipeline stage have different parameters" in message
    for kind in ("experts", "missing on one rank"):
        for message in ranks4(_stages, kind):
            assert "plain gradients" in message
            assert "differ between ranks that should hold the same" in message


def _experts_of_stages(kind: str, mesh_shape: tuple[int, ...]) -> str:
    """Two stages of four ranks; in each, an expert is cut over two ranks that lie next to each other."""
    grid = mesh_of((2, 2, 2), ("pp", "ep", "efsdp"))
    stage = grid.get_local_rank("pp")
    seed = stage if kind == "copies" else 2 * stage + grid.get_local_rank("ep")
    mesh = mesh_of(mesh_shape, ("pp", "dp")[-len(mesh_shape) :])
    pp_mesh = mesh["pp"] if len(mesh_shape) == 2 else grid["pp"]
    return clipped([(f"w{stage}", shard_of(seed, grid["efsdp"]))], mesh=mesh, pp_mesh=pp_mesh)


@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4)], ids=str)
def test_experts_of_stages_are_compared_within_their_stage(ranks8: Ranks, mesh_shape: tuple[int, ...]) -> None:
    for message in ranks8(_experts_of_stages, "copies", mesh_shape):
        assert norm_in(message) == pytest.approx(math.sqrt(squares(0, 1)), rel=1e-6)
    for message in ranks8(_experts_of_stages, "experts", mesh_shape):
        assert "DTensors on a part of mesh=" in message


def _stages_in_no_order() -> str:
    """Stages 0 and 1 on ranks 0, 3 and on 1, 2: the ranks of a stage cannot be worked out."""
    grid = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("pp", "dp"))
    stage = grid.get_local_rank("pp")
    p = nn.Parameter(torch.zeros(24))
    p.grad = noise(stage, 24)
    messages = [clipped([(f"w{stage}", p)], mesh=mesh, pp_mesh=grid["pp"]) for mesh in (mesh_of((4,)), grid)]
    return " | ".join(messages)


def test_stages_whose_ranks_are_not_known_are_refused(ranks4: Ranks) -> None:
    for message in ranks4(_stages_in_no_order):
        refused, right = message.split(" | ")
        assert "and mesh= has no such axis: pass a mesh= that has the pipeline stages as an axis" in refused
        assert norm_in(right) == pytest.approx(math.sqrt(squares(0, 1)), rel=1e-6)


def groups_of(n: int, m: int, kind: str) -> list[list[int]]:
    """n ranks in sets of m, which lie next to each other, far apart, or anyhow."""
    order = list(range(n))
    if kind == "apart":
        order = [i + j * (n // m) for i in range(n // m) for j in range(m)]
    elif kind == "anyhow":
        order = torch.randperm(n, generator=torch.Generator().manual_seed(n)).tolist()
    return [order[i : i + m] for i in range(0, n, m)]


@pytest.mark.parametrize("kind", ["next", "apart", "anyhow"])
@pytest.mark.parametrize(("n", "m"), [(4, 2), (6, 3), (16, 2), (16, 4), (24, 12), (64, 8)])
def test_copies_in_any_sets_of_ranks_are_compared_as_wholes(n: int, m: int, kind: str) -> None:
    """Shards of one copy differ, and those of another copy lie otherwise: only the sum over a copy's shards counts."""
    generator = torch.Generator().manual_seed(1)

    def names(factor: float) -> list[bool]:
        total = torch.zeros(agreement.N_SLOTS, dtype=torch.float64)
        for which, ranks in enumerate(groups_of(n, m, kind)):
            powers = torch.rand(m, dtype=torch.float64, generator=generator)
            powers *= (factor if which == 1 else 1.0) / powers.sum()
            for rank, power in zip(ranks, powers, strict=True):
                ballot = agreement.Ballot("up to 6", uses_max=False)
                ballot.add_copies("sharded", power, agreement.contrast(range(n), {rank, *ranks}), 1e-4)
                total += ballot.slots(torch.device("cpu"))
        return agreement.disagreements(total, uses_max=False, has_stages=False).tolist()

    assert not any(names(1.0))
    assert not any(names(1.0 + 1e-6))
    assert agreement.first_disagreement(names(1.01)) == ("sharded", 0)
