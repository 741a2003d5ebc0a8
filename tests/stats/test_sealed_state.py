"""A state is what an object names, and no part of the object."""

from __future__ import annotations

import json

from sonde.stats.sealed_state import Stateful


class Inner(Stateful):
    STATE = ("n",)

    def __init__(self) -> None:
        self.n = 0


class Outer(Stateful):
    STATE = ("inner", "names", "rate")

    def __init__(self) -> None:
        self.inner = Inner()
        self.names: dict[str, list[int]] = {}
        self.rate: float | None = None
        self.not_kept = 5


def test_a_state_goes_on_in_another_object_and_belongs_to_neither() -> None:
    first, second = Outer(), Outer()
    first.inner.n, first.names, first.rate, second.not_kept = 3, {"a": [1]}, 0.5, 7
    state = first.state_dict()
    assert state == {"inner": {"n": 3}, "names": {"a": [1]}, "rate": 0.5}
    second.load_state_dict(json.loads(json.dumps(state)))
    assert second.state_dict() == state
    assert second.not_kept == 7
    third = Outer()
    third.load_state_dict(state)
    first.names["a"].append(2)
    third.names["b"] = []
    assert state["names"] == {"a": [1]}
    assert first.inner.n == second.inner.n == 3
    assert second.inner is not first.inner
