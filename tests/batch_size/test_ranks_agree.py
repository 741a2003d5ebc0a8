"""Ranks that were attached with other arguments are refused on all ranks: their vectors would not fit together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sonde
from tests.batch_size.loops import attached, small_model
from tests.batch_size.sharded_loops import Loop, build, shard
from tests.ranks import Ranks, mesh_of

OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "unit": ({"unit": "rows of rank 1"}, "unit differs between ranks, got '(rows|rows of rank 1)' on this rank"),
    "allowance": ({"allowance": 20.0}, "allowance differs between ranks, got (10.0|20.0) on this rank"),
    "groups": ({"groups": None}, "the groups of parameters differs between ranks"),
}


def _attach(wrapper: str, options: dict[str, Any]) -> str:
    model = shard(build(Loop()), Loop()) if wrapper == "FSDP2" else small_model()
    if wrapper == "DDP":
        model = DistributedDataParallel(model)  # type: ignore[assignment]
    if wrapper == "by hand":
        options = options | {"process_group": dist.group.WORLD}
    try:
        attached(model, **(options if dist.get_rank() == 1 or wrapper == "by hand" else {})).close()
    except ValueError as error:
        return str(error)
    return "no error"


def _attach_with_a_hook_on_rank_1() -> str:
    try:
        attached(DistributedDataParallel(small_model()), comm_hook=print if dist.get_rank() == 1 else None)
    except ValueError as error:
        return str(error)
    return "no error"


def test_an_argument_that_one_rank_refuses(ranks2: Ranks) -> None:
    accepted, refused = ranks2(_attach_with_a_hook_on_rank_1)
    assert accepted.startswith("another rank refused to attach")
    assert refused.startswith("comm_hook= needs tap='comm_hook'")


class _NoRoom:
    """A log that cannot begin."""

    must_begin = True

    def open(self, *args: object) -> None:
        raise OSError("no space left on device")

    write = close = open


def _attach_with_a_log_that_fails(wrapper: str) -> tuple[str, int, str]:
    """What is said, whether hooks are left, and what the log says to a probe of this rank alone."""
    model: Any = shard(build(Loop()), Loop()) if wrapper == "FSDP2" else DistributedDataParallel(small_model())
    log = sonde.RunLog([_NoRoom()] if dist.get_rank() == 0 else [])
    try:
        attached(model, log=log).close()
    except (OSError, RuntimeError) as error:
        n_left = sum(bool(p._backward_hooks) for p in model.parameters())
        try:
            attached(small_model(), log=log)
        except (OSError, RuntimeError) as again:
            return str(error), n_left, str(again)
    return "no error", 0, "no error"


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_a_log_that_one_rank_cannot_begin(ranks2: Ranks, wrapper: str) -> None:
    (failed, _, own_log), (told, n_left, log) = ranks2(_attach_with_a_log_that_fails, wrapper)
    assert failed == "no space left on device"
    assert told == "the log of the run could not be begun on another rank, whose error says why: no rank measures"
    assert n_left == 0
    assert own_log == log
    assert log.startswith("this log has ended, as every probe that wrote to it was closed: make a new RunLog")


def _attach_stages(which: str) -> str:
    mesh = mesh_of((2,), ("pp",))
    stage: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    if dist.get_rank() == 0 and which == "frozen":
        stage.requires_grad_(False)
    elif dist.get_rank() == 0 and which == "complex":
        stage.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    elif dist.get_rank() == 0:
        stage = nn.Tanh()
    try:
        attached(stage, mesh=mesh, pp_mesh=mesh)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("which", ["frozen", "without parameters", "complex"])
def test_a_pipeline_stage_that_cannot_be_measured_is_refused_on_all_ranks(ranks2: Ranks, which: str) -> None:
    own, of_peer = ranks2(_attach_stages, which)
    assert own.startswith("gradients must be real" if which == "complex" else "the model")
    assert of_peer == f"another rank's pipeline stage cannot be measured. stage 0: {own}"


@pytest.mark.parametrize("name", OTHERS)
def test_other_options_on_one_rank(ranks3: Ranks, name: str) -> None:
    options, message = OTHERS[name]
    for said in ranks3(_attach, "DDP", options):
        with pytest.raises(ValueError, match=message):
            raise ValueError(said)


def test_other_options_under_fsdp(ranks2: Ranks) -> None:
    for said in ranks2(_attach, "FSDP2", {"allowance": 20.0}):
        assert "allowance differs between ranks" in said


def _frozen_on_one_rank() -> str:
    model = small_model()
    model[0].bias.requires_grad_(dist.get_rank() == 0)
    try:
        attached(model, process_group=dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return "no error"


def test_other_parameters_on_one_rank(ranks2: Ranks) -> None:
    for said in ranks2(_frozen_on_one_rank):
        assert said.startswith("the list of measured parameters differs between ranks")


def _ranks_with_other_units() -> int:
    """The units of a piece may differ from rank to rank."""
    model = small_model()
    rank = dist.get_rank()
    with attached(model, process_group=dist.group.WORLD, units_per_piece=rank + 1) as probe:
        for _ in range(2):
            model(torch.randn(rank + 1, 12)).square().mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        probe.step()
        return probe.reading().windows


def test_ranks_may_have_other_units_in_a_piece(ranks2: Ranks) -> None:
    assert ranks2(_ranks_with_other_units) == [1, 1]
