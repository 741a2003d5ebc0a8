"""What would make a noise scale known better: the cheapest remedy that the numbers allow."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sonde.batch_size.stats.advice import advise, windows_needed
from sonde.batch_size.stats.window_weights import effective_windows

FULL: dict[str, Any] = {"effective": 100.0, "most_effective": 100.0}
YOUNG: dict[str, Any] = {"effective": 17.8, "most_effective": 100.0}  # 20 windows


@pytest.mark.parametrize(
    ("log_error", "state", "expected"),
    [
        (0.05, FULL, 0),
        (0.2 / 1.96 * 2, YOUNG, 60),  # four times the windows
        (0.2 / 1.96 * 2, FULL, None),  # the horizon is full
        (None, YOUNG, None),
        (2.0, YOUNG, None),  # |G|² may be anything
    ],
)
def test_windows_needed(log_error: float | None, state: dict[str, Any], expected: int | None) -> None:
    assert windows_needed(log_error, **state) == expected


def test_effective_windows_grow_with_windows_as_the_trend_counts_them() -> None:
    """Twice the windows, half the variance."""
    ages = torch.arange(200, dtype=torch.float64)
    effective = effective_windows(ages, torch.ones_like(ages), math.inf)
    needed = windows_needed(0.2 / 1.96 * math.sqrt(2), effective=effective, most_effective=math.inf)
    assert needed == pytest.approx(200, abs=2)


def test_an_infinite_horizon_reaches_any_precision() -> None:
    assert windows_needed(1.0, effective=89.0, most_effective=math.inf) == pytest.approx(9504, abs=1)


def advice(status: str, log_error: float | None, state: dict[str, Any], **known: Any) -> str:
    facts: dict[str, Any] = {"horizon": 50.0, "drift": 0.0, "n_pieces": 4.0, "n_units": 32.0} | known
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


@pytest.mark.parametrize("log_error", [None, 2.0, 30.0])
def test_nothing_is_computed_from_a_signal_that_may_be_anything(log_error: float | None) -> None:
    for status, state in (("lower_bound", FULL), ("unresolved", YOUNG), ("upper_bound", FULL)):
        got = advice(status, log_error, state)
        assert "cannot be computed before" in got
        assert not any(letter.isdecimal() for letter in got)
    assert "more windows" in advice("unresolved", log_error, YOUNG)


def test_after_a_jump_and_where_no_drift_fits_a_longer_horizon_is_no_remedy() -> None:
    assert advice("lower_bound", 0.9, YOUNG, misfit="jump") == "measure about 60 more windows"
    assert advice("lower_bound", 1.4, YOUNG, misfit="jump").startswith("measure more windows; how many")
    assert advice("unresolved", None, FULL, misfit="jump").startswith("measure more windows; how many")
    assert advice("unresolved", None, FULL, misfit="drift") == "use a shorter horizon"


def test_of_an_upper_bound_the_noise_needs_more_pieces() -> None:
    """The relative variance of tr Σ from m pieces is in proportion to 1/(m − 1)."""
    assert advice("upper_bound", 0.9, YOUNG) == "measure about 60 more windows"
    assert advice("upper_bound", 0.9, FULL) == "split each batch into 13 or more pieces"  # (13 − 1)/(4 − 1) = 4
    assert advice("upper_bound", 0.9, FULL, n_units=12.0) == "use a horizon of about 200 windows"
    got = advice("upper_bound", 0.9, FULL, n_units=12.0, drift=0.05)
    assert "4.0 times as many units in each window, in pieces as small as now" in got


def test_a_narrow_interval_needs_no_advice_and_a_wide_one_does() -> None:
    assert advice("resolved", 0.1, FULL) == ""
    assert advice("resolved", 0.5, FULL) == "use a horizon of about 200 windows"
