"""Set-ups in which a quantity is refused. Each test makes the set-ups that its own marker names, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import sonde
from tests.batch_size import context_loops, expert_loops
from tests.batch_size.loops import small_model
from tests.batch_size.sharded_loops import Loop, build, shard
from tests.ranks import Ranks, mesh_of

SetUp = tuple[nn.Module, dict[str, Any]]
"""A model, and the arguments that tell the probe how it is cut."""


def sharded(**options: Any) -> SetUp:
    loop = Loop(**options)
    return shard(build(loop), loop), {}


def compiled() -> SetUp:
    return torch.compile(small_model(), backend="eager"), {}  # type: ignore[return-value]


def adapters() -> SetUp:
    """Plain parameters beside frozen ones that FSDP2 cuts."""
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
    return fully_shard(model, mesh=mesh_of((4,)), ignored_params=set(model[1].parameters())), {}


def pipeline(dp: int = 1, tp: int = 1, *, ddp: bool = False, n_stages: int = 0) -> SetUp:
    """This rank's stage."""
    mesh = mesh_of((n_stages or 4 // (dp * tp), dp, tp), ("pp", "dp", "tp"))
    stage: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    if tp > 1:
        cut = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Replicate())}
        stage = parallelize_module(stage, mesh["tp"], cut)
    if ddp:
        stage = DistributedDataParallel(stage, process_group=mesh.get_group("dp"))
    elif dp > 1 or (tp > 1 and n_stages):
        stage = fully_shard(stage, mesh=mesh["dp"])
    return stage, {"mesh": mesh, "pp_mesh": mesh["pp"]}


SETUPS: dict[str, Callable[[], SetUp]] = {
    "torch.compile": compiled,
    "FSDP2": lambda: sharded(),
    "HSDP": lambda: sharded(mesh=(2, 2)),
    "LoRA below FSDP2": adapters,
    "TP": lambda: sharded(cut="tp"),
    "SP": lambda: sharded(cut="sp"),
    "FSDP2 over TP": lambda: sharded(cut="fsdp over tp"),
    "FSDP2 over SP": lambda: sharded(cut="fsdp over sp"),
    "PP": pipeline,
    "PP with DDP": lambda: pipeline(dp=2, ddp=True),
    "PP with FSDP2": lambda: pipeline(dp=2),
    "PP with TP": lambda: pipeline(tp=2),
    "PP with FSDP2 over TP": lambda: pipeline(tp=2, n_stages=2),  # FSDP2 has one rank
    "CP": lambda: context_loops.cut(context_loops.Loop(cut="plain")),  # over two halves of the data
    "DDP over CP": lambda: context_loops.cut(context_loops.Loop(cut="ddp")),
    "FSDP2 over CP": lambda: context_loops.cut(context_loops.Loop()),
    "EP": lambda: expert_loops.cut(expert_loops.Loop()),
}


def messages(setups: list[str], options: dict[str, Any]) -> dict[str, str]:
    """What attach says of each set-up on this rank; empty where it accepts it."""
    said = {}
    for name in setups:
        model, arguments = SETUPS[name]()
        optimizer = torch.optim.AdamW(model.parameters()) if "adam" in options.get("metric", ()) else None
        said[name] = ""
        try:
            sonde.attach(model, optimizer, unit="rows", verbose=False, **arguments, **options).close()
        except ValueError as error:
            said[name] = str(error)
    return said


def assert_refused(request: pytest.FixtureRequest, options: dict[str, Any], *reasons: str) -> None:
    """Every set-up of the test's markers, on all ranks, for one of these reasons."""
    setups = [name for marker in request.node.iter_markers("refuses") for name in marker.args[1:]]
    ranks: Ranks = request.getfixturevalue("ranks4")
    for of_rank in ranks(messages, setups, options):
        assert of_rank.keys() == set(setups)
        for name, message in of_rank.items():
            assert any(reason in message for reason in reasons), (name, message)


@pytest.mark.refuses("adam metric", "FSDP2", "HSDP", "FSDP2 over TP", "FSDP2 over SP", "PP with FSDP2", "FSDP2 over CP")
def test_adams_metric(request: pytest.FixtureRequest) -> None:
    assert_refused(request, {"metric": "adam"}, "of which FSDP2 leaves each rank a part")


@pytest.mark.refuses("sign metric", "TP", "SP", "FSDP2 over TP", "FSDP2 over SP")
@pytest.mark.refuses("sign metric", "PP", "PP with DDP", "PP with FSDP2", "PP with TP", "PP with FSDP2 over TP")
@pytest.mark.refuses("sign metric", "EP")
def test_the_sign_metric(request: pytest.FixtureRequest) -> None:
    reasons = ("needs the whole gradient of each piece on one rank", "but experts have other pieces than the rest")
    assert_refused(request, {"metric": "sign"}, *reasons)


@pytest.mark.refuses("spectral metric", "FSDP2", "HSDP", "LoRA below FSDP2")
@pytest.mark.refuses("spectral metric", "TP", "SP", "FSDP2 over TP", "FSDP2 over SP")
@pytest.mark.refuses("spectral metric", "PP", "PP with DDP", "PP with FSDP2", "PP with TP", "PP with FSDP2 over TP")
@pytest.mark.refuses("spectral metric", "CP", "DDP over CP", "FSDP2 over CP", "EP")
def test_the_spectral_metric(request: pytest.FixtureRequest) -> None:
    assert_refused(request, {"metric": "spectral"}, "needs each matrix whole on one rank")


@pytest.mark.refuses("single examples", "torch.compile", "TP", "SP", "FSDP2 over TP", "FSDP2 over SP")
@pytest.mark.refuses("single examples", "PP", "PP with DDP", "PP with FSDP2", "PP with TP", "PP with FSDP2 over TP")
@pytest.mark.refuses("single examples", "CP", "DDP over CP", "FSDP2 over CP", "EP")
def test_single_examples(request: pytest.FixtureRequest) -> None:
    reasons = ("calls its layers with parts of examples or of parameters", "is compiled: measure without that")
    assert_refused(request, {"per_example": "always"}, *reasons)


def test_what_is_accepted_is_no_refusal(ranks4: Ranks) -> None:
    """The comparison can fail: what is shown to work says nothing."""
    for of_rank in ranks4(messages, list(SETUPS), {"per_example": "never"}):
        assert set(of_rank.values()) == {""}, of_rank
