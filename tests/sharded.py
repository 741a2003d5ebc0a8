"""One small model, its gradients by one process in float64, and the same model cut over ranks in every way."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import mesh_of

VOCABULARY = 13  # uneven over 2 and 4 ranks
WIDTH, HIDDEN, LENGTH, BATCH = 8, 12, 6, 4


class Front(nn.Module):
    """The layers of the first pipeline stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY + 3, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(1))  # an empty shard on all ranks but one

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.embed(tokens)) * self.scale
        return hidden


class Experts(nn.Module):
    """Two experts; every token goes through both. Under expert parallelism a rank holds one expert."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, WIDTH, WIDTH))
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        if self.group is not None:
            x = _SumGradients.apply(x, self.group)
        mixed: Tensor = torch.relu(x @ self.w[0])
        for w in self.w[1:]:
            mixed = mixed + torch.relu(x @ w)
        return _Sum.apply(mixed, self.group) if self.group is not None else mixed  # type: ignore[no-any-return]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Back(nn.Module):
    """The layers of the second stage."""

    def __init__(self, *, experts: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.experts = Experts() if experts else nn.Identity()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.head(self.experts(self.down(torch.relu(self.up(hidden)))))
        return out.contiguous()  # pipelining in torch 2.9 refuses the strides of an uneven gather


class Model(nn.Module):
    """A model with every kind of layer that tensor parallelism supports."""

    def __init__(self, *, experts: bool = False) -> None:
        super().__init__()
        self.front, self.back = Front(), Back(experts=experts)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.back(self.front(tokens))
        return out


def build(*, experts: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(experts=experts)


def tokens(part: int = 0, n_parts: int = 1) -> Tensor:
    """The batch, or a data-parallel rank's part of it."""
    everything = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return everything.chunk(n_parts)[part]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def backward(model: nn.Module, part: int = 0, n_parts: int = 1) -> None:
    loss_of(model(tokens(part, n_parts)), tokens(part, n_parts)).backward()


@functools.cache
def exact_gradients(*, experts: bool = False) -> dict[str, Tensor]:
    """The gradients of one process in float64, by name."""
    model = build(experts=experts).double()
    backward(model)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def norm_of(gradients: Mapping[str, Tensor], order: float) -> float:
    joined = torch.cat([g.flatten().double() for g in gradients.values()])
    return float(torch.linalg.vector_norm(joined, order))


@dataclass(frozen=True)
class Cut:
    """A rank's part of the model, with its gradients.

    Attributes:
        parameters: by their names in `Model`.
        mesh: all ranks.
        pp_mesh: the pipeline stages.
        replicas: the replicas to declare.
        collectives: how many a norm takes without a mesh, not counting reductions of partial gradients.
        partial: how many reductions of partial gradients it takes.
        experts: whether the model has experts.
        keep: objects that must stay alive.
    """

    parameters: dict[str, nn.Parameter]
    mesh: DeviceMesh
    pp_mesh: DeviceMesh | None = None
    replicas: dict[str, int] | None = None
    collectives: int = 0
    partial: int = 0
    experts: bool = False
    keep: Any = None


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name.removeprefix("module."): p for name, p in model.named_parameters()}


def _tensor_parallel(model: Model, mesh: DeviceMesh, embedding: str = "rowwise") -> None:
    plan: dict[str, Any] = {
        "front.embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        if embedding == "rowwise"
        else ColwiseParallel(output_layouts=Replicate()),
        "back.up": ColwiseParallel(),
        "back.down": RowwiseParallel(output_layouts=Replicate()),
        "back.head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def ddp() -> Cut:
    rank, n = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(build())
    backward(model, rank, n)
    return Cut(_named(model), mesh_of((n,)), keep=model)


def fsdp(*, offload: bool = False, dtype: torch.dtype = torch.float32) -> Cut:
    n = dist.get_world_size()
    mesh = mesh_of((n,))
    model = build().to(dtype)
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    for part in (model.front, model.back, model):
        fully_shard(part, mesh=mesh, **options)
    backward(model, dist.get_rank(), n)
    return Cut(_named(model), mesh, collectives=1, keep=model)


def hsdp() -> Cut:
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    model = build()
    fully_shard(model, mesh=mesh)
    backward(model, dist.get_rank(), 4)
    return Cut(_named(model), mesh, collectives=1, keep=model)


def context_parallel() -> Cut:
    """Sharded over data- and context-parallel ranks together, as trainers do. Each rank sees a part of the data."""
    mesh = mesh_of((2, 2), ("dp", "cp"))
    model = build()
    fully_shard(model, mesh=mesh._flatten("dp_cp"))
    backward(model, dist.get_rank(), 4)
    return Cut(_named(model), mesh, collectives=1, keep=model)


def tp(embedding: str = "rowwise") -> Cut:
    mesh = mesh_of((2,))
    model = build()
    _tensor_parallel(model, mesh, embedding)
    backward(model)
    return Cut(_named(model), mesh, collectives=1, keep=model)


class _SequenceParallelModel(nn.Module):
    """Each rank runs embedding and norm on a part of the sequence; later layers see the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        whole = build()
        self.front, self.back = whole.front, whole.back

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.front.norm(self.front.embed(tokens))
        out: Tensor = self.back(hidden)
        return out


def sequence_parallel() -> Cut:
    mesh = mesh_of((2,))
    model = _SequenceParallelModel()
    plan: dict[str, Any] = {
        "front.embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "front.norm": SequenceParallel(),
        "back.up": ColwiseParallel(input_layouts=Shard(1)),
        "back.down": RowwiseParallel(output_layouts=Replicate()),
        "back.head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    backward(model)
    # This model does not use `scale`, which so has no gradient.
    return Cut(_named(model), mesh, collectives=1, partial=1, keep=model)


def fsdp_over_tp() -> Cut:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = build()
    _tensor_parallel(model, mesh["tp"])
    for part in (model.front, model.back, model):
        fully_shard(part, mesh=mesh["dp"])
    backward(model, mesh.get_local_rank("dp"), 2)
    # Some gradients are cut over both axes, others over dp alone: the mesh of the first counts them all.
    return Cut(_named(model), mesh, collectives=1, keep=model)


def experts(*, as_dtensors: bool) -> Cut:
    """Dense parameters on all four ranks, each expert on two of them."""
    mesh = mesh_of((2, 2), ("dp", "ep"))
    model = build(experts=True)
    mine = mesh.get_local_rank("ep")
    old = model.back.experts
    assert isinstance(old, Experts)
    old.group = mesh.get_group("ep")
    old.w = nn.Parameter(old.w[mine : mine + 1].detach().clone())
    backward(model, mesh.get_local_rank("dp"), 2)
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=mesh.get_group("dp"))
            p.grad /= 2
    named = _named(model)
    if as_dtensors:
        w = named["back.experts.w"]
        cut = [Replicate(), Shard(0)]
        named["back.experts.w"] = nn.Parameter(DTensor.from_local(w.detach(), mesh, cut))
        assert w.grad is not None
        named["back.experts.w"].grad = DTensor.from_local(w.grad, mesh, cut)
        return Cut(named, mesh, collectives=1, experts=True, keep=model)
    return Cut(named, mesh, replicas={"back.experts.w": 2}, experts=True, keep=model)


def pipeline(*, dp: int = 1, tp: int = 1) -> Cut:
    """Two stages under torch's own schedule, each over dp × tp ranks."""
    mesh = mesh_of((2, dp, tp), ("pp", "dp", "tp"))
    stage = mesh.get_local_rank("pp")
    model = build()
    if tp > 1:
        _tensor_parallel(model, mesh["tp"])
    module: nn.Module = model.back if stage else model.front
    if dp > 1:
        fully_shard(module, mesh=mesh["dp"])
    pipe = PipelineStage(module, stage, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    mine = tokens(mesh.get_local_rank("dp"), dp)
    if torch.__version__ < (2, 11):
        # This first exchange sends int64 and receives fp32 in torch 2.9, which gloo refuses. Only NCCL needs it.
        pipe._get_init_p2p_neighbors_ops = list
    schedule = ScheduleGPipe(pipe, n_microbatches=2, loss_fn=loss_of)
    if stage:
        schedule.step(target=mine)
    else:
        schedule.step(mine)
    prefix = "back." if stage else "front."
    named = {prefix + name: p for name, p in module.named_parameters()}
    sharding = (dp > 1) + (tp > 1)
    return Cut(named, mesh, pp_mesh=mesh["pp"], collectives=1 + sharding, keep=(model, pipe))


def whole(gradient: Tensor) -> Tensor:
    """The whole gradient, on every rank."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


WAYS: dict[str, tuple[int, Any]] = {
    "DDP": (2, ddp),
    "FSDP2": (2, fsdp),
    "FSDP2 on 4 ranks": (4, fsdp),
    "FSDP2, offloaded": (2, functools.partial(fsdp, offload=True)),
    "HSDP": (4, hsdp),
    "FSDP2 over context parallelism": (4, context_parallel),
    "TP, row-wise embedding": (2, tp),
    "TP, column-wise embedding": (2, functools.partial(tp, "colwise")),
    "TP with sequence parallelism": (2, sequence_parallel),
    "FSDP2 over TP": (4, fsdp_over_tp),
    "EP, plain experts": (4, functools.partial(experts, as_dtensors=False)),
    "EP, experts as DTensors": (4, functools.partial(experts, as_dtensors=True)),
    "PP": (2, pipeline),
    "PP × FSDP2": (4, functools.partial(pipeline, dp=2)),
    "PP × TP": (4, functools.partial(pipeline, tp=2)),
    "PP × FSDP2 × TP": (8, functools.partial(pipeline, dp=2, tp=2)),
}
"""Ways of cutting the model: how many ranks each takes, and the function that does it."""

ORDERS = [1.0, 2.0, 3.0, math.inf]
