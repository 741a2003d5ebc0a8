"""The global norm on real ranks beside the norm of one process that holds the whole gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from sonde.measure.global_norm import global_norm
from sonde.measure.norm_plan import NormPlan
from sonde.measure.partial import reduce_partial
from tests.ranks import Ranks

ORDERS = [1.0, 2.0, 3.0, math.inf]
VOCABULARY = 13  # uneven over 2 ranks


class Model(nn.Module):
    """Every kind of tensor-parallel layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.down(torch.relu(self.up(self.norm(self.embed(tokens))))))


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten())


def exact(order: float) -> float:
    model = build().double()
    loss_of(model).backward()
    together = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
    return float(torch.linalg.vector_norm(together, order))


def cut(how: str) -> tuple[nn.Module, DeviceMesh]:
    """The model, cut over 2 ranks, with its gradients."""
    mesh = init_device_mesh("cpu", (2,))
    model: nn.Module = build()
    if how == "fsdp":
        fully_shard(model, mesh=mesh)
    elif how == "tp":
        plan: dict[str, Any] = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, plan)
    loss_of(model).backward()
    return model, mesh


def _norms(how: str, with_mesh: bool) -> list[tuple[float, int]]:
    model, mesh = cut(how)
    plan = plan_of(model, mesh if with_mesh else None)
    found = []
    for order in ORDERS:
        with CommDebugMode() as issued:
            norm = global_norm(plan, order).norm
        found.append((float(norm), issued.get_total_counts()))
    return found


def plan_of(model: nn.Module, mesh: DeviceMesh | None) -> NormPlan:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return NormPlan(parameters, names, mesh=mesh)


@pytest.mark.parametrize("with_mesh", [True, False])
@pytest.mark.parametrize("how", ["plain", "fsdp", "tp"])
def test_it_is_the_norm_of_one_process(ranks2: Ranks, how: str, with_mesh: bool) -> None:
    first, second = ranks2(_norms, how, with_mesh)
    assert first == second  # to the last bit
    for order, (norm, collectives) in zip(ORDERS, first, strict=True):
        assert norm == pytest.approx(exact(order), rel=1e-6)  # of fp32 gradients
        # Partial gradients take one more; without a mesh, gradients that are whole need none.
        assert collectives == (0 if how == "plain" and not with_mesh else 1) + (how == "tp")


def _norms_on_two_axes(how: str, with_mesh: bool) -> list[float]:
    """HSDP and FSDP over tensor parallelism, on 2 × 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model: nn.Module = build()
    if how == "hsdp":
        fully_shard(model, mesh=mesh)
    else:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["inner"], plan)  # type: ignore[arg-type]
        for part in (model.up, model.down, model):  # type: ignore[attr-defined]
            fully_shard(part, mesh=mesh["outer"])  # type: ignore[arg-type]
    loss_of(model).backward()
    plan = plan_of(model, mesh if with_mesh else None)
    return [float(global_norm(plan, order).norm) for order in ORDERS]


@pytest.mark.parametrize("with_mesh", [True, False])
@pytest.mark.parametrize("how", ["hsdp", "fsdp over tp"])
def test_two_axes(ranks4: Ranks, how: str, with_mesh: bool) -> None:
    found = ranks4(_norms_on_two_axes, how, with_mesh)
    assert found == [found[0]] * 4
    assert found[0] == pytest.approx([exact(order) for order in ORDERS], rel=1e-6)


def _pipeline(with_mesh: bool) -> list[float]:
    """Two stages with parameters of their own, each fully sharded over two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model = build()
    stage = nn.ModuleList(
        [model.embed, model.norm] if mesh.get_local_rank("pp") == 0 else [model.up, model.down, model.head]
    )
    loss_of(model).backward()
    grads = [p.grad for p in stage.parameters()]
    parameters = [distribute_tensor(p.detach(), mesh["dp"], [Shard(0)]) for p in stage.parameters()]
    shards = [distribute_tensor(g, mesh["dp"], [Shard(0)]) for g in grads if g is not None]
    for p, g in zip(parameters, shards, strict=True):
        p.grad = g
    plan = NormPlan(parameters, mesh=mesh if with_mesh else None)
    return [float(global_norm(plan, order, pp_mesh=mesh["pp"]).norm) for order in ORDERS]


@pytest.mark.parametrize("with_mesh", [True, False])
def test_pipeline_stages_are_summed(ranks4: Ranks, with_mesh: bool) -> None:
    found = ranks4(_pipeline, with_mesh)
    assert found == [found[0]] * 4
    assert found[0] == pytest.approx([exact(order) for order in ORDERS], rel=1e-6)


def _partials() -> tuple[int, list[str], bool]:
    model, _ = cut("tp")
    with CommDebugMode() as counted:
        reduced = reduce_partial([p.grad for p in model.parameters()])  # type: ignore[misc]
    issued = counted.get_total_counts()
    whole = build()
    loss_of(whole).backward()
    named = dict(zip([n for n, _ in model.named_parameters()], reduced, strict=True))
    same = all(
        torch.allclose(g.full_tensor() if isinstance(g, DTensor) else g, p.grad, atol=1e-6)  # type: ignore[arg-type]
        for (_, p), g in zip(whole.named_parameters(), reduced, strict=True)
    )
    return issued, [str(named[n].placements) for n in ("norm.weight", "norm.bias")], same  # type: ignore[attr-defined]


def test_partial_gradients_are_summed_by_one_collective(ranks2: Ranks) -> None:
    for issued, placements, same in ranks2(_partials):
        assert issued == 1
        assert placements == ["(Replicate(),)"] * 2
        assert same


def _with(value: float, order: float, rank: int) -> float:
    model, mesh = cut("fsdp")
    if dist.get_rank() == rank:
        local = model.up.weight.grad._local_tensor  # type: ignore[union-attr]
        local[0, 0] = value
    return float(global_norm(plan_of(model, mesh), order).norm)


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_what_is_extreme_on_one_rank_is_seen_by_all(ranks2: Ranks, value: float, order: float) -> None:
    first, second = ranks2(_with, value, order, 1)
    assert repr(first) == repr(second)
    assert math.isnan(first) if math.isnan(value) else first == pytest.approx(value, rel=1e-6)


def _some_missing() -> tuple[float, float]:
    """A rank without any gradient, and one parameter without on both: an empty rank takes part."""
    model, mesh = cut("fsdp")
    missing = {"head.weight"} if dist.get_rank() == 0 else {n for n, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if name in missing:
            parameter.grad = None
    there = [p.grad._local_tensor for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
    mine = sum(float(t.double().square().sum()) for t in there)
    return float(global_norm(plan_of(model, mesh), 2.0).norm), mine


def test_an_empty_rank_takes_part(ranks2: Ranks) -> None:
    (first, mine), (second, nothing) = ranks2(_some_missing)
    assert first == second == pytest.approx(math.sqrt(mine), rel=1e-6)
    assert nothing == 0


def _wrong_on_one_rank() -> str:
    model, mesh = cut("fsdp")
    if dist.get_rank() == 1:
        model.register_parameter("stray", nn.Parameter(torch.zeros(3)))
        sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (3,), check_invariants=True)
        model.stray.grad = sparse  # type: ignore[union-attr]
    try:
        global_norm(plan_of(model, mesh), 2.0)
    except ValueError as error:
        return str(error)
    return "no error"


def test_what_is_wrong_on_one_rank_is_raised_on_all(ranks2: Ranks) -> None:
    peer, culprit = ranks2(_wrong_on_one_rank)
    assert "gradient of stray: it is sparse" in culprit
    assert "another rank found a gradient that cannot be counted" in peer
