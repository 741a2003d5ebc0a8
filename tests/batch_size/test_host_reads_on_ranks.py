"""What sonde reads on the host while real ranks train: only what a CPU has at hand, where the device is a CPU.

A GPU is waited for by such reads. `test_host_reads.py` runs one process on a device that forbids them. Here each read
of a value is noted with the function of sonde that made it, over the set-ups that need several ranks.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import sonde
from tests.batch_size.ddp_loops import in_bf16
from tests.batch_size.loops import batch, mean_loss, small_model
from tests.batch_size.sharded_loops import Loop, shard, tokens
from tests.batch_size.sharded_loops import build as build_sharded
from tests.batch_size.sharded_loops import loss_of as loss_of_sharded
from tests.mutants import Mutant
from tests.pretend_device import reads_host, sonde_functions
from tests.ranks import Ranks, mesh_of

AT_HAND = {
    # A clip looks at its norm and at its ranks' errors, if they are on a CPU.
    "gradient_norm/sum_over_ranks.py:error_of_sum",
    "gradient_norm/scaling.py:_coefficient",
    "gradient_norm/scaling.py:is_one",
    "gradient_norm/fused_clip.py:fold",
    # torch works out a shard's place with tensors of its own, on the CPU, once for each placement.
    "parallel/placements.py:shard_of",
    # A mesh's ranks are a tensor on the CPU.
    "parallel/placements.py:axes_over",
}
"""Functions that read. Those of the norm look at the device first, and read nothing of a GPU."""

ARRIVED = "batch_size/delivery.py:receive"
"""Takes in copies that have arrived: what is read inside is on the host on any device."""
WINDOWS = 6


class HostReads(TorchDispatchMode):
    """Notes sonde's reads of values on this thread. (Callbacks of DDP run the same code on other threads.)"""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_read = reads_host(function, args, kwargs, lambda x: isinstance(x, torch.Tensor))
        if is_read and (functions := sonde_functions()) and ARRIVED not in functions:
            self.places.add(functions[0])
        return function(*args, **kwargs)


SETUPS: dict[str, dict[str, Any]] = {
    "DDP, leaf hooks": {"tap": "leaf"},
    "DDP, buckets": {"tap": "comm_hook"},
    "DDP, a hook of the user's": {"tap": "comm_hook", "comm_hook": in_bf16, "clips": False},
    "DDP, auto": {},
    "DDP, a GradScaler": {"scaled": True},
    "DDP, Adam's metric": {"metric": "adam", "tap": "leaf"},
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=folds)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scaled else None
    options = {"every": 1, "comm_hook": comm_hook, "grad_scaler": scaler, "log": sonde.RunLog(every=2)} | options
    plan = sonde.group_parameters_for_norm(list(model.parameters()))
    generator = torch.Generator().manual_seed(dist.get_rank())
    with sonde.attach(model, optimizer, unit="rows", verbose=False, **options) as probe, HostReads() as reads:
        for _ in range(WINDOWS):
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


SHARDED = {
    "FSDP2": Loop(),
    "FSDP2, only windows": Loop(clips=False),
    "FSDP2, mixed precision": Loop(mixed=True),
    "tensor parallelism": Loop(cut="tp"),
    "sequence parallelism": Loop(cut="sp", clips=False),
}


def of_shards(loop: Loop) -> set[str]:
    model = shard(build_sharded(loop), loop)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with sonde.attach(model, optimizer, unit="rows", verbose=False, every=1) as probe, HostReads() as reads:
        for window in range(3):
            for k in range(2):
                ids = tokens(dist.get_rank() if "fsdp" in loop.cut else 0, window, k)
                with probe.piece(units=len(ids)):
                    loss_of_sharded(model, ids, loop).backward()
            probe.clip_grad_norm_(0.1) if loop.clips else probe.step()
            optimizer.step()
            optimizer.zero_grad()
    return reads.places


def in_pipeline() -> set[str]:
    mesh = mesh_of((2,), ("pp",))
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    stage = PipelineStage(model, dist.get_rank(), 2, torch.device("cpu"), group=mesh.get_group())
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
    x = torch.randn(8, 8)
    probe = sonde.attach(model, unit="rows", verbose=False, every=1, mesh=mesh, pp_mesh=mesh)
    with probe, HostReads() as reads:
        for _ in range(3):
            with probe.pieces(4, units=2):
                schedule.step(*([] if dist.get_rank() else [x]), **({"target": x} if dist.get_rank() else {}))
            probe.clip_grad_norm_(0.1)
            model.zero_grad()
    return reads.places


def everything() -> dict[str, set[str]]:
    """Reads of every set-up on this rank."""
    found = {name: under_ddp(**setup) for name, setup in SETUPS.items()}
    found |= {name: of_shards(loop) for name, loop in SHARDED.items()}
    # torch 2.9 itself fails in a pipeline's first exchange over gloo.
    return found | ({"a pipeline": in_pipeline()} if torch.__version__ >= "2.11" else {})


def test_only_what_a_cpu_has_at_hand_is_read(ranks2: Ranks) -> None:
    seen: set[str] = set()
    for of_rank in ranks2(everything):
        for name, places in of_rank.items():
            assert places <= AT_HAND, name
            seen |= places
    assert sorted(AT_HAND - seen) == []  # no place is allowed that is not needed


READS = [
    Mutant(
        "buckets",
        "sonde.batch_size.taps.ddp_buckets:DDPBucketTap._assemble",
        "parts: list[Part] = []",
        "parts: list[Part] = []; [float(r.sum()) for b in buckets.values() for r in b.witness.values()]",
    ),
    Mutant(
        "shards",
        "sonde.batch_size.taps.final_gradient:FinalGradient.witness_of_shards",
        "elements = {}",
        "elements = {}; [bool(g.to_local().any()) for g in grads if g is not None]",
    ),
]


def mutated(mutant: Mutant) -> set[str]:
    with mutant.applied():
        return under_ddp(tap="comm_hook") if mutant.name == "buckets" else of_shards(Loop())


@pytest.mark.parametrize("mutant", READS, ids=lambda mutant: mutant.name)
def test_a_read_is_noticed(ranks2: Ranks, mutant: Mutant) -> None:
    for places in ranks2(mutated, mutant):
        assert not places <= AT_HAND
