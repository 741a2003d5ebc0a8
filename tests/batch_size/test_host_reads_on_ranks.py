"""What sonde reads on the host while real ranks train: only what a CPU has at hand, where the device is a CPU.

A GPU is waited for by such reads. `test_host_reads.py` runs one process on a device that forbids them. Here each read
of a value is noted with the function of sonde that made it, over the set-ups that need several ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import sonde
from tests.batch_size import context_loops, expert_loops
from tests.batch_size.ddp_loops import in_bf16
from tests.batch_size.host_reads import AT_HAND, COPIES, OF_A_MESH, HostReads, nothing_at_hand
from tests.batch_size.loops import batch, mean_loss, small_model
from tests.batch_size.sharded_loops import Loop, data_rank, shard, tokens
from tests.batch_size.sharded_loops import build as build_sharded
from tests.batch_size.sharded_loops import loss_of as loss_of_sharded
from tests.mutants import Mutant
from tests.ranks import Ranks, mesh_of

WATCHED = 3
"""Windows in which reads are noted; twice as many where not all windows are measured."""
WINDOWS_BEFORE = 15
"""There they come after these."""
METRICS = ("euclidean", "sign")  # the others need whole matrices or moments


SETUPS: dict[str, dict[str, Any]] = {
    "DDP, leaf hooks": {"tap": "leaf"},
    "DDP, buckets": {"tap": "comm_hook"},
    "DDP, a hook of the user's": {"tap": "comm_hook", "comm_hook": in_bf16, "clips": False},
    "DDP, a GradScaler": {"scaled": True},
    "DDP, further metrics": {"metric": (*METRICS, "adam", "spectral"), "tap": "leaf"},
    "DDP, one window in three": {"every": 3},
    "DDP, a budget": {"every": None, "budget": 0.5},
    "DDP, single examples": {"per_example": "always"},
    "DDP, a clip folded into the optimizer": {"folds": True},
}


def under_ddp(
    *, clips: bool = True, scaled: bool = False, folds: bool = False, comm_hook: Any = None, **options: Any
) -> set[str]:
    torch.manual_seed(0)
    model = DistributedDataParallel(small_model())
    optimizer = adam(model, fused=folds)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scaled else None
    options = {"every": 1, "comm_hook": comm_hook, "grad_scaler": scaler, "log": sonde.RunLog(every=2)} | options
    plan = sonde.group_parameters_for_norm(list(model.parameters()))
    generator = torch.Generator().manual_seed(dist.get_rank())
    reads = HostReads()
    with sonde.attach(model, optimizer, unit="rows", verbose=False, **options) as probe:
        for _ in watched(reads, options["every"]):
            for k in range(2):
                sync = contextlib.nullcontext() if k else model.no_sync()
                with probe.piece(units=4), sync:
                    loss = mean_loss(model, *batch(4, generator))
                    (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.unscale_(optimizer)
            if clips and not folds:
                probe.clip_grad_norm_(0.1)
            else:
                probe.step()
            if folds:
                sonde.clip_grad_norm_distributed_(plan, 0.1, fold_into=optimizer)
            scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()
            optimizer.zero_grad()
    return reads.places


def watched(reads: HostReads, every: int | None) -> Iterator[int]:
    """Numbers of windows; in the last ones reads are noted."""
    before = 0 if every == 1 else WINDOWS_BEFORE
    yield from range(before)
    with reads:
        yield from range(before, before + (WATCHED if every == 1 else 2 * WATCHED))


def adam(model: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    """It steps parameters of one kind in a few operators: each operator is looked at, and these are none of sonde's."""
    trained = [p for p in model.parameters() if p.requires_grad]
    are_alike = len({type(p) for p in trained}) == 1
    return torch.optim.AdamW(trained, lr=1e-2, fused=fused, foreach=are_alike and not fused)


SHARDED = {
    "FSDP2": Loop(),
    "FSDP2, only windows": Loop(clips=False),
    "FSDP2, mixed precision": Loop(mixed=True),
    "FSDP2, offloaded": Loop(offload=True),
    "FSDP2, further metrics": Loop(options={"metric": METRICS}),
    "FSDP2, one window in three": Loop(options={"every": 3}),
    "FSDP2, single examples": Loop(covered=True, options={"per_example": "always"}),
    "tensor parallelism": Loop(cut="tp"),
    "sequence parallelism": Loop(cut="sp", clips=False),
}
ON_FOUR_RANKS = {
    "HSDP": Loop(mesh=(2, 2)),
    "HSDP, further metrics": Loop(mesh=(2, 2), clips=False, options={"metric": METRICS}),
    "FSDP2 over tensor parallelism": Loop(cut="fsdp over tp"),
    "FSDP2 over sequence parallelism": Loop(cut="fsdp over sp", clips=False),
}


def of_shards(loop: Loop) -> set[str]:
    model = shard(build_sharded(loop), loop)
    options = {"per_example": "never"} | loop.options
    return of_windows(
        model, lambda window, k: tokens(data_rank(loop), window, k), loss_of_sharded, loop, clips=loop.clips, **options
    )


def of_windows(
    model: nn.Module, ids_of: Callable[[int, int], Tensor], loss_of: Any, loop: Any, *, clips: bool, **options: Any
) -> set[str]:
    """Reads in a few windows of two pieces."""
    optimizer = adam(model)
    options = {"every": 1} | options
    reads = HostReads()
    with sonde.attach(model, optimizer, unit="rows", verbose=False, **options) as probe:
        for window in watched(reads, options["every"]):
            for k in range(2):
                ids = ids_of(window, k)
                with probe.piece(units=len(ids)):
                    loss_of(model, ids, loop).backward()
            probe.clip_grad_norm_(0.1) if clips else probe.step()
            optimizer.step()
            optimizer.zero_grad()
    assert (probe.reading().windows == window + 1) == (options["every"] == 1)
    return reads.places


class Adapted(nn.Module):
    """A frozen layer that FSDP2 cuts, and plain adapters whose gradients hooks average."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 6))
        fully_shard(self, mesh=mesh_of((2,)), ignored_params={self.a, self.b})
        for adapter in (self.a, self.b):
            adapter.register_post_accumulate_grad_hook(average)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.a @ self.b
        return out


def average(p: Tensor) -> None:
    assert p.grad is not None
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


def of_adapters() -> set[str]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return of_windows(
        Adapted(),
        lambda window, k: torch.randn(2 + k, 6, generator=generator),
        lambda model, x, loop: model(x).square().mean(),
        None,
        clips=True,
        per_example="never",
    )


def of_shared_sequences(loop: context_loops.Loop) -> set[str]:
    """Under context parallelism."""
    model, arguments = context_loops.cut(loop)
    rank, part = divmod(dist.get_rank(), loop.n_sharing)

    def loss_of_part(model: nn.Module, ids: Tensor, loop: context_loops.Loop) -> Tensor:
        return context_loops.loss_of(model, ids, loop, part, loop.n_sharing)

    options = arguments | loop.options
    return of_windows(
        model,
        lambda window, k: context_loops.tokens(rank, window, k),
        loss_of_part,
        loop,
        clips=loop.clips,
        per_example="never",
        **options,
    )


def of_experts(loop: expert_loops.Loop) -> set[str]:
    """Under expert parallelism, where FSDP2 reduces all gradients."""
    model, arguments = expert_loops.cut(loop)
    rank = dist.get_rank()
    return of_windows(
        model,
        lambda window, k: expert_loops.tokens(rank, window, k),
        expert_loops.loss_of,
        loop,
        clips=loop.clips,
        **arguments,
    )


def in_pipeline(over: str = "") -> set[str]:
    """Two stages, of one rank each or of two under DDP or FSDP2."""
    mesh = mesh_of((2, dist.get_world_size() // 2), ("pp", "dp"))
    at = mesh.get_local_rank("pp")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    if over == "DDP":
        model = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    elif over == "FSDP2":
        fully_shard(model, mesh=mesh["dp"])
    stage = PipelineStage(model, at, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
    x = torch.randn(8, 8)
    probe = sonde.attach(model, unit="rows", verbose=False, every=1, mesh=mesh, pp_mesh=mesh["pp"])
    with probe, HostReads() as reads:
        for _ in range(3):
            with probe.pieces(4, units=2):
                schedule.step(*([] if at else [x]), **({"target": x} if at else {}))
            probe.clip_grad_norm_(0.1)
            model.zero_grad()
    return reads.places


def everything() -> dict[str, set[str]]:
    """Reads of every set-up on this rank."""
    found = {name: under_ddp(**setup) for name, setup in SETUPS.items()}
    found |= {name: of_shards(loop) for name, loop in SHARDED.items()}
    found["LoRA below FSDP2"] = of_adapters()
    found["context parallelism under DDP"] = of_shared_sequences(context_loops.Loop(cut="ddp", clips=False))
    # torch 2.9 itself fails in a pipeline's first exchange over gloo.
    return found | ({"a pipeline": in_pipeline()} if torch.__version__ >= "2.11" else {})


def everything_on_four_ranks() -> dict[str, set[str]]:
    found = {name: of_shards(loop) for name, loop in ON_FOUR_RANKS.items()}
    in_metrics = {"metric": METRICS, "staging_mib": 8.0}
    found["FSDP2 over context parallelism"] = of_shared_sequences(context_loops.Loop())
    found["the same, further metrics"] = of_shared_sequences(context_loops.Loop(options=in_metrics))
    found["expert parallelism"] = of_experts(expert_loops.Loop())
    over = ("DDP", "FSDP2") if torch.__version__ >= "2.11" else ()
    return found | {f"a pipeline over {name}": in_pipeline(name) for name in over}


def test_only_what_a_cpu_has_at_hand_is_read(ranks2: Ranks, ranks4: Ranks) -> None:
    seen: dict[str, str] = {}
    for of_rank in [*ranks2(everything), *ranks4(everything_on_four_ranks)]:
        seen |= {place: name for name, places in of_rank.items() for place in places}
    assert {place: name for place, name in seen.items() if place not in AT_HAND} == {}
    assert sorted(AT_HAND - set(seen)) == []  # no place is allowed that is not needed


def clips_of_a_gpu() -> dict[str, set[str]]:
    """Reads of clips on 2 ranks, or on 4, where nothing is at hand."""
    with nothing_at_hand():
        if dist.get_world_size() == 4:
            loops = {name: ON_FOUR_RANKS[name] for name in ("HSDP", "FSDP2 over tensor parallelism")}
            found = {name: of_shards(loop) for name, loop in loops.items()}
            return found | ({"a pipeline": in_pipeline("FSDP2")} if torch.__version__ >= "2.11" else {})
        found = {name: under_ddp(**SETUPS[name]) for name in SETUPS if name.endswith(("leaf hooks", "optimizer"))}
        clipped = ("FSDP2", "FSDP2, mixed precision", "tensor parallelism")
        found |= {name: of_shards(SHARDED[name]) for name in clipped}
        return found | {"LoRA below FSDP2": of_adapters()}


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_a_clip_reads_nothing_of_a_gpu(request: pytest.FixtureRequest, n_ranks: int) -> None:
    ranks: Ranks = request.getfixturevalue(f"ranks{n_ranks}")
    for of_rank in ranks(clips_of_a_gpu):
        found = {name: places - OF_A_MESH - COPIES for name, places in of_rank.items()}
        assert {name: places for name, places in found.items() if places} == {}


WAITS = Mutant(
    "reads the norm of a GPU", "sonde.gradient_norm.scaling:_coefficient", "if is_at_hand(exact.device):", "if True:"
)


def clip_that_waits() -> set[str]:
    with nothing_at_hand(), WAITS.applied():
        return of_shards(Loop())


def test_a_clip_that_waits_is_noticed(ranks2: Ranks) -> None:
    for places in ranks2(clip_that_waits):
        assert places - OF_A_MESH - COPIES == {"gradient_norm/scaling.py:_coefficient"}


READS = [
    Mutant(
        "a copy to the host",
        "sonde.batch_size.arrivals:Delivery.send",
        "start_copy_to_host(flat)",
        "start_copy_to_host(flat.cpu())",
    ),
    Mutant(
        "buckets",
        "sonde.batch_size.taps.ddp_buckets:DDPBucketTap._read",
        "self._witnessed |= elements",
        "self._witnessed |= elements; [float(each.sum()) for each in elements.values()]",
    ),
    Mutant(
        "shards",
        "sonde.batch_size.taps.window_reader:FinalGradient.witness",
        "elements: dict[int, Tensor] = {}",
        "elements = {}; [g.to_local().any().item() for g in grads]",
    ),
    Mutant(
        "single examples",
        "sonde.batch_size.per_example.example_window:ExampleWindow.end_piece",
        "self._n_pieces += 1",
        "self._n_pieces += 1; float(self._sq_weight)",
    ),
    Mutant(
        "shared sequences",
        "sonde.batch_size.taps.shared_pieces:ContextPiece._sum_next",
        "self._next += 1",
        "self._next += 1; float(buffer.sum())",
    ),
    Mutant(
        "experts",
        "sonde.batch_size.taps.shared_pieces:ExpertPieces.add",
        "self._squares.append(squares)",
        "self._squares.append(squares); bool(squares.any())",
    ),
]
BROKEN: dict[str, Callable[[], set[str]]] = {
    "a copy to the host": lambda: under_ddp(tap="leaf", clips=False),
    "buckets": lambda: under_ddp(tap="comm_hook"),
    "shards": lambda: of_shards(Loop()),
    "single examples": lambda: of_shards(SHARDED["FSDP2, single examples"]),
    "shared sequences": lambda: of_shared_sequences(context_loops.Loop(cut="ddp", clips=False)),
    "experts": lambda: of_experts(expert_loops.Loop()),
}


def mutated(mutants: list[Mutant]) -> dict[str, set[str]]:
    found = {}
    for mutant in mutants:
        with mutant.applied():
            found[mutant.name] = BROKEN[mutant.name]()
    return found


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_a_read_is_noticed(request: pytest.FixtureRequest, n_ranks: int) -> None:
    ranks: Ranks = request.getfixturevalue(f"ranks{n_ranks}")
    for of_rank in ranks(mutated, [mutant for mutant in READS if (mutant.name == "experts") == (n_ranks == 4)]):
        for name, places in of_rank.items():
            assert not places <= AT_HAND, name
