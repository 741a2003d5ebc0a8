"""What would make a noise scale known better: as much as it takes, by the law of its error, and no more."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from sonde.batch_size.stats.averages import what_helps, windows_needed

BARELY = 0.45
"""Standard error of log B at which |G|² is just distinguished from 0."""


@pytest.mark.parametrize(
    ("log_error", "n_windows", "expected"),
    [
        (0.05, 100, 0),
        (0.2 / 1.96, 100, 0),
        (0.2 / 1.96 * 2, 100, 300),  # four times the windows in all
        (0.2 / 1.96 * math.sqrt(2), 40, 40),  # twice
        (None, 40, None),
        (2.0, 40, None),  # |G|² may be anything
        (0.3, 0, None),
    ],
)
def test_windows_needed(log_error: float | None, n_windows: int, expected: int | None) -> None:
    assert windows_needed(log_error, n_windows) == expected


def advice(status: str, log_error: float | None, **known: Any) -> str:
    facts: dict[str, Any] = {"n_steps": 2000, "every": 1.0} | known
    return what_helps(status, log_error, **facts)


def number_in(text: str) -> float:
    [found] = re.findall(r"[\d.]+", text)
    return float(found)


def test_nothing_is_advised_before_the_first_step_or_where_the_number_is_known_well() -> None:
    assert advice("unresolved", None, n_steps=0) == ""
    for log_error in (None, 0.0, 0.1, 0.25):
        assert advice("resolved", log_error) == ""
    assert advice("resolved", 0.3) != ""


@pytest.mark.parametrize("every", [2, 10, 500])
@pytest.mark.parametrize("log_error", [0.5, 0.8, 1.4])
def test_denser_windows_come_first_and_are_enough(every: int, log_error: float) -> None:
    """The variance of the averages is in proportion to N, one window in N being measured."""
    got = advice("lower_bound", log_error, every=float(every))
    match = re.fullmatch(r"measure one window in (\d+) \(every=(\d+), or a larger budget=\)", got)
    if match is None:
        assert got == "measure every window (every=1)"
        assert log_error * math.sqrt(2 / every) > BARELY or every == 2  # one in 2 would not be enough, or is now
        return
    denser = int(match[1])
    assert match[1] == match[2]
    assert 1 <= denser < every
    assert log_error * math.sqrt(denser / every) <= BARELY
    # It is the sparsest pace that is; but a remedy of less than a half more would change little.
    assert log_error * math.sqrt((denser + 1) / every) > BARELY or every / (denser + 1) < 1.5


def test_nothing_is_computed_from_the_first_steps() -> None:
    """Runs of 30 steps would be told 43, 70 or 88 more."""
    for status in ("resolved", "lower_bound"):
        assert advice(status, 0.5, n_steps=99) == advice("lower_bound", None)
        assert advice(status, 0.5, n_steps=100).startswith("train about ")
    assert advice("lower_bound", 0.5, n_steps=30, every=4.0) == "measure every window (every=1)"


@pytest.mark.parametrize("log_error", [0.5, 0.6, 0.89])
def test_more_training_is_enough(log_error: float) -> None:
    """The variance is in proportion to one over the steps, as what counts as now grows with the run."""
    got = advice("lower_bound", log_error)
    assert re.fullmatch(r"train about \d+ more steps", got)
    more = number_in(got)
    assert log_error * math.sqrt(2000 / (2000 + more)) <= BARELY
    assert more == pytest.approx(2000 * max((log_error / BARELY) ** 2 - 1, 0.5), rel=0.1)
    assert more % 100 == 0  # two digits


def test_more_units_where_training_would_take_too_long() -> None:
    """The relative variance of |G|² is in proportion to one over the square of the units, where noise is large."""
    got = advice("lower_bound", 1.2)
    assert re.fullmatch(r"use about [\d.]+ times as many units in each window", got)
    assert number_in(got) == pytest.approx(1.2 / BARELY, abs=0.06)


def test_of_an_upper_bound_the_noise_needs_more_pieces() -> None:
    """The relative variance of tr Σ from m pieces is in proportion to 1/(m − 1)."""
    got = advice("upper_bound", 1.2)
    assert re.fullmatch(r"split each batch into [\d.]+ times as many pieces, or use as many times the units .*", got)
    for pieces in (2, 4, 32):
        assert 1.2 * math.sqrt((pieces - 1) / (number_in(got) * pieces - 1)) <= BARELY * 1.01


@pytest.mark.parametrize("log_error", [None, 2.0, 30.0])
@pytest.mark.parametrize("status", ["lower_bound", "upper_bound", "unresolved"])
def test_nothing_is_computed_from_a_signal_that_may_be_anything(status: str, log_error: float | None) -> None:
    got = advice(status, log_error)
    assert got.startswith("train on, or ")
    unknown = "tr Σ" if status == "upper_bound" else "|G|²"
    assert got.endswith(f"; how much cannot be computed before {unknown} is known better")
    assert not any(letter.isdecimal() for letter in got)
