"""`sonde.measure` on a model that is cut over ranks: one process's reading, and the model is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sonde
from tests.batch_size.checkpoint.regression import Batch, batches, by_hand, loss, model_of
from tests.batch_size.cut_models import n_collectives
from tests.ranks import Ranks, mesh_of

GROUPS = (slice(0, 144), slice(144, None))
"""Where the two layers lie in the flat gradient of `model_of`."""


def data_of(rank: int, n: int, sizes: tuple[int, ...] = (4, 2, 5)) -> list[Batch]:
    return batches([sizes[i % len(sizes)] for i in range(n)], seed=10 + rank)


def cut(how: str) -> tuple[nn.Sequential, int]:
    """The model, and the number of this rank's data."""
    model, world, rank = model_of(), dist.get_world_size(), dist.get_rank()
    if how in ("TP", "FSDP2 over TP"):
        mesh = mesh_of((world // 2, 2), ("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        rank //= 2
        if how == "TP":
            return model, rank
        return sharded(model, mesh["dp"]), rank
    shape = (world // 2, 2) if how == "HSDP" else (world,)
    return sharded(model, mesh_of(shape, ("replicate", "shard")[2 - len(shape) :])), rank


def sharded(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def measured(model: nn.Module, data: Any, **options: Any) -> sonde.Measurement:
    return sonde.measure(model, loss, data, **{"unit": "rows", "verbose": False} | options)


def measure_here(how: str, n_batches: tuple[int, ...], evaluates: bool) -> sonde.Measurement:
    model, rank = cut(how)
    if evaluates:
        model(torch.zeros(1, 8))  # leaves the outermost module's parameters gathered
    return measured(model, data_of(rank, n_batches[rank]))


CASES = {
    "FSDP2": (2, (30, 30), False),
    "FSDP2, one rank's data end first": (2, (30, 17), True),
    "TP": (2, (40,), False),
    "HSDP": (4, (12, 14, 12, 20), False),
    "FSDP2 over TP": (4, (20, 20), False),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("FSDP2", marks=pytest.mark.shows("measure", "FSDP2")),
        pytest.param("HSDP", marks=pytest.mark.shows("measure", "HSDP")),
        pytest.param("TP", marks=pytest.mark.shows("measure", "TP")),
        pytest.param("FSDP2 over TP", marks=pytest.mark.shows("measure", "FSDP2 over TP")),
        "FSDP2, one rank's data end first",
    ],
)
def test_the_reading_is_that_of_one_process_with_the_same_pieces(ranks2: Ranks, ranks4: Ranks, name: str) -> None:
    world, n_batches, evaluates = CASES[name]
    n = min(n_batches)
    of_ranks = [data_of(rank, n) for rank in range(len(n_batches))]
    expected = by_hand(model_of(), of_ranks, (slice(None), *GROUPS))
    results = (ranks2 if world == 2 else ranks4)(measure_here, name.split(",")[0], n_batches, evaluates)
    alone = measured(model_of(), interleaved(of_ranks))
    for measurement in results:
        reading = measurement.reading
        assert (measurement.n_batches, measurement.ended) == (n * len(n_batches), "data ended")
        assert measurement.n_units == sum(len(x) for own in of_ranks for x, _ in own)
        values = [(reading.trace_cov, reading.grad_sq)]
        values += [(group.trace_cov, group.grad_sq) for group in reading.groups.values()]
        for (trace_cov, grad_sq), by_definition in zip(values, expected, strict=True):
            # fp32 gradients and their reduction: a few 1e-7 of S and B, amplified by their difference.
            assert trace_cov == pytest.approx(by_definition[0], rel=1e-5)
            assert grad_sq == pytest.approx(by_definition[1], rel=1e-5, abs=1e-6 * by_definition[0])
        if len(n_batches) <= 2:  # windows of four ranks are longer than those of one process
            assert (reading.windows, reading.status) == (alone.reading.windows, alone.reading.status)
            assert (reading.low, reading.high) == pytest.approx((alone.reading.low, alone.reading.high), rel=1e-4)
        assert measurement.loss == pytest.approx(alone.loss, rel=1e-6)
    assert len({(m.reading.trace_cov, m.reading.grad_sq, m.reading.low) for m in results}) == 1


def interleaved(of_ranks: list[list[Batch]]) -> list[Batch]:
    """The batches of all ranks in the order in which windows take them."""
    from sonde.batch_size.stats.averages import window_lengths

    left, order = [list(own) for own in of_ranks], []
    for length in window_lengths(len(of_ranks)):
        if not left[0]:
            return order
        order += [batch for own in left for batch in own[:length]]
        left = [own[length:] for own in left]
    return order


def train_here(how: str, measures: bool) -> tuple[list[Tensor], list[bool], int]:
    """Train a few steps. Measure before the first, after an evaluation, and with unfinished gradients in `.grad`."""
    model, rank = cut(how)
    model.append(nn.BatchNorm1d(2, affine=False))  # whose statistics every forward changes
    model.append(nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    for step in range(4):
        if measures and step in (0, 2):
            measured(model, data_of(rank, 5))
        loss(model, data_of(rank, step + 1)[-1]).backward()
        if measures and step == 1:
            held = [p.grad for p in model.parameters()]
            measured(model, data_of(rank, 5))
            assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with torch.no_grad():
                model(torch.zeros(3, 8))
    if measures:
        measured(model, data_of(rank, 5))
    before = n_collectives()
    cut_still = [isinstance(p, DTensor) for p in (*model[0].parameters(), *model[2].parameters())]
    tensors = [*model.parameters(), *model.buffers(), torch.get_rng_state()]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    hooks = sum(len(p._backward_hooks or ()) for p in model.parameters())
    assert n_collectives() == before
    return [t.detach().clone() for t in local], [*cut_still, *(m.training for m in model.modules())], hooks


@pytest.mark.parametrize("how", ["FSDP2", "TP"])
def test_training_goes_on_as_without_it(ranks2: Ranks, how: str) -> None:
    for with_it, without in zip(ranks2(train_here, how, True), ranks2(train_here, how, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(with_it[0], without[0], strict=True))
        assert with_it[1:] == without[1:]


def refused_here(what: str) -> str:
    model, rank = cut("FSDP2")
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    if what == "held":
        loss(model, data_of(rank, 1)[0]).backward()
    try:
        measured(model, data_of(rank, 6))
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "message"),
    [("held", "holds gradients of micro-batches that were not reduced"), ("off", r"set_requires_gradient_sync(True)")],
)
def test_gradients_that_are_not_reduced_are_refused(ranks2: Ranks, what: str, message: str) -> None:
    for said in ranks2(refused_here, what):
        assert message in said
