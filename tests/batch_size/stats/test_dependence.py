"""The same data on ranks or in micro-batches is named, and chance is not."""

from __future__ import annotations

import json

import pytest

from sonde.batch_size.stats.dependence import Dependence


def watched(within: float, between: float, *, scatter: float = 0.1, windows: int = 20, differ: float = 1.0) -> str:
    """What is said after windows of some noise within and between ranks, which scatter by a part of it."""
    watch = Dependence(50.0)
    for window in range(windows):
        watch.add({"differences": (differ, 1.0), "consistency": (within * (1 + scatter * (window % 3 - 1)), between)})
    restored = Dependence(50.0)
    restored.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert restored.doubts() == watch.doubts()
    return watch.doubts().get("same_data", "")


@pytest.mark.parametrize(
    ("within", "between", "differ", "words"),
    [
        (1.0, 1.0, 1e-12, "all pieces have the same gradient"),
        (1.0, 0.0, 1.0, "not at all between them"),
        (8.0, 1.0, 1.0, "× less between ranks than within ranks"),
        (1.0, 10.0, 1.0, "× more between ranks"),
        (0.0, 1.0, 1.0, "more between ranks"),
        (2.0, 1.0, 1.0, ""),
    ],
)
def test_the_same_data_is_named(within: float, between: float, differ: float, words: str) -> None:
    said = watched(within, between, differ=differ)
    assert words in said
    assert bool(said) == bool(words)
    assert not watched(within, between, differ=differ, windows=4)  # too early to say


def test_an_uncertain_judgement_is_not_given() -> None:
    """One loss spike may be all of it."""
    assert watched(8.0, 1.0, scatter=0.0)
    watch = Dependence(50.0)
    for window in range(20):
        watch.add({"differences": (1.0, 1.0), "consistency": (150.0 if window == 10 else 1.0, 1.0)})
    assert watch.consistency is not None
    assert watch.consistency > 3
    assert not watch.doubts()
