"""`sonde.measure` on real ranks: the reading of one process that holds the same pieces, and nothing is changed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import sonde
from sonde.batch_size.stats.averages import window_lengths
from tests.batch_size.checkpoint.regression import Batch, batches, by_hand, draw, endless, loss, model_of
from tests.batch_size.cut_models import n_collectives
from tests.ranks import Ranks, mesh_of

LAYERS = (slice(None), slice(0, 144), slice(144, None))
"""Where the model and its two layers lie in the flat gradient of `model_of`."""


def data_of(rank: int, n: int) -> list[Batch]:
    return batches([(4, 2, 5)[i % 3] for i in range(n)], seed=10 + rank)


def measured(model: nn.Module, data: Any, **options: Any) -> sonde.Measurement:
    return sonde.measure(model, options.pop("loss", loss), data, **{"unit": "rows", "verbose": False} | options)


def cut(how: str, **ddp: Any) -> tuple[Any, int]:
    """The model, and the number of this rank's data."""
    model, world, rank = model_of(), dist.get_world_size(), dist.get_rank()
    if how == "plain":
        return model, rank
    if how == "DDP":
        return DistributedDataParallel(model, **ddp), rank
    if how in ("TP", "FSDP2 over TP"):
        mesh = mesh_of((world // 2, 2), ("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return (model if how == "TP" else sharded(model, mesh["dp"])), rank // 2
    shape = (world // 2, 2) if how == "HSDP" else (world,)
    return sharded(model, mesh_of(shape, ("replicate", "shard")[2 - len(shape) :])), rank


def sharded(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def interleaved(of_ranks: list[list[Batch]]) -> list[Batch]:
    """The batches of all ranks in the order in which windows take them."""
    left, order = [list(own) for own in of_ranks], []
    for length in window_lengths(len(of_ranks)):
        if not left[0]:
            return order
        order += [batch for own in left for batch in own[:length]]
        left = [own[length:] for own in left]
    return order


CASES: dict[str, tuple[int, tuple[int, ...]]] = {
    "DDP": (2, (30, 30)),
    "DDP, other numbers of batches": (3, (7, 25, 12)),
    "DDP, a rank without data": (3, (20, 0, 20)),
    "plain": (2, (30, 30)),
    "FSDP2": (2, (30, 30)),
    "FSDP2, one rank's data end first": (2, (30, 17)),
    "TP": (2, (40,)),
    "HSDP": (4, (12, 14, 12, 20)),
    "FSDP2 over TP": (4, (20, 20)),
}
"""Ranks, and the batches of each that has data of its own."""


def measure_here(name: str) -> tuple[sonde.Measurement, int]:
    """A measurement, and how many collectives it took."""
    model, rank = cut(name.split(",")[0])
    if "end first" in name:
        model(torch.zeros(1, 8))  # leaves the outermost module's parameters gathered
    options = {"process_group": dist.group.WORLD} if name == "plain" else {}
    dist.barrier()  # DDP's construction is over on all ranks
    before = n_collectives()
    return measured(model, data_of(rank, CASES[name][1][rank]), **options), n_collectives() - before


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("DDP", marks=pytest.mark.shows("measure", "DDP")),
        pytest.param("FSDP2", marks=pytest.mark.shows("measure", "FSDP2")),
        pytest.param("HSDP", marks=pytest.mark.shows("measure", "HSDP")),
        pytest.param("TP", marks=pytest.mark.shows("measure", "TP")),
        pytest.param("FSDP2 over TP", marks=pytest.mark.shows("measure", "FSDP2 over TP")),
        *(name for name in CASES if name not in ("DDP", "FSDP2", "HSDP", "TP", "FSDP2 over TP")),
    ],
)
def test_the_reading_is_that_of_one_process_with_the_same_pieces(request: pytest.FixtureRequest, name: str) -> None:
    world, n_batches = CASES[name]
    n_each = n_batches if "DDP" in name else (min(n_batches),) * len(n_batches)  # a sharded model stops on all ranks
    of_ranks = [data_of(rank, n) for rank, n in enumerate(n_each)]
    expected = by_hand(model_of(), of_ranks, LAYERS)
    results = request.getfixturevalue(f"ranks{world}")(measure_here, name)
    for measurement, n_issued in results:
        reading = measurement.reading
        assert (measurement.n_batches, measurement.ended) == (sum(n_each), "data ended")
        assert measurement.n_units == sum(len(x) for own in of_ranks for x, _ in own)
        for found, by_definition in zip((reading, *reading.groups.values()), expected, strict=True):
            # fp32 gradients and their reduction: a few 1e-7 of S and B, amplified by their difference.
            assert found.trace_cov == pytest.approx(by_definition[0], rel=1e-5)
            assert found.grad_sq == pytest.approx(by_definition[1], rel=1e-5, abs=1e-6 * by_definition[0])
        if len(set(n_each)) == 1 and len(n_each) <= 2:  # windows of four ranks are longer than those of one process
            alone = measured(model_of(), interleaved(of_ranks))
            assert (reading.windows, reading.status) == (alone.reading.windows, alone.reading.status)
            assert (reading.low, reading.high) == pytest.approx((alone.reading.low, alone.reading.high), rel=1e-4)
            assert measurement.loss == pytest.approx(alone.loss, rel=1e-6)
        if name in ("DDP", "plain"):
            # In each window: what all did, four gradients, the probe's sums, whether to stop. Two objects are gathered
            # at the beginning, the probe compares its options, and then whether all have begun; at the end a window is
            # empty, and the ranks agree why.
            assert n_issued == 4 + (3 + 4) * 8 + 2
    assert len({(m.reading.trace_cov, m.reading.grad_sq, m.reading.low, m.loss) for m, _ in results}) == 1


def until_here(how: str) -> sonde.Measurement:
    model, rank = cut("DDP")
    if how == "a limit":
        return measured(model, data_of(rank, 30), most_batches=9)
    return measured(model, endless(draw(2000, torch.Generator().manual_seed(1)), 32, seed=rank), until=0.4)


def test_ranks_stop_together(ranks2: Ranks) -> None:
    """A limit holds on each rank."""
    assert {(m.ended, m.n_batches) for m in ranks2(until_here, "a limit")} == {("limit", 18)}
    first, second = ranks2(until_here, "precise")
    assert (first.ended, second.ended) == ("precise", "precise")
    assert first.precision == second.precision <= 0.4


# Nothing is changed.

TRAINED: dict[str, tuple[int, str, dict[str, Any]]] = {
    "DDP": (3, "DDP", {}),
    "DDP, the loss calls DDP itself": (3, "DDP", {}),
    "DDP, a static graph": (3, "DDP", {"static_graph": True}),
    "DDP, views of buckets": (3, "DDP", {"gradient_as_bucket_view": True, "find_unused_parameters": True}),
    "DDP, small buckets": (3, "DDP", {"bucket_cap_mb": 0.0001}),
    "FSDP2": (2, "FSDP2", {}),
    "TP": (2, "TP", {}),
}


def train_here(name: str, measures: bool) -> tuple[list[Tensor], list[bool], int]:
    """Train a few steps. Measure before the first, with unfinished gradients in `.grad`, and after an evaluation."""
    _, how, ddp = TRAINED[name]
    model, rank = cut(how, **ddp)
    inner = getattr(model, "module", model)
    if not ddp.get("static_graph"):  # every forward changes its statistics
        inner.append(nn.BatchNorm1d(2, affine=False))
    inner.append(nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    calls = (lambda _, batch: loss(model, batch)) if "calls" in name else loss
    n_own = 5 + 3 * rank if how == "DDP" else 5
    torch.manual_seed(rank)
    for step in range(4):
        if measures and step in ((1, 2) if ddp.get("static_graph") else (0, 2)):  # before the first step it is refused
            measured(model, data_of(rank, n_own), loss=calls)
        loss(model, data_of(rank, step + 1)[-1]).backward()
        if measures and step == 1:
            held = [p.grad for p in model.parameters()]
            measured(model, data_of(rank, n_own))
            assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with torch.no_grad():
                model(torch.zeros(3, 8))
    if measures:
        measured(model, data_of(rank, n_own))
    cut_still = [isinstance(p, DTensor) for p in (*inner[0].parameters(), *inner[2].parameters())]
    tensors = [*model.parameters(), *model.buffers(), torch.get_rng_state()]
    local = [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in tensors]
    hooks = sum(len(p._backward_hooks or ()) for p in model.parameters())
    return local, [*cut_still, *(m.training for m in model.modules())], hooks


@pytest.mark.parametrize("name", TRAINED)
def test_training_goes_on_as_without_it(request: pytest.FixtureRequest, name: str) -> None:
    ranks: Ranks = request.getfixturevalue(f"ranks{TRAINED[name][0]}")
    for with_it, without in zip(ranks(train_here, name, True), ranks(train_here, name, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(with_it[0], without[0], strict=True))
        assert with_it[1:] == without[1:]


# Errors are errors on every rank.


def error_here(what: str) -> str:
    model, rank = cut("FSDP2" if what in ("held", "off") else "DDP", static_graph=what == "static graph")
    data: Any = data_of(rank, 20)
    options: dict[str, Any] = {}
    if what == "until":
        options["until"] = 0.1 + 0.1 * rank
    elif what == "groups" and rank == 1:
        options["groups"] = None
    elif what == "no iterable" and rank == 1:
        data = 3
    elif what == "no data":
        data = []
    elif what == "one batch":
        data = data_of(rank, 1 - rank)
    elif what == "options" and rank == 1:
        options["until"] = 10
    elif what == "sparse":
        model = DistributedDataParallel(nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Flatten(), nn.Linear(8, 2)))
        data = [(torch.randint(0, 9, (len(x), 1)), y) for x, y in data]
    elif what == "mixed precision":
        with mock.patch.object(torch, "Stream"):  # since torch 2.15, DDP makes one, which a CPU does not have
            model = DistributedDataParallel(model_of(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    elif what == "parameters outside":
        model = nn.Sequential(model, nn.Linear(2, 2))
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        if what == "held":
            loss(model, data_of(rank, 1)[0]).backward()
    try:
        measured(model, data, **options)
    except (ValueError, RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("until", "ranks must measure alike, got [{'unit': 'rows', 'until': 0.1", "'until': 0.2"),
        ("groups", "the groups of parameters differs between ranks", "the groups of parameters differs between ranks"),
        ("no iterable", "RuntimeError: rank 1 of the group failed: ValueError: batches", "batches must be an iterable"),
        ("no data", "there was none", "there was none"),
        ("one batch", "there was only one", "there was only one"),
        ("options", "rank 1 of the group failed: ValueError: until", "until must be a part of B_simple"),
        ("sparse", "sparse gradients cannot be added up over ranks", "use Embedding(sparse=False)"),
        ("static graph", "measure after the first step of training", "before the model is wrapped in DDP"),
        ("mixed precision", "casts inside DDP", "cast in the loss"),
        ("parameters outside", "a module with DDP inside it", "measure the module without DDP"),
        ("held", "holds gradients of micro-batches that were not reduced", "were not reduced"),
        ("off", "set_requires_gradient_sync(True)", "set_requires_gradient_sync(True)"),
    ],
)
def test_errors(ranks2: Ranks, what: str, first: str, second: str) -> None:
    messages = ranks2(error_here, what)
    assert first in messages[0]
    assert second in messages[1]
