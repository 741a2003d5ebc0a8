"""Models that cannot be measured are refused on all ranks, by name, with what works there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.batch_size.loops import attached, small_model
from tests.batch_size.sharded_loops import Loop, build, shard
from tests.ranks import Ranks, mesh_of


def _sharded(**options: Any) -> None:
    attached(shard(build(Loop()), Loop()), **options)


def _first_version() -> None:
    attached(FullyShardedDataParallel(small_model(), device_id=torch.device("cpu")))


def _on_the_meta_device() -> None:
    with torch.device("meta"):
        model = small_model()
    attached(fully_shard(model, mesh=mesh_of((2,))))


def _inside_first_version() -> None:
    wrapped = FullyShardedDataParallel(small_model(), device_id=torch.device("cpu"))
    attached(wrapped.module)


def _inside_ddp() -> None:
    wrapped = DistributedDataParallel(small_model())
    attached(wrapped.module)


def _in_a_compiled_ddp() -> None:
    wrapped = torch.compile(DistributedDataParallel(small_model()), backend="eager")
    attached(wrapped._orig_mod.module)


class DeepSpeedEngine(nn.Module):
    """What sonde knows DeepSpeed's engine by: a module that holds the model, of a class in a package of that name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"


def _inside_deepspeed() -> None:
    engine = DeepSpeedEngine(small_model())
    attached(engine.module)


def _in_ddp_and_in_fsdp() -> nn.ModuleDict:
    return nn.ModuleDict(
        {"a": fully_shard(small_model(), mesh=mesh_of((2,))), "b": DistributedDataParallel(small_model())}
    )


def _cut_inside_ddp() -> None:
    model = DistributedDataParallel(small_model())
    parallelize_module(model.module, mesh_of((2,)), {"0": ColwiseParallel()})
    attached(model)


REFUSED: dict[str, tuple[Callable[..., None], str]] = {
    "buckets": (lambda: _sharded(tap="comm_hook"), "tap='comm_hook' reads DDP's buckets, got a model of kind FSDP2"),
    "a process group": (lambda: _sharded(process_group=dist.group.WORLD), "a sharded model knows its ranks"),
    "no mesh": (lambda: _sharded(mesh=2), "mesh must be a DeviceMesh, got 2"),
    "FSDP's first version": (_first_version, "FSDP's first version does not show the gradients.*fully_shard"),
    "the meta device": (_on_the_meta_device, "is on the meta device, which holds no values: attach after to_empty"),
    "a module inside FSDP's first version": (
        _inside_first_version,
        "inside a module of FSDP's first version",
    ),
    "a module inside DDP": (_inside_ddp, "pass that module, as trainer.model_wrapped"),
    "DeepSpeed's engine": (
        lambda: attached(DeepSpeedEngine(small_model())),
        "DeepSpeed .DeepSpeedEngine. does not show the gradients of micro-batches.*engine.get_global_grad_norm",
    ),
    "a module inside DeepSpeed's engine": (_inside_deepspeed, "DeepSpeed .DeepSpeedEngine. does not show"),
    "one part in DDP, one in FSDP2": (
        lambda: attached(_in_ddp_and_in_fsdp()),
        "DDP holds one part of the model, and 'a.0.weight' outside that part is cut over ranks.*a probe to each part",
    ),
    "shards in DDP": (_cut_inside_ddp, "DDP holds '0.weight', which is cut over ranks .a DTensor., and cannot reduce"),
    "a module inside a compiled DDP": (_in_a_compiled_ddp, "pass that module, as trainer.model_wrapped"),
}


def _message(name: str) -> str:
    try:
        REFUSED[name][0]()
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ranks2: Ranks, name: str) -> None:
    for message in ranks2(_message, name):
        assert re.search(REFUSED[name][1], message), message


def _a_probe_for_each_part() -> list[int]:
    model, x = _in_ddp_and_in_fsdp(), torch.randn(2, 12)
    with attached(model["a"]) as of_a, attached(model["b"]) as of_b:
        for _ in range(2):
            with of_a.piece(units=2), of_b.piece(units=2):
                (model["a"](x) + model["b"](x)).square().sum().backward()
        of_a.step()
        of_b.step()
        return [of_a.reading().windows, of_b.reading().windows]


def test_a_probe_for_each_part_of_another_wrapper_measures(ranks2: Ranks) -> None:
    """As the refusal of a model of DDP and FSDP2 says."""
    assert ranks2(_a_probe_for_each_part) == [[1, 1]] * 2


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("ds_id", "DeepSpeed .ZeRO-3 holds '0.weight' in parts.*engine.get_global_grad_norm"),
        (
            "main_grad",
            "'0.weight' is added up in .main_grad, as Megatron's own DDP.*Megatron's own clip_grad measures the norm",
        ),
        ("tensor_model_parallel", "'0.weight' is a shard of Megatron's tensor parallelism.*mesh= and replicas="),
    ],
)
def test_parameters_that_other_frameworks_have_cut(attribute: str, message: str) -> None:
    model = small_model()
    setattr(model[0].weight, attribute, True)
    with pytest.raises(ValueError, match=message):
        attached(model)
