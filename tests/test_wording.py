from __future__ import annotations

import math

import pytest

from sonde.wording import duration, interval, number


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "not known"),
        (math.nan, "not known"),
        (math.inf, "unbounded"),
        (0.0, "0"),
        (64.0, "64"),
        (0.99996, "1"),
        (9.996, "10"),
        (38.1234, "38.1"),
        (-0.5, "−0.500"),
        (1234.5, "1,234"),
        (999_999.0, "999,999"),
        (1_234_567.0, "1.23 million"),
        (4e9, "4 billion"),
        (3.2e-5, "3.20 × 10⁻⁵"),
        (1e15, "1.00 × 10¹⁵"),
    ],
)
def test_numbers(value: float | None, written: str) -> None:
    assert number(value) == written


def test_intervals_and_durations() -> None:
    assert [interval(1.0, 2.0), interval(1.0, math.inf), interval(None, 2.0)] == ["1 to 2", "more than 1", "not known"]
    assert [duration(s) for s in (0, 0.5, 3599, 3600, 90_000)] == ["0 ms", "500 ms", "59 min 59 s", "1 h", "25 h"]
