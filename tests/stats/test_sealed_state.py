"""A state is what an object names, and no part of the object."""

from __future__ import annotations

import json

from sonde.stats.sealed_state import Stateful


class Counts(Stateful):
    STATE = ("n", "inner")

    def __init__(self, inner: Counts | None = None) -> None:
        self.n, self.inner, self.not_kept = {"a": [0]}, inner, 5


def test_a_state_goes_on_in_another_object_and_belongs_to_neither() -> None:
    first, second = Counts(Counts()), Counts(Counts())
    first.n["a"] = [3]
    state = first.state_dict()
    assert state == {"n": {"a": [3]}, "inner": {"n": {"a": [0]}, "inner": None}}
    for read in (json.loads(json.dumps(state)), state):
        second.load_state_dict(read)
        assert second.state_dict() == state
    second.n["a"].append(1)
    first.n["a"].append(2)
    assert state["n"] == {"a": [3]}
    assert first.inner is not second.inner
