"""Single steps on real ranks: the reading of one process that holds the same batches, and nothing is changed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import sonde
from tests.batch_size.checkpoint.regression import Batch, batches, loss, model_of
from tests.ranks import Ranks, mesh_of

N_HELD_OUT, SIZES, N_DRAWS = 4, (1, 8), 4


def cut(how: str) -> Any:
    model = model_of().double()
    if how == "DDP":
        return DistributedDataParallel(model)
    if how == "TP":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(model, mesh_of((dist.get_world_size(),), ("tp",)), plan)
    shape = (2, 2) if how == "HSDP" else (dist.get_world_size(),)
    mesh = mesh_of(shape, ("replicate", "shard")[2 - len(shape) :])
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def data_of(rank: int) -> list[Batch]:
    """Other targets than the model was trained on, so that its mean gradient is not small."""
    n = N_HELD_OUT + (N_DRAWS + 1) * SIZES[-1]
    return [(x.double(), y.double() + 1) for x, y in batches([8] * n, seed=10 + rank)]


def of_one_process(n_ranks: int) -> list[Batch]:
    """Held-out batches that hold those of all ranks; then the ranks' batches in turn."""
    of_ranks = [data_of(rank) for rank in range(n_ranks)]
    held_out = [
        (torch.cat([x for x, _ in each]), torch.cat([y for _, y in each]))
        for each in itertools.islice(zip(*of_ranks, strict=True), N_HELD_OUT)
    ]
    return [*held_out, *itertools.chain(*zip(*(own[N_HELD_OUT:] for own in of_ranks), strict=True))]


def read(model: Any, data: list[Batch], n_ranks: int = 1, optimizer: Any = None) -> sonde.CurvatureReading:
    sizes = [size * n_ranks for size in SIZES]
    options = sonde.Curvature(optimizer=optimizer, sizes=sizes, draws=N_DRAWS, held_out=N_HELD_OUT)
    found = sonde.measure(model, loss, data, unit="rows", most_batches=6, verbose=False, curvature=options).curvature
    assert found is not None
    return found


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """Adam with a second moment that one gradient hardly changes, the same however the model is cut."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for x, y in batches([8] * 16, seed=0):
        loss(model, (x.double(), y.double() + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def read_here(how: str, along: str) -> tuple[sonde.CurvatureReading, bool]:
    """A reading, and whether the weights are as before."""
    model = cut(how)
    optimizer = trained(model) if along == "AdamW" else None
    before = [local(p) for p in model.parameters()]
    found = read(model, data_of(0 if how == "TP" else dist.get_rank()), optimizer=optimizer)
    return found, all(torch.equal(local(p), b) for p, b in zip(model.parameters(), before, strict=True))


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


@pytest.mark.parametrize(
    ("how", "world", "n_data", "along"),
    [("DDP", 2, 2, "SGD"), ("FSDP2", 2, 2, "AdamW"), ("TP", 2, 1, "SGD"), ("HSDP", 4, 4, "SGD")],
)
def test_the_reading_is_that_of_one_process(
    request: pytest.FixtureRequest, how: str, world: int, n_data: int, along: str
) -> None:
    results = request.getfixturevalue(f"ranks{world}")(read_here, how, along)
    alone = model_of().double()
    expected = read(alone, of_one_process(n_data), n_data, trained(alone) if along == "AdamW" else None)
    assert (expected.direction, expected.n_draws) == (along, N_DRAWS)
    assert expected.b_noise.status != "unresolved"
    for found, is_as_before in results:
        assert_close(found, expected)
        assert is_as_before
    assert len({str(found) for found, _ in results}) == 1


def assert_close(found: sonde.CurvatureReading, expected: sonde.CurvatureReading) -> None:
    """Sums in another order change the 16th digit of losses, of which curvature takes differences."""
    assert (found.b_noise.status, found.n_draws, found.n_held_out) == (expected.b_noise.status, N_DRAWS, N_HELD_OUT)
    assert found.b_noise.low == pytest.approx(expected.b_noise.low, rel=1e-8)
    for own, other in zip(found.steps, expected.steps, strict=True):
        assert own.batch == pytest.approx(other.batch)
        assert own.size.ratio == pytest.approx(other.size.ratio, rel=1e-8)
        assert own.fall == pytest.approx(other.fall, rel=1e-8)


def test_ranks_whose_data_end_stop_together(ranks2: Ranks) -> None:
    reasons = ranks2(short_here)
    own, other = reasons
    assert own == other
    assert own.startswith("the data ended before one draw of 8 micro-batches: give 44 on each rank")


def short_here() -> str:
    own = data_of(dist.get_rank())[: 13 - 4 * dist.get_rank()]
    return read(cut("DDP"), own).b_noise.reason
