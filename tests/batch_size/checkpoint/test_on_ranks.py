"""`sonde.measure` on real ranks: the same reading as one process that holds the same pieces, whatever each rank has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import sonde
from tests.batch_size.checkpoint.regression import Batch, batches, by_hand, draw, endless, loss, model_of
from tests.batch_size.cut_models import n_collectives
from tests.ranks import Ranks


def data_of(rank: int, n: int, sizes: tuple[int, ...] = (4,)) -> list[Batch]:
    return batches([sizes[i % len(sizes)] for i in range(n)], seed=10 + rank)


def measured(model: nn.Module, data: Any, **options: Any) -> sonde.Measurement:
    return sonde.measure(model, options.pop("loss", loss), data, **{"unit": "rows", "verbose": False} | options)


def measure_here(
    n_batches: tuple[int, ...], sizes: tuple[int, ...], wrapped: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Measure on this rank, with its own batches; and how many collectives it took beside DDP's own construction."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = model_of()
    ddp = DistributedDataParallel(model) if wrapped else model
    before = n_collectives()
    dist.barrier()  # DDP's construction is over on all ranks
    extra: dict[str, Any] = {} if wrapped else {"process_group": dist.group.WORLD}
    measurement = measured(ddp, data_of(rank, n_batches[rank], sizes), **extra, **options)
    return {
        "measurement": measurement,
        "expected": by_hand(model_of(), [data_of(r, n_batches[r], sizes) for r in range(world)]),
        "n_collectives": n_collectives(),
        "n_before": before + 1,
        "hooks": sum(len(p._backward_hooks or ()) for p in model.parameters()),
    }


def assert_as_one_process(results: list[dict[str, Any]]) -> sonde.Measurement:
    first: sonde.Measurement = results[0]["measurement"]
    for result in results:
        measurement = result["measurement"]
        reading, (expected,) = measurement.reading, result["expected"]
        assert (reading.trace_cov, reading.grad_sq) == (first.reading.trace_cov, first.reading.grad_sq)
        # fp32 gradients and their reduction: a few 1e-7 of S and B, amplified by their difference.
        assert (reading.trace_cov, reading.grad_sq) == pytest.approx(expected, rel=1e-5)
        assert (measurement.n_units, measurement.n_batches) == (first.n_units, first.n_batches)
        assert measurement.ended == first.ended
        assert measurement.loss == first.loss
        assert result["hooks"] == 0
    return first


@pytest.mark.parametrize("wrapped", [True, False])
def test_two_ranks(ranks2: Ranks, wrapped: bool) -> None:
    results = ranks2(measure_here, (30, 30), (4,), wrapped, {})
    measurement = assert_as_one_process(results)
    assert (measurement.ended, measurement.n_batches, measurement.n_units) == ("data ended", 60, 240)
    assert measurement.reading.windows == 8
    # In each window: what all did, four gradients, the probe's sums, whether to stop. Two objects are gathered at the
    # beginning, the probe compares its options, and then whether all have begun; at the end a window is empty, and the
    # ranks agree why.
    assert {r["n_collectives"] - r["n_before"] for r in results} == {4 + (3 + 4) * 8 + 2}


@pytest.mark.shows("measure", "DDP")
def test_two_ranks_give_what_one_process_gives(ranks2: Ranks) -> None:
    """Windows are alike however many ranks share them: the ranks' batches, interleaved, in one process."""
    on_ranks = assert_as_one_process(ranks2(measure_here, (30, 30), (4,), True, {}))
    mine, theirs = data_of(0, 30), data_of(1, 30)
    one_process, at = [], 0
    for length in (1, 2, 3, 4, 5, 6, 7, 2):
        one_process += mine[at : at + length] + theirs[at : at + length]
        at += length
    alone = measured(model_of(), one_process)
    assert alone.reading.b_simple is None or alone.reading.b_simple == pytest.approx(
        on_ranks.reading.b_simple, rel=1e-5
    )
    assert alone.reading.windows == on_ranks.reading.windows
    assert alone.reading.trace_cov == pytest.approx(on_ranks.reading.trace_cov, rel=1e-5)
    assert alone.reading.low == pytest.approx(on_ranks.reading.low, rel=1e-4)


def test_three_ranks_with_other_numbers_of_batches_of_other_sizes(ranks3: Ranks) -> None:
    measurement = assert_as_one_process(ranks3(measure_here, (7, 25, 12), (4, 2, 5), True, {}))
    assert (measurement.ended, measurement.n_batches) == ("data ended", 44)


def test_a_rank_without_data_takes_part(ranks3: Ranks) -> None:
    measurement = assert_as_one_process(ranks3(measure_here, (20, 0, 20), (4,), True, {}))
    assert measurement.n_batches == 40


def test_a_limit_holds_on_each_rank(ranks2: Ranks) -> None:
    results = ranks2(measure_here, (30, 30), (4,), True, {"most_batches": 9})
    assert {(r["measurement"].ended, r["measurement"].n_batches) for r in results} == {("limit", 18)}


def until_here() -> sonde.Measurement:
    data = draw(2000, torch.Generator().manual_seed(1))
    model = DistributedDataParallel(model_of())
    return measured(model, endless(data, 32, seed=dist.get_rank()), until=0.4)


def test_ranks_stop_together_when_it_is_precise(ranks2: Ranks) -> None:
    first, second = ranks2(until_here)
    assert (first.ended, second.ended) == ("precise", "precise")
    assert first.precision == second.precision
    assert first.precision <= 0.4


# Nothing is changed.


def train_here(measures: bool, ddp_options: dict[str, Any], batch_norm: bool, calls_ddp: bool) -> list[Tensor]:
    """Train a few steps; measure before the first, and with gradients of an unfinished step in `.grad`."""
    rank = dist.get_rank()
    model = model_of()
    if batch_norm:
        model.insert(1, nn.BatchNorm1d(16))
    model.append(nn.Dropout(0.1))
    ddp = DistributedDataParallel(model, **ddp_options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def of_ddp(_: nn.Module, batch: Batch) -> Tensor:
        return loss(ddp, batch)

    torch.manual_seed(rank)
    first = 1 if ddp_options.get("static_graph") else 0  # before the first step it is refused
    for step in range(4):
        if measures and step >= first and step != 2:
            measured(ddp, data_of(rank, 5 + 3 * rank), loss=of_ddp if calls_ddp else loss)
        loss(ddp, data_of(rank, step + 1)[-1]).backward()
        if measures and step == 2:
            measured(ddp, data_of(rank, 5 + 3 * rank))
        optimizer.step()
        optimizer.zero_grad()
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers(), torch.get_rng_state())]


@pytest.mark.parametrize(
    ("ddp_options", "batch_norm", "calls_ddp"),
    [
        ({}, True, False),
        ({}, True, True),
        ({"static_graph": True}, False, False),
        ({"gradient_as_bucket_view": True, "find_unused_parameters": True}, False, False),
        ({"bucket_cap_mb": 0.0001}, False, False),
    ],
)
def test_training_goes_on_as_without_it(
    ranks3: Ranks, ddp_options: dict[str, Any], batch_norm: bool, calls_ddp: bool
) -> None:
    with_it = ranks3(train_here, True, ddp_options, batch_norm, calls_ddp)
    without = ranks3(train_here, False, ddp_options, batch_norm, calls_ddp)
    for one, other in zip(with_it, without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def calls_ddp_here() -> sonde.Measurement:
    """A loss that calls the DDP module itself, not the model that it is given."""
    ddp = DistributedDataParallel(model_of())
    return measured(ddp, data_of(dist.get_rank(), 20), loss=lambda _, batch: loss(ddp, batch))


def test_a_loss_may_call_ddp_itself(ranks2: Ranks) -> None:
    expected = assert_as_one_process(ranks2(measure_here, (20, 20), (4,), True, {}))
    for measurement in ranks2(calls_ddp_here):
        assert measurement.reading.trace_cov == expected.reading.trace_cov


# Errors are errors on every rank.


def error_here(what: str) -> str:
    rank = dist.get_rank()
    model: nn.Module = DistributedDataParallel(model_of())
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
    elif what == "static graph":
        model = DistributedDataParallel(model_of(), static_graph=True)
    elif what == "mixed precision":
        model = DistributedDataParallel(model_of(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    elif what == "parameters outside":
        model = nn.Sequential(model, nn.Linear(2, 2))
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
    ],
)
def test_errors(ranks2: Ranks, what: str, first: str, second: str) -> None:
    messages = ranks2(error_here, what)
    assert first in messages[0]
    assert second in messages[1]
