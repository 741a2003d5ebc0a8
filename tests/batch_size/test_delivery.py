"""Vectors on their way to the host: their order, their values, and collectives that fail or never finish."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sonde.batch_size.arrivals import Delivery
from sonde.batch_size.window_clock import OwnTime


class Work:
    """A collective that is "done", "pending", "failed", or "done, failed" where it says that it is completed."""

    def __init__(self, state: str) -> None:
        self.state, self.waited = state, False

    def is_completed(self) -> bool:
        return self.state.startswith("done")

    def wait(self) -> None:
        self.waited = True
        if self.state.endswith("failed"):
            raise RuntimeError("a peer has left")


class Received(Delivery):
    """A delivery whose windows are lists: [value] and [value, value + 1]."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        super().__init__(self.values.append, torch.device("cpu"), (), OwnTime())

    def put_value(self, value: float, state: str | None = None) -> Work | None:
        vectors = [torch.tensor([value]), torch.tensor([value, value + 1])]
        work: Any = Work(state) if state else None
        read: Any = lambda host: [v.tolist() for v in host]  # noqa: E731
        self.put(vectors, read, work)
        return work  # type: ignore[no-any-return]

    def now(self, *, wait: bool = True) -> list[float]:
        self.values.clear()
        self.receive(wait=wait)
        assert all(value == [[value[0][0]], [value[0][0], value[0][0] + 1]] for value in self.values)
        return [value[0][0] for value in self.values]


def test_values_arrive_once_and_in_the_order_in_which_they_were_put_in() -> None:
    received = Received()
    received.put_value(1.0)
    assert received.now() == []  # not sent
    received.put_value(2.0)
    received.send()
    received.put_value(3.0)
    received.send()
    received.send()
    assert received.now(wait=False) == [1.0, 2.0, 3.0]
    assert received.now() == []
    assert received.is_empty


@pytest.mark.parametrize(
    ("states", "abandon", "raises", "waited", "arrived"),
    [
        (("pending", None, "done"), False, False, 0, [1.0, 2.0, 3.0]),  # summed before it is copied
        (("done", "failed", None), False, True, 1, [1.0, 3.0]),
        (("pending", "failed", "done"), True, False, None, [3.0]),
        (("done, failed", None, "done"), True, False, 0, [2.0, 3.0]),
    ],
)
def test_a_collective_is_waited_for_or_abandoned(
    states: tuple[str | None, ...], abandon: bool, raises: bool, waited: int | None, arrived: list[float]
) -> None:
    received = Received()
    works = [received.put_value(k + 1.0, state) for k, state in enumerate(states)]
    if raises:
        with pytest.raises(RuntimeError, match="a peer has left"):
            received.send(abandon_unfinished=abandon)
    else:
        received.send(abandon_unfinished=abandon)
    assert received.now() == arrived
    if waited is not None:
        assert works[waited].waited  # type: ignore[union-attr]
    assert not (abandon and any(work is not None and work.waited and work.state == "pending" for work in works))


@pytest.mark.parametrize("state", ["done", "pending"])
def test_collectives_are_waited_for_no_longer_than_asked(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr("time.sleep", sleep)
    received = Received()
    received.put_value(1.0, state)
    received.wait_for_ranks(0.5)
    assert now == pytest.approx(0.5 if state == "pending" else 0.0, abs=0.01)
    received.send(abandon_unfinished=True)
    assert len(received.now()) == (state == "done")
