"""Placements of gradients on real ranks: what torch gives each layer's gradient, and how much each rank counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from sonde.gradient_norm.refused_gradients import check_share
from sonde.parallel.placements import local_tensor, ranks_of, spec_of
from sonde.parallel.shares import Share, share_of
from tests.ranks import Ranks, mesh_of


def _summary(share: Share) -> dict[str, Any]:
    return {"sharded": share.sharded, "partial": share.partial, "n_shards": share.n_shards, "ranks": share.ranks}


def test_a_plain_tensor_is_whole() -> None:
    whole = share_of(None)
    assert _summary(whole) == {"sharded": (), "partial": (), "n_shards": 1, "ranks": ()}


def test_a_gradient_elsewhere_than_its_mesh_is_refused_unless_it_is_offloaded() -> None:
    mesh: Any = SimpleNamespace(device_type="cuda", get_coordinate=lambda: [0])  # no GPU is needed for this
    cpu, gpu, other = torch.device("cpu"), torch.device("cuda"), torch.device("mps")
    for device in (cpu, gpu):
        check_share(Share(mesh, sharded=(0,)), device, None)
    with pytest.raises(ValueError, match="it is on mps and its mesh on cuda"):
        check_share(Share(mesh, sharded=(0,)), other, None)
    check_share(Share(mesh, partial=((0, "sum"),)), gpu, None)
    with pytest.raises(ValueError, match="must still be summed on cuda, but is on cpu: move it to cuda"):
        check_share(Share(mesh, partial=((0, "sum"),)), cpu, None)


def _placed() -> dict[str, Any]:
    mesh = mesh_of((dist.get_world_size(),))
    whole = torch.arange(10.0).reshape(5, 2)  # uneven over 2 ranks
    shard = distribute_tensor(whole, mesh, [Shard(0)])
    total = dist.get_world_size()
    counted = {}
    for name, tensor in {
        "shard": shard,
        "replicate": distribute_tensor(whole, mesh, [Replicate()]),
        "plain": whole,
    }.items():
        mine = share_of(spec_of(tensor)).n_shards / total * local_tensor(tensor).square().sum()
        dist.all_reduce(mine)
        counted[name] = float(mine)
    return counted | {"exact": float(whole.square().sum())}


def test_every_element_counts_once(ranks2: Ranks, ranks3: Ranks) -> None:
    for ranks in (ranks2, ranks3):
        for counted in ranks(_placed):
            exact = counted.pop("exact")
            assert counted == pytest.approx(dict.fromkeys(counted, exact))


def _unknown() -> str:
    mesh = mesh_of((dist.get_world_size(),))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Partial("max")], run_check=False)
    try:
        return str(share_of(spec_of(tensor)))
    except ValueError as error:
        return str(error)


def test_an_unknown_placement_is_refused_by_name(ranks2: Ranks) -> None:
    for message in ranks2(_unknown):
        assert "Partial(max)" in message
        assert "redistribute the gradient" in message


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(self.embed(tokens)))))


def _tensor_parallel(embedding: str) -> dict[str, dict[str, Any]]:
    mesh = mesh_of((2,))
    torch.manual_seed(0)
    model = _Block()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        if embedding == "rowwise"
        else ColwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    model(torch.randint(16, (3, 6))).square().sum().backward()
    return {name: _summary(share_of(spec_of(p.grad))) for name, p in model.named_parameters()}  # type: ignore[arg-type]


@pytest.mark.parametrize("embedding", ["rowwise", "colwise"])
def test_guard_what_tensor_parallel_gradients_are(ranks2: Ranks, embedding: str) -> None:
    """torch's choice: a row-wise embedding's gradient is whole though its parameter is cut, a norm's is partial."""
    for layouts in ranks2(_tensor_parallel, embedding):
        cut = {"sharded": (0,), "partial": (), "n_shards": 2, "ranks": (0, 1)}
        whole = {"sharded": (), "partial": (), "n_shards": 1, "ranks": ()}
        partial = whole | {"partial": ((0, "sum"),)}
        assert layouts["embed.weight"] == (whole if embedding == "rowwise" else cut)
        assert layouts["norm.weight"] == layouts["norm.bias"] == partial
        assert layouts["up.weight"] == layouts["up.bias"] == layouts["down.weight"] == cut
        assert layouts["down.bias"] == whole


def _fsdp() -> tuple[dict[str, Any], bool]:
    mesh = mesh_of((2,))
    model = fully_shard(nn.Linear(4, 5), mesh=mesh)
    model(torch.randn(3, 4)).sum().backward()
    grad = model.weight.grad
    assert grad is not None
    again = init_device_mesh("cpu", (2,))
    return _summary(share_of(spec_of(grad))), ranks_of(again) == ranks_of(grad.device_mesh)  # type: ignore[attr-defined]


def test_fully_sharded_gradients(ranks2: Ranks) -> None:
    for layout, same in ranks2(_fsdp):
        assert layout == {"sharded": (0,), "partial": (), "n_shards": 2, "ranks": (0, 1)}
        assert same  # meshes made apart are compared by value
