"""A wrapper that comes after attach, on real ranks: every window says so, and the alert says what to do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.batch_size.loops import attached, batch, mean_loss
from tests.ranks import Ranks, mesh_of

WRAPPED = "were gradients averaged over ranks? Wrap the model in DDP before attach"
REPLACED = "measured parameters are no longer in the model, and others that are not measured are in their place"


def small() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))


def wrapped(setup: str, model: nn.Sequential) -> Any:
    mesh = mesh_of((2,))
    if setup == "DDP":
        return DistributedDataParallel(model)
    if setup == "DDP inside":
        model[0] = DistributedDataParallel(model[0])
        model[2] = DistributedDataParallel(model[2])
    if setup == "DDP of one rank":
        alone = mesh_of((2, 1), ("all", "alone"))["alone"].get_group()
        return DistributedDataParallel(model, process_group=alone)
    if setup == "TP":
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if setup == "FSDP2":
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _wrapped_late(setup: str, *, at: int, n_pieces: int, windows: int, options: dict[str, Any]) -> dict[str, Any]:
    """Some windows, and the wrapper before window `at`, counted from 0."""
    inner = small()
    generator = torch.Generator().manual_seed(0 if setup == "TP" else dist.get_rank())
    model: Any = inner
    with attached(inner, log_every=1, **options) as probe:
        for window in range(windows):
            if window == at:
                model = wrapped(setup, inner)
            for _ in range(n_pieces):
                with probe.piece(units=4):
                    mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            for p in inner.parameters():
                p.grad = None
        reading = probe.reading()
    return {"windows": reading.windows, "dropped": dict(reading.dropped), "alerts": dict(probe.alerts)}


def _at_once() -> dict[str, Any]:
    results = {
        setup: _wrapped_late(setup, at=0, n_pieces=2, windows=3, options={})
        for setup in ("DDP", "DDP inside", "FSDP2", "TP")
    }
    results["DDP, examples"] = _wrapped_late("DDP", at=0, n_pieces=1, windows=3, options={"per_example": "auto"})
    results["alone"] = _wrapped_late("DDP of one rank", at=0, n_pieces=2, windows=3, options={})
    return results


def test_a_wrapper_that_comes_right_after_attach(ranks2: Ranks) -> None:
    for results in ranks2(_at_once):
        assert results.pop("alone") == {"windows": 3, "dropped": {}, "alerts": {}}  # nothing is averaged over ranks
        for name, result in results.items():
            reason, kind = (WRAPPED, "changed") if name.startswith("DDP") else (REPLACED, "replaced")
            assert (sum(result["dropped"].values()), result["windows"]) == (3, 0), name
            assert all(reason in dropped for dropped in result["dropped"]), name
            assert reason in result["alerts"][kind], name
            assert set(result["alerts"]) <= {kind, "not_watched"}, name


def _in_mid_run() -> dict[str, Any]:
    late: dict[str, Any] = {"at": 2, "n_pieces": 2, "windows": 8, "options": {}}
    return {setup: _wrapped_late(setup, **late) for setup in ("DDP", "FSDP2", "TP")}


def test_a_wrapper_that_comes_in_mid_run(ranks2: Ranks) -> None:
    for results in ranks2(_in_mid_run):
        for setup, result in results.items():
            assert (sum(result["dropped"].values()), result["windows"]) == (6, 2)
            assert all((WRAPPED if setup == "DDP" else REPLACED) in dropped for dropped in result["dropped"])


def test_a_new_parameter_is_counted_in_the_singular() -> None:
    model = small()
    with attached(model, log_every=1) as probe:
        model[2].bias = nn.Parameter(torch.zeros(3))
        for _ in range(2):
            with probe.piece(units=4):
                mean_loss(model, *batch(4, torch.Generator())).backward()
            probe.step()
        alert = probe.alerts["not_watched"]
    assert alert == "1 parameter came or became trainable after attach and cannot be measured (2.bias): attach again"
