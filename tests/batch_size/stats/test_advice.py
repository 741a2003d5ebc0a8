"""What would make a noise scale known better: the cheapest remedy that the numbers allow."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sonde.batch_size.stats.advice import advise, windows_needed

FULL: dict[str, Any] = {"windows": 400, "effective": 100.0, "most_effective": 100.0}
YOUNG: dict[str, Any] = {"windows": 20, "effective": 18.0, "most_effective": 100.0}


@pytest.mark.parametrize(
    ("log_error", "state", "expected"),
    [
        (0.05, FULL, 0),
        (0.2 / 1.96 * 2, YOUNG, 60),  # four times the windows
        (0.2 / 1.96 * 2, FULL, None),  # the horizon is full
        (None, YOUNG, None),
    ],
)
def test_windows_needed(log_error: float | None, state: dict[str, Any], expected: int | None) -> None:
    assert windows_needed(log_error, **state) == expected


def test_an_infinite_horizon_reaches_any_precision() -> None:
    assert windows_needed(1.0, windows=100, effective=80.0, most_effective=math.inf) == pytest.approx(9504, abs=1)


def advice(status: str, log_error: float | None, state: dict[str, Any], **known: Any) -> str:
    facts: dict[str, Any] = {"horizon": 50.0, "drift": None, "n_pieces": 4.0} | known
    return advise(status, log_error, **state, **facts)


def test_more_windows_where_the_horizon_is_not_full() -> None:
    assert advice("lower_bound", 0.9, YOUNG) == "measure about 60 more windows"


def test_a_longer_horizon_where_it_is_full_and_little_drifts() -> None:
    assert advice("lower_bound", 0.9, FULL) == "use a horizon of about 200 windows"  # four times the variance


def test_more_units_where_the_drift_forbids_a_longer_horizon() -> None:
    assert "2.0 times as many units in each window" in advice("lower_bound", 0.9, FULL, drift=0.05)


def test_more_pieces_where_they_suffice() -> None:
    """Two pieces of a batch have twice the variance of very many: m/(m − 1)."""
    got = advice("lower_bound", 0.45 * math.sqrt(1.5), FULL, drift=0.05, n_pieces=2.0)
    assert got == "split each batch into 4 or more pieces"  # (2/1)/(4/3) = 1.5


def test_nothing_can_be_computed_before_the_signal_is_positive() -> None:
    assert "cannot be computed before |G|² is positive" in advice("lower_bound", None, FULL)
    assert "more windows" in advice("unresolved", None, YOUNG)


def test_a_narrow_interval_needs_no_advice_and_a_wide_one_does() -> None:
    assert advice("resolved", 0.1, FULL) == ""
    assert advice("resolved", 0.5, FULL) == "use a horizon of about 200 windows"
