"""`allow_biased=True` with several ranks, and under FSDP2 and tensor parallelism on a single one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import sonde
from tests.batch_size.loops import attached, mean_loss, small_model
from tests.batch_size.single_examples import pieces_of
from tests.oracles import window_by_hand
from tests.ranks import Ranks, mesh_of


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def run(model: nn.Module, probe: sonde.NoiseScaleProbe, windows: int, n_pieces: int = 1) -> list[Tensor]:
    """SGD, and each window's whole gradient."""
    gradients = []
    for window in range(windows):
        for x, y in pieces_of(*[6] * n_pieces, seed=window):
            with probe.piece(units=len(x)):
                mean_loss(model, x, y).backward()
        gradients.append(torch.cat([whole(p.grad).flatten() for p in model.parameters()]).double())
        probe.clip_grad_norm_(2.0)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.002 * p.grad  # type: ignore[operator]
        model.zero_grad()
    return gradients


def sharded(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def cut(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=True)})


CUTS: dict[str, Callable[[nn.Sequential, DeviceMesh], nn.Module]] = {"FSDP2": sharded, "TP": cut}


def _pairs(setup: str) -> dict[str, Any]:
    """Pairs on a mesh of this rank alone, whose gradients are whole; and the weights without pairs."""
    mesh = mesh_of((2, 1), ("all", "alone"))["alone"]
    torch.manual_seed(dist.get_rank())

    def trained(**options: Any) -> tuple[list[Tensor], list[Tensor], Any, sonde.NoiseScaleReading]:
        model = CUTS[setup](small_model(), mesh)
        with attached(model, **options) as probe:
            gradients = run(model, probe, 4)
            return gradients, [whole(p.detach()).clone() for p in model.parameters()], probe.window(), probe.reading()

    gradients, weights, window, reading = trained(allow_biased=True, per_example="auto" if setup == "TP" else "never")
    plain = trained()[1]
    mean = torch.stack(gradients[-2:]).mean(0)
    return {
        "expected": window_by_hand(gradients[-2:], [1, 1], (6, 6), mean),
        "measured": (window.total.trace_cov, window.total.grad_sq),
        "sum_of_groups": sum(group.trace_cov for group in window.per_group),
        "known": (reading.windows, reading.is_biased, reading.units_per_window),
        "is_same": all(map(torch.equal, weights, plain)),
    }


@pytest.mark.parametrize("setup", CUTS)
def test_pairs_on_one_rank_of_a_sharded_model(ranks2: Ranks, setup: str) -> None:
    for result in ranks2(_pairs, setup):
        assert result["measured"] == pytest.approx(result["expected"], rel=1e-5)
        assert result["sum_of_groups"] == pytest.approx(result["expected"][0], rel=1e-5)
        assert result["known"] == (2, True, 6.0)
        assert result["is_same"]


def _attach_on_ranks() -> list[str]:
    """What attach says where a mesh cuts the model, and where each rank has a piece."""
    said = []
    for make in CUTS.values():
        try:
            attached(make(small_model(), mesh_of((2,))), allow_biased=True)
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("accepted")
    model = DistributedDataParallel(small_model())
    with attached(model, allow_biased=True) as probe:
        run(model, probe, 4)
        said.append(str(probe._setup()["biased_fallback"]))
        reading = probe.reading()
        said.append(f"{reading.windows} windows, biased: {reading.is_biased}")
    return said


def test_several_ranks_need_no_pairs_and_a_cut_model_is_refused(ranks2: Ranks) -> None:
    for fsdp, parts, not_cut, numbers in ranks2(_attach_on_ranks):
        assert fsdp == "accepted"  # each rank has a piece, so pairs have no use
        assert "a model of kind tensor parallel holds a part of them on each rank" in parts
        assert "accumulate gradients over 2 or more micro-batches" in parts
        assert not_cut == "allow_biased=True has no effect: each of 2 data-parallel ranks has a piece in every window"
        assert numbers == "4 windows, biased: False"
