"""A small language model in pipeline stages, its training, and the same pieces on one process."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import sonde
from tests.batch_size.cut_models import n_collectives
from tests.batch_size.norms_by_hand import adam_weights
from tests.batch_size.sharded_loops import Block
from tests.oracles import window_by_hand
from tests.ranks import mesh_of

VOCABULARY, WIDTH, LENGTH, UNITS, N_PIECES, WINDOWS = 13, 8, 6, 3, 4, 2
UNEQUAL = (3.0, 1.0, 2.0, 2.5)
"""Units of a rank's micro-batches where these weigh by their tokens, as of packed sequences."""
IGNORED = -100


def parts() -> list[nn.Module]:
    """The model, in four parts that stages are made of."""
    torch.manual_seed(5)
    blocks = [Block(12), Block(12)]
    for block in blocks:
        block.dropout.p = 0.0
    return [nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY, bias=False)]


NAMES = ("embed", "block0", "block1", "head")


class Stage(nn.Module):
    """Some of the parts, under their names in the whole model."""

    def __init__(self, whole: list[nn.Module], which: list[int]) -> None:
        super().__init__()
        for i in which:
            self.add_module(NAMES[i], whole[i])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x.contiguous()


@dataclass(frozen=True)
class Pipeline:
    """How the model is cut and scheduled.

    Attributes:
        schedule: a class of torch's.
        looped: the order in which ranks take the four stages; None for two stages of two parts.
        dp: data-parallel ranks, by FSDP2 or DDP.
        tp: ranks of tensor parallelism.
        in_sequence: with sequence parallelism between tensor-parallel layers.
        replicas: copies that HSDP keeps of the shards, on this many of the data-parallel ranks.
        ddp: data parallelism by DDP.
        clips: the probe clips.
        weighted: micro-batches weigh by their tokens.
        metric: as for attach. The last is compared; before Adam's exists, the first.
    """

    schedule: str
    looped: tuple[tuple[int, ...], ...] | None = None
    dp: int = 1
    tp: int = 1
    in_sequence: bool = False
    replicas: int = 1
    ddp: bool = False
    clips: bool = True
    weighted: bool = False
    metric: tuple[str, ...] = ("euclidean",)

    @property
    def adam(self) -> bool:
        return "adam" in self.metric


TOO, ALONE = ("euclidean", "adam"), ("adam",)
LOOP, V = ((0, 2), (1, 3)), ((0, 3), (1, 2))
PIPELINES = {
    "GPipe": Pipeline("ScheduleGPipe"),
    "1F1B": Pipeline("Schedule1F1B", clips=False),
    "1F1B, weights": Pipeline("Schedule1F1B", weighted=True),
    "interleaved": Pipeline("ScheduleInterleaved1F1B", LOOP, weighted=True),
    "looped": Pipeline("ScheduleLoopedBFS", LOOP, clips=False),
    "zero bubble": Pipeline("ScheduleInterleavedZeroBubble", LOOP, weighted=True),
    "zero bubble in a V": Pipeline("ScheduleZBVZeroBubble", V, clips=False, weighted=True),
    "DualPipeV": Pipeline("ScheduleDualPipeV", V, weighted=True),
    "GPipe, Adam's metric": Pipeline("ScheduleGPipe", weighted=True, metric=ALONE),
    "zero bubble, Adam's metric": Pipeline("ScheduleInterleavedZeroBubble", LOOP, clips=False, metric=TOO),
}
WIDER = {
    "FSDP2": Pipeline("Schedule1F1B", dp=2, weighted=True),
    "FSDP2, no clip": Pipeline("ScheduleInterleaved1F1B", LOOP, dp=2, clips=False),
    "DDP": Pipeline("Schedule1F1B", dp=2, ddp=True, weighted=True),  # torch's DDP cannot run GPipe
    "DDP, no clip": Pipeline("Schedule1F1B", dp=2, ddp=True, clips=False),
    "TP": Pipeline("Schedule1F1B", tp=2, weighted=True),
    "SP": Pipeline("Schedule1F1B", tp=2, in_sequence=True, weighted=True),
    "SP, no clip": Pipeline("Schedule1F1B", tp=2, in_sequence=True, clips=False),
    "DDP, Adam's metric": Pipeline("Schedule1F1B", dp=2, ddp=True, weighted=True, metric=TOO),
    "TP, Adam's metric, no clip": Pipeline("Schedule1F1B", tp=2, clips=False, metric=TOO),
    "SP, Adam's metric": Pipeline("Schedule1F1B", tp=2, in_sequence=True, weighted=True, metric=TOO),
}


def tensor_parallel(module: nn.Module, mesh: Any, *, in_sequence: bool) -> None:
    between = Shard(1) if in_sequence else Replicate()
    whole: Any = RowwiseParallel(input_layouts=Replicate(), output_layouts=between) if in_sequence else None
    plan: dict[str, Any] = {
        "embed": whole or ColwiseParallel(output_layouts=between),
        "block*.up": ColwiseParallel(input_layouts=between),
        "block*.down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    parallelize_module(module, mesh, plan | ({"block*.norm": SequenceParallel()} if in_sequence else {}))


def part_of(name: str) -> str:
    return name.split(".")[0]


def data(rank: int, window: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a data-parallel rank's window, [N_PIECES · UNITS, LENGTH]; some targets are ignored."""
    generator = torch.Generator().manual_seed(100 * window + rank)
    ids = torch.randint(VOCABULARY, (N_PIECES * UNITS, LENGTH + 1), generator=generator)
    ignored = torch.rand(N_PIECES * UNITS, LENGTH, generator=generator) < 0.3
    return ids[:, :-1], ids[:, 1:].masked_fill(ignored, IGNORED)


def loss_of(logits: Tensor, targets: Tensor, weighted: bool) -> Tensor:
    """The mean over tokens that count, or their sum over a constant."""
    flat, wanted = logits.flatten(0, 1), targets.flatten()
    if weighted:
        return nn.functional.cross_entropy(flat, wanted, reduction="sum", ignore_index=IGNORED) / 20
    return nn.functional.cross_entropy(flat, wanted, ignore_index=IGNORED)


def units(rank: int, weighted: bool) -> list[float]:
    """Of each micro-batch."""
    return [UNEQUAL[(rank + k) % N_PIECES] for k in range(N_PIECES)] if weighted else [float(UNITS)] * N_PIECES


def weights(rank: int, window: int, weighted: bool) -> list[float]:
    if not weighted:
        return [1.0] * N_PIECES
    return [float((t != IGNORED).sum()) for t in data(rank, window)[1].chunk(N_PIECES)]


def stages_of(pipe: Pipeline) -> tuple[Any, nn.ModuleList, Any, tuple[int, ...], int]:
    """The mesh, this rank's stages, their schedule, their numbers, and how many stages there are."""
    shape, names = (2, pipe.dp, pipe.tp), ("pp", "dp", "tp")
    if pipe.replicas > 1:
        shape, names = (2, pipe.replicas, pipe.dp // pipe.replicas), ("pp", "replicate", "shard")
    mesh = mesh_of(shape, names)
    stage, whole = mesh.get_local_rank("pp"), parts()
    which = [[i] for i in pipe.looped[stage]] if pipe.looped else [[0, 1], [2, 3]][stage : stage + 1]
    modules: list[Any] = [Stage(whole, parts_of) for parts_of in which]
    if pipe.tp > 1:
        for module in modules:
            tensor_parallel(module, mesh["tp"], in_sequence=pipe.in_sequence)
    if pipe.ddp:
        modules = [DistributedDataParallel(m, process_group=mesh.get_group("dp")) for m in modules]
    elif pipe.dp > 1:
        axes = mesh["replicate", "shard"] if pipe.replicas > 1 else mesh["dp"]
        modules = [fully_shard(m, mesh=axes) for m in modules]
    n_stages = 4 if pipe.looped else 2
    numbers = pipe.looped[stage] if pipe.looped else (stage,)
    device, group = torch.device("cpu"), mesh.get_group("pp")
    stages = [PipelineStage(m, n, n_stages, device, group=group) for m, n in zip(modules, numbers, strict=True)]
    schedule_class: Any = getattr(schedules, pipe.schedule)
    schedule = schedule_class(
        stages if pipe.looped else stages[0],
        N_PIECES,
        loss_fn=lambda logits, targets: loss_of(logits, targets, pipe.weighted),
    )
    return mesh, nn.ModuleList(modules), schedule, numbers, n_stages


def run(schedule: Any, numbers: tuple[int, ...], n_stages: int, rank: int, window: int) -> None:
    tokens, targets = data(rank, window)
    inputs, wanted = [tokens] if 0 in numbers else [], {"target": targets} if n_stages - 1 in numbers else {}
    schedule.step(*inputs, **wanted)


def train(pipe: Pipeline, *, probed: bool = True) -> dict[str, Any]:
    mesh, model, schedule, numbers, n_stages = stages_of(pipe)
    dp_rank = dist.get_rank() // pipe.tp % pipe.dp
    optimizer = (torch.optim.AdamW if pipe.adam else torch.optim.SGD)(model.parameters(), lr=0.1)
    probe: Any = None
    if probed:
        options: dict[str, Any] = {"unit": "sequences", "verbose": False, "log": sonde.RunLog(every=1000), "every": 1}
        options |= {"groups": part_of, "metric": pipe.metric}
        probe = sonde.attach(model, optimizer, mesh=mesh, pp_mesh=mesh["pp"], **options)
    result: dict[str, Any] = {"windows": [], "by hand": [], "norms": []}
    n_sums = 0
    for window in range(WINDOWS):
        moments = whole_moments(model, optimizer, mesh) if pipe.adam and window and probed else None
        exact = by_hand(whole_model(model, mesh), pipe, window, moments) if probed else None
        before = n_collectives()
        of_pieces = {"units": units(dp_rank, pipe.weighted), "weights": weights(dp_rank, window, pipe.weighted)}
        with probe.pieces(N_PIECES, **of_pieces) if probe else contextlib.nullcontext():
            run(schedule, numbers, n_stages, dp_rank, window)
        if pipe.clips and probe:
            result["norms"].append(float(probe.clip_grad_norm_(0.1)))
        elif pipe.clips:
            norm = sonde.clip_grad_norm_(model.parameters(), 0.1, mesh=mesh, pp_mesh=mesh["pp"])
            result["norms"].append(float(norm))
        elif probe:
            probe.step()
        optimizer.step()
        optimizer.zero_grad()
        n_sums += n_collectives() - before
        if probe:
            solved = probe.window(pipe.metric[-1 if moments else 0])
            result["windows"].append(
                solved
                and {"": (solved.total.trace_cov, solved.total.grad_sq)}
                | {g: (e.trace_cov, e.grad_sq) for g, e in zip(probe._reader.groups, solved.per_group, strict=True)}
            )
            result["by hand"].append(exact if moments or pipe.metric != ALONE else None)
    result["collectives"] = n_sums
    if probe:
        result["reading"], result["alerts"] = probe.reading(), probe.alerts
        probe.close()
    result["weights"] = [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]
    return result


def whole_model(modules: nn.ModuleList, mesh: Any) -> dict[str, Tensor]:
    """Every parameter of all stages, on every rank."""
    own = {}
    for module in modules:
        for name, p in module.named_parameters():
            tensor = p.full_tensor() if isinstance(p, DTensor) else p
            own[name.removeprefix("module.")] = tensor.detach().double()
    return of_all_stages(own, mesh)


def of_all_stages(own: dict[str, Tensor], mesh: Any) -> dict[str, Tensor]:
    gathered: list[Any] = [None] * mesh["pp"].size()
    dist.all_gather_object(gathered, own, group=mesh.get_group("pp"))
    return {name: tensor for stage in gathered for name, tensor in stage.items()}


def whole_moments(modules: nn.ModuleList, optimizer: torch.optim.Optimizer, mesh: Any) -> dict[str, Tensor]:
    """Adam's weights of every parameter of all stages, on every rank."""
    named = {name.removeprefix("module."): p for module in modules for name, p in module.named_parameters()}
    return of_all_stages(adam_weights(optimizer, named), mesh)


def by_hand(
    values: dict[str, Tensor], pipe: Pipeline, window: int, moments: dict[str, Tensor] | None = None
) -> dict[str, tuple[float, float]]:
    """(tr Σ, |G|²) of the total and of each part, from whole gradients in float64; with moments in Adam's metric."""
    model = copy.deepcopy(Stage(parts(), [0, 1, 2, 3])).double()
    model.load_state_dict(values)
    names = [name for name, _ in model.named_parameters()]
    pieces, of_pieces, counts = [], [], []
    for rank in range(pipe.dp):
        tokens, targets = data(rank, window)
        of_pieces += weights(rank, window, pipe.weighted)
        counts += units(rank, pipe.weighted)
        for x, y in zip(tokens.chunk(N_PIECES), targets.chunk(N_PIECES), strict=True):
            loss = loss_of(model(x), y, pipe.weighted)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            roots = [moments[n].sqrt() if moments else torch.ones(()) for n in names]
            weighted = (g.mul(root).flatten() for g, root in zip(grads, roots, strict=True))
            pieces.append(dict(zip(names, weighted, strict=True)))
    solved = {}
    for part in NAMES:
        of_part = [torch.cat([piece[n] for n in names if n.split(".")[0] == part]) for piece in pieces]
        final = torch.stack(of_part).sum(0) / pipe.dp
        solved[part] = window_by_hand(of_part, of_pieces, counts, final)
    return {"": (sum(t for t, _ in solved.values()), sum(g for _, g in solved.values()))} | solved
