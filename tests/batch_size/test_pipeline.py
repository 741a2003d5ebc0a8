"""The noise scale under pipeline parallelism: a window's pieces are the micro-batches of the schedule."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import sonde
from tests.batch_size.cut_models import assert_same_values, n_collectives
from tests.batch_size.norms_by_hand import adam_weights
from tests.batch_size.sharded_loops import Block
from tests.oracles import window_by_hand
from tests.ranks import Ranks, mesh_of

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
        adam: Adam's metric is measured too, and compared in place of the plain one.
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
    adam: bool = False


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
}
WIDER = {
    "FSDP2": Pipeline("Schedule1F1B", dp=2, weighted=True),
    "FSDP2, no clip": Pipeline("ScheduleInterleaved1F1B", LOOP, dp=2, clips=False),
    "DDP": Pipeline("Schedule1F1B", dp=2, ddp=True, weighted=True),  # torch's DDP cannot run GPipe
    "DDP, no clip": Pipeline("Schedule1F1B", dp=2, ddp=True, clips=False),
    "TP": Pipeline("Schedule1F1B", tp=2, weighted=True),
    "SP": Pipeline("Schedule1F1B", tp=2, in_sequence=True, weighted=True),
    "SP, no clip": Pipeline("Schedule1F1B", tp=2, in_sequence=True, clips=False),
    "FSDP2, Adam's metric": Pipeline("Schedule1F1B", dp=2, adam=True),
    "TP, Adam's metric, no clip": Pipeline("Schedule1F1B", tp=2, clips=False, adam=True),
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
        options |= {"groups": part_of} | ({"metric": ("euclidean", "adam")} if pipe.adam else {})
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
            solved = probe.window("adam" if moments else None)
            result["windows"].append(
                solved
                and {"": (solved.total.trace_cov, solved.total.grad_sq)}
                | {g: (e.trace_cov, e.grad_sq) for g, e in zip(probe._reader.groups, solved.per_group, strict=True)}
            )
            result["by hand"].append(exact)
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
    named = {name: p for module in modules for name, p in module.named_parameters()}
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


def _train(pipe: Pipeline, probed: bool) -> dict[str, Any]:
    return train(pipe, probed=probed)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("GPipe", marks=pytest.mark.shows("noise scale", "PP")),
        pytest.param("FSDP2", marks=pytest.mark.shows("noise scale", "PP with FSDP2")),
        pytest.param("DDP", marks=pytest.mark.shows("noise scale", "PP with DDP")),
        pytest.param("TP", marks=pytest.mark.shows("noise scale", "PP with TP")),
        pytest.param("SP", marks=pytest.mark.shows("noise scale", "PP with SP")),
        pytest.param("FSDP2, Adam's metric", marks=pytest.mark.shows("adam metric", "PP with FSDP2")),
        pytest.param("TP, Adam's metric, no clip", marks=pytest.mark.shows("adam metric", "PP with TP")),
        *list(PIPELINES)[1:],
        *("FSDP2, no clip", "DDP, no clip", "SP, no clip"),
    ],
)
def test_values_and_training_unchanged(request: pytest.FixtureRequest, name: str) -> None:
    """One collective a window carries the pieces, the gradient and the clip; all ranks get the same numbers."""
    pipe = (PIPELINES | WIDER)[name]
    ranks: Ranks = request.getfixturevalue("ranks2" if name in PIPELINES else "ranks4")
    check(ranks(_train, pipe, True), ranks(_train, pipe, False), pipe)


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"dp": 4, "replicas": 2}, marks=pytest.mark.shows("noise scale", "PP with HSDP")),
        pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.shows("noise scale", "PP with FSDP2 over TP")),
    ],
)
def test_pipeline_over_two_axes(ranks8: Ranks, axes: dict[str, int]) -> None:
    pipe = Pipeline("Schedule1F1B", weighted=True, **axes)  # type: ignore[arg-type]
    check(ranks8(_train, pipe, True), ranks8(_train, pipe, False), pipe)


def check(probed: list[dict[str, Any]], plain: list[dict[str, Any]], pipe: Pipeline) -> None:
    for result, without in zip(probed, plain, strict=True):
        assert result["alerts"] == {}
        for window, exact in zip(result["windows"], result["by hand"], strict=True):
            assert window is not None, result["reading"].dropped
            assert window.keys() == exact.keys()
            in_order = [exact[part] for part in window]
            assert_same_values(list(window.values()), in_order, result["reading"].effective_units)
        assert all(map(torch.equal, result["weights"], without["weights"]))
        assert result["norms"] == without["norms"]
        n_gathered = WINDOWS if pipe.adam and pipe.dp > 1 else 0
        # Partial gradients of norms are summed piece by piece, and without a clip once more.
        n_partial = WINDOWS * (N_PIECES + (not pipe.clips)) if pipe.in_sequence else 0
        n_more = result["collectives"] - without["collectives"]
        assert n_more == (0 if pipe.clips else WINDOWS) + n_gathered + n_partial
    assert len({str(result["windows"]) for result in probed}) == 1


def _misused(how: str) -> tuple[str, dict[str, int]]:
    """What is said, and which windows were dropped."""
    mesh, model, schedule, numbers, n_stages = stages_of(PIPELINES["GPipe"])
    options: Any = {"unit": "sequences", "verbose": False, "every": 1, "units_per_piece": UNITS}
    said = ""
    with sonde.attach(model, mesh=mesh, pp_mesh=mesh["pp"], **options) as probe:
        try:
            if how == "outside":
                run(schedule, numbers, n_stages, 0, 0)
            else:
                n = {"fewer": 2, "more": 6}.get(how, N_PIECES)
                given: Any = {"too few units": {"units": [1.0]}, "a bad weight": {"weights": 0.0}}.get(how, {})
                with probe.pieces(n, **given):
                    run(schedule, numbers, n_stages, 0, 0)
            probe.step()
        except (RuntimeError, ValueError) as error:
            said = str(error)
        dropped = dict(probe.reading().dropped) if how in ("fewer", "more", "outside") else {}
    return said, dropped


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("too few units", "units must have one number for each of 4 micro-batches, got 1"),
        ("a bad weight", "weight must be positive and finite, got 0.0"),
    ],
)
def test_misuse_is_refused(ranks2: Ranks, how: str, message: str) -> None:
    for said, _ in ranks2(_misused, how):
        with pytest.raises(ValueError, match=message):
            raise ValueError(said)


@pytest.mark.parametrize("how", ["fewer", "more", "outside"])
def test_micro_batches_that_cannot_be_told_apart_drop_the_window(ranks2: Ranks, how: str) -> None:
    message = "ran outside pieces()" if how == "outside" else "another number of gradients than the schedule"
    for said, dropped in ranks2(_misused, how):
        assert said == ""
        assert [message in reason for reason in dropped] == [True]


def _filled_up(pipe: Pipeline) -> tuple[list[Any], list[Any]]:
    """One data-parallel rank runs schedules without pieces, in which no target counts, so that its peers can reduce."""
    mesh, model, schedule, numbers, n_stages = stages_of(pipe)
    dp_rank = mesh.get_local_rank("dp")
    options: dict[str, Any] = {"unit": "sequences", "verbose": False, "every": 1, "groups": part_of}
    with sonde.attach(model, mesh=mesh, pp_mesh=mesh["pp"], **options) as probe:
        values, by_one = [], []
        for window in range(WINDOWS):
            if dp_rank == 0:
                with probe.pieces(N_PIECES, units=UNITS, weights=weights(0, window, True)):
                    run(schedule, numbers, n_stages, 0, window)
            else:
                inputs, targets = data(1, window)
                nothing = {"target": torch.full_like(targets, IGNORED)} if n_stages - 1 in numbers else {}
                schedule.step(*([inputs] if 0 in numbers else []), **nothing)
            probe.step()
            model.zero_grad()
            solved = probe.window()
            values.append(solved and (solved.total.trace_cov, solved.total.grad_sq))
            by_one.append(by_hand(whole_model(model, mesh), replace(pipe, dp=1), window)[""])
        return values, by_one


@pytest.mark.parametrize("ddp", [True, False])
def test_a_rank_without_micro_batches_fills_up_from_the_first_window_on(ranks4: Ranks, ddp: bool) -> None:
    for values, by_one in ranks4(_filled_up, Pipeline("Schedule1F1B", dp=2, ddp=ddp, weighted=True)):
        for value, (trace_cov, grad_sq) in zip(values, by_one, strict=True):
            # Averaged over two ranks, the gradient is half as large as that of the one rank with data.
            assert value == pytest.approx((trace_cov / 4, grad_sq / 4), abs=1e-5 * trace_cov / 4)


def _refusal(name: str, axis: str | None = None, tap: Any = "auto") -> str:
    """What attach says, where `mesh=` is all ranks or one of their axes."""
    mesh, model, *_ = stages_of((PIPELINES | WIDER)[name])
    try:
        sonde.attach(
            model, unit="sequences", verbose=False, mesh=mesh[axis] if axis else mesh, pp_mesh=mesh["pp"], tap=tap
        )
    except ValueError as error:
        return str(error)
    return "no error"


def test_buckets_of_a_pipeline_are_refused(ranks4: Ranks) -> None:
    """They hold a whole window, and the schedule's micro-batches are the pieces."""
    for said in ranks4(_refusal, "DDP", None, "comm_hook"):
        assert "got a model of kind DistributedDataParallel in pipeline stages" in said


def test_a_mesh_without_the_stages_is_refused(ranks2: Ranks) -> None:
    for said in ranks2(_refusal, "GPipe", "dp"):
        assert "pp_mesh= is no axis of mesh=" in said
