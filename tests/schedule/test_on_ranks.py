"""A batch schedule on several ranks: they decide alike, or all of them say why not."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sonde.schedule.batch_schedule import BatchSchedule
from tests.batch_size.cut_loops import attached as attached_to_cut
from tests.batch_size.cut_loops import run_pieces
from tests.batch_size.cuts import made
from tests.batch_size.set_ups import Loop
from tests.ranks import Ranks
from tests.schedule.noisy_gradients import ROWS, Linear, attached, micro_batches, train

OPTIONS: dict[str, Any] = {"smallest": 1, "largest": 4, "ratio": 50.0, "verbose": False, "pause": 0}


def _trained(
    n_windows: int, of_rank_1: dict[str, Any], apart: float = 1.0, *, ignores: bool = False
) -> tuple[list[int], list[float], Any]:
    """Counts, weights and the lower end of this rank's own last reading.

    Args:
        n_windows: to train.
        of_rank_1: options that rank 1 alone has.
        apart: rank 1 reads so many times the noise scale of rank 0.
        ignores: both ranks take one micro-batch, whatever the schedule says.
    """
    rank = dist.get_rank()
    model = DistributedDataParallel(Linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as probe:
        schedule = BatchSchedule(probe, **(OPTIONS | (of_rank_1 if rank == 1 else {})))
        if rank == 1 and apart != 1.0:
            own = probe.reading

            def reading(**options: Any) -> Any:
                now = own(**options)
                return replace(now, low=None if now.low is None else apart * now.low)

            probe.reading = reading  # type: ignore[method-assign, assignment]
        counts = []
        for window in range(n_windows):
            pieces = micro_batches(window, schedule.micro_batches, rank=rank)[: 1 if ignores else None]
            for k, x in enumerate(pieces):
                model.require_backward_grad_sync = k == len(pieces) - 1
                (model(x).mean() / len(pieces)).backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(len(pieces))
        return counts, model.module.weight.tolist(), probe.reading().low


@pytest.mark.parametrize("apart", [1.0, 1e-9])
def test_ranks_decide_alike(ranks2: Ranks, apart: float) -> None:
    """By the first rank's reading, also where another rank would decide otherwise: there the batch would not grow."""
    (counts, weights, low), (others, other_weights, other_low) = ranks2(_trained, 60, {}, apart)
    assert counts == others
    assert (counts[0], counts[-1]) == (1, 4)
    assert weights == other_weights
    assert other_low == (low if apart == 1.0 else pytest.approx(apart * low))


def _refused(what: str) -> str:
    of_rank_1 = {"arguments": {"largest": 8}, "bad arguments": {"largest": 0}}
    of_rank_1 |= {"every": {"every": 7}, "rule": {"rule": "none"}}
    try:
        _load_another_state() if what == "loads" else _trained(60, of_rank_1.get(what, {}), ignores=what == "sizes")
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def _load_another_state() -> None:
    model = DistributedDataParallel(Linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as probe:
        schedule = BatchSchedule(probe, **OPTIONS)
        first = schedule.state_dict()
        schedule._state = replace(schedule._state, micro_batches=2)
        schedule.load_state_dict(schedule.state_dict() if dist.get_rank() else first)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("arguments", ("ranks disagree on the next batch: rank 0 of the group has .*largest=4.*has .*largest=8",) * 2),
        ("every", (r"ranks disagree on the next batch: .*, 10, None\), rank 1 .*, 7, None\)",) * 2),
        ("rule", ("ranks disagree on the next batch: .* 'none'",) * 2),
        ("bad arguments", ("rank 1 of the group failed: ValueError: micro-batches must be", "micro-batches must be a")),
        ("sizes", ("the last 5 measured ones had not; the last one had 8 rows",) * 2),
        ("loads", ("ranks disagree on the next batch: rank 0 of the group has .*'micro_batches': 1.*: 2",) * 2),
    ],
)
def test_ranks_that_disagree_all_say_so(ranks2: Ranks, what: str, words: tuple[str, str]) -> None:
    for said, expected in zip(ranks2(_refused, what), words, strict=True):
        assert re.search(expected, said), said


def _in_a_pipeline() -> tuple[list[int], Any]:
    cut = made(Loop("pp", weighted=True))
    optimizer = torch.optim.SGD(cut.model.parameters(), lr=0.01)
    probe = attached_to_cut(cut, optimizer)
    schedule = BatchSchedule(probe, **(OPTIONS | {"ratio": 1e6, "every": 4}))
    counts = []
    for window in range(24):
        for _ in range(schedule.micro_batches):  # each run of the pipeline's schedule is one
            run_pieces(cut, probe, window % 2)
        optimizer.step()
        optimizer.zero_grad()
        counts.append(schedule.micro_batches)
    reading = probe.reading()
    probe.close()
    return counts, (reading.b_simple, reading.low, reading.high, reading.units_per_window)


def test_stages_of_a_pipeline_read_and_decide_alike(ranks2: Ranks) -> None:
    """Stages hold other parameters, and their sums are summed: readings are equal bit for bit."""
    (counts, reading), (others, other_reading) = ranks2(_in_a_pipeline)
    assert reading == other_reading
    assert counts == others
    assert counts[-1] > 1


@pytest.mark.parametrize("resumes", [False, True])
def test_rows_of_all_ranks_make_the_batch(ranks2: Ranks, resumes: bool) -> None:
    """Also of a run that is resumed from a checkpoint of a single process."""
    states = None
    if resumes:
        model = Linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with attached(model, optimizer) as probe:
            schedule = BatchSchedule(probe, **(OPTIONS | {"smallest": 4}))
            train(model, optimizer, schedule, range(15))
            states = probe.state_dict(), schedule.state_dict()
    for batch in ranks2(_logged_batch, states):
        assert batch == 4 * 2 * ROWS


def _logged_batch(states: Any) -> Any:
    model = DistributedDataParallel(Linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as probe:
        schedule = BatchSchedule(probe, **(OPTIONS | {"smallest": 4}))
        if states is not None:
            probe.load_state_dict(states[0])
            schedule.load_state_dict(states[1])
        for window in range(11):
            for x in micro_batches(window, schedule.micro_batches, rank=dist.get_rank()):
                model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return schedule.metrics()["schedule/batch"]
