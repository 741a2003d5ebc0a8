"""Vectors on their way to the host: their order, their values, and collectives that fail or never finish."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sonde.batch_size.readback import Readback
from sonde.batch_size.window_clock import OwnTime


class Work:
    """A collective in one of three states."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.waited = False

    def is_completed(self) -> bool:
        return self.state == "done"

    def wait(self) -> None:
        self.waited = True
        if self.state == "failed":
            raise RuntimeError("a peer has left")


def work(state: str) -> dist.Work:
    return cast("dist.Work", Work(state))


def put(readback: Readback[list[Any]], value: float, state: str | None = None) -> None:
    """Put in [value] and [value, value + 1], to be read as lists."""
    vectors = [torch.tensor([value]), torch.tensor([value, value + 1])]
    readback.put(vectors, lambda host: [v.tolist() for v in host], work(state) if state else None)


def test_values_arrive_in_the_order_in_which_they_were_put_in() -> None:
    readback: Readback[list[Any]] = Readback(OwnTime())
    put(readback, 1.0)
    put(readback, 2.0)
    readback.send()
    put(readback, 3.0)
    readback.send()
    assert readback.arrived(wait=False) == [[[k], [k, k + 1]] for k in (1.0, 2.0, 3.0)]
    assert readback.arrived(wait=True) == []  # each value once


def test_nothing_arrives_that_was_not_sent() -> None:
    readback: Readback[list[Any]] = Readback(OwnTime())
    put(readback, 1.0)
    assert readback.arrived(wait=True) == []
    readback.send()
    readback.send()
    assert readback.arrived(wait=True) == [[[1.0], [1.0, 2.0]]]


def test_each_put_is_read_by_its_own_function() -> None:
    readback: Readback[str] = Readback(OwnTime())

    def total(host: list[Tensor]) -> str:
        return f"total {float(host[0].sum()):g}"

    readback.put([torch.ones(3)], total)
    readback.put([torch.ones(2), torch.zeros(0)], lambda host: f"sizes {[v.numel() for v in host]}")
    readback.send()
    assert readback.arrived(wait=True) == ["total 3", "sizes [2, 0]"]


def test_every_value_was_summed_before_it_is_copied() -> None:
    readback: Readback[list[Any]] = Readback(OwnTime())
    collective = Work("under way")
    readback.put([torch.ones(1)], lambda host: host[0].tolist(), cast("dist.Work", collective))
    readback.send()
    assert collective.waited
    assert readback.arrived(wait=True) == [[1.0]]


def test_a_failed_collective_is_raised_and_the_others_arrive() -> None:
    readback: Readback[list[Any]] = Readback(OwnTime())
    for value, state in ((1.0, "done"), (2.0, "failed"), (3.0, None)):
        put(readback, value, state)
    with pytest.raises(RuntimeError, match="a peer has left"):
        readback.send()
    assert [value[0] for value in readback.arrived(wait=True)] == [[1.0], [3.0]]


def test_unfinished_collectives_are_abandoned_without_waiting() -> None:
    readback: Readback[list[Any]] = Readback(OwnTime())
    under_way = Work("under way")
    readback.put([torch.ones(1)], lambda host: host[0].tolist(), cast("dist.Work", under_way))
    put(readback, 2.0, "failed")
    put(readback, 3.0, "done")
    readback.send(abandon_unfinished=True)
    assert not under_way.waited
    assert [value[0] for value in readback.arrived(wait=True)] == [[3.0]]


def test_a_collective_that_completed_with_an_error_is_abandoned_silently() -> None:
    class Failed(Work):
        def is_completed(self) -> bool:
            return True

    readback: Readback[list[Any]] = Readback(OwnTime())
    readback.put([torch.ones(1)], lambda host: host[0].tolist(), cast("dist.Work", Failed("failed")))
    readback.send(abandon_unfinished=True)
    assert readback.arrived(wait=True) == []


@pytest.mark.parametrize("state", ["done", "pending"])
def test_collectives_are_waited_for_no_longer_than_asked(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr("time.sleep", sleep)
    readback: Readback[list[Any]] = Readback(OwnTime())
    put(readback, 1.0, state)
    readback.wait_for_ranks(0.5)
    assert now == pytest.approx(0.5 if state == "pending" else 0.0, abs=0.01)
    readback.send(abandon_unfinished=True)
    assert len(readback.arrived(wait=True)) == (state == "done")
