from __future__ import annotations

import math
from typing import Any

import pytest

from sonde.batch_size.stats.consistency import same_data
from sonde.stats.intervals import RatioInterval

UNKNOWN = RatioInterval("unresolved", None, None, "")


def resolved(low: float, high: float) -> RatioInterval:
    return RatioInterval("resolved", low, high, "")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"pieces_differ": False}, "all pieces have the same gradient"),
        ({"consistency": math.inf}, "not at all between them"),
        ({"consistency": 8.0, "interval": resolved(4.0, 20.0)}, "8× less between ranks than within ranks"),
        ({"consistency": 0.1, "interval": resolved(0.05, 0.2)}, "10× more between ranks"),
    ],
    ids=str,
)
def test_the_same_data_is_named(given: dict[str, Any], match: str) -> None:
    options: dict[str, Any] = {"pieces_differ": True, "consistency": 1.0, "interval": UNKNOWN} | given
    assert match in (same_data(20, **options) or "")
    assert same_data(3, **options) is None  # too early to say


@pytest.mark.parametrize(
    ("consistency", "interval"),
    [
        (None, UNKNOWN),
        (1.0, resolved(0.8, 1.2)),
        (8.0, resolved(0.9, 50.0)),  # one loss spike may be all of it
        (0.1, resolved(0.01, 2.0)),
        (8.0, UNKNOWN),
    ],
)
def test_an_uncertain_judgement_is_not_given(consistency: float | None, interval: RatioInterval) -> None:
    assert same_data(20, pieces_differ=True, consistency=consistency, interval=interval) is None
