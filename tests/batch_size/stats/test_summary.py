"""A reading made of averages: numbers where they are known, a reason where they are not."""

from __future__ import annotations

import math

import pytest

from sonde.batch_size.stats.averages import NoiseScaleAverages
from sonde.batch_size.stats.scale_witness import ScaleReading
from sonde.batch_size.stats.solved_window import solve_window
from sonde.batch_size.stats.summary import summarise
from sonde.batch_size.stats.window_row import Drop
from tests.batch_size.stats.windows import window_row

SOUND = ScaleReading(1.0, 0.0, "scaled", sound=frozenset({0}))
CHANGED = ScaleReading(1.0, 0.5, "changed", changed=frozenset({0}))


def averages_of(
    n_windows: int, *, noise: float = 1.0, signal: float = 1.0, horizon: float = 100.0
) -> NoiseScaleAverages:
    """Windows of two pieces of 4 units each: two elements, of which noise is on the second only."""
    averages = NoiseScaleAverages(["signal", "noise"], horizon)
    for window in range(n_windows):
        varied = noise * (1 + 0.1 * (window % 3))
        pieces = [[signal, signal + varied], [signal, signal - varied]]
        averages.see_units(8)
        averages.n_seen += 1
        averages.add(solve_window(window_row([pieces], units=4), scale=1.0, n_ranks=1), SOUND)
    return averages


def test_a_resolved_reading() -> None:
    averages = averages_of(30)
    reading = summarise(averages, unit="rows", level=0.95)
    assert (reading.status, reading.reason, reading.doubts) == ("resolved", "", {})
    assert (reading.windows, reading.units_per_window, reading.unit) == (30, pytest.approx(8), "rows")
    assert reading.trace_cov is not None
    assert reading.grad_sq is not None
    assert reading.b_simple == pytest.approx(reading.trace_cov / reading.grad_sq, rel=0.1)  # nothing drifts here
    assert reading.low is not None
    assert reading.high is not None
    assert reading.low < reading.b_simple < reading.high
    assert reading.groups["signal"].trace_cov == pytest.approx(0.0, abs=1e-12)
    assert reading.groups["noise"].trace_cov == pytest.approx(reading.trace_cov)


def test_no_window_yet() -> None:
    reading = summarise(NoiseScaleAverages(["a"], horizon=100.0), unit="rows", level=0.95)
    assert (reading.status, reading.reason) == ("unresolved", "no window has ended yet")
    assert (reading.b_simple, reading.grad_sq, reading.units_per_window) == (None, None, None)


def test_the_most_frequent_reason_is_given_where_all_windows_were_dropped() -> None:
    averages = NoiseScaleAverages(["a"], horizon=100.0)
    for reason in ("rare", "frequent", "frequent"):
        averages.drop(Drop("zero", reason), SOUND)
    assert summarise(averages, unit="rows", level=0.95).reason == "frequent"


def test_a_doubt_hides_every_number_and_is_the_reason() -> None:
    averages = averages_of(30)
    for _ in range(3):
        averages.drop(Drop("changed", "noise was added"), CHANGED)
    reading = summarise(averages, unit="rows", level=0.95)
    assert reading.status == "unresolved"
    assert list(reading.doubts) == ["changed"]
    assert reading.reason == reading.doubts["changed"]
    assert "noise was added" in reading.reason
    for known in (reading, *reading.groups.values()):
        assert (known.b_simple, known.low, known.high, known.grad_sq, known.trace_cov) == (None,) * 5
    assert reading.windows_needed is None
    assert reading.windows == 30


def test_pieces_without_any_noise_raise_the_doubt_of_the_same_data() -> None:
    reading = summarise(averages_of(10, noise=0.0), unit="rows", level=0.95)
    assert list(reading.doubts) == ["same_data"]
    assert reading.b_simple is None


def test_old_windows_say_nothing_about_now() -> None:
    averages = averages_of(60)
    for _ in range(40):
        averages.n_seen += 1
        averages.drop(Drop("not_finite", "a loss was NaN"), SOUND)
    reading = summarise(averages, unit="rows", level=0.95)
    assert (reading.status, reading.b_simple) == ("unresolved", None)
    assert reading.reason == "the last 40 windows could not be used: a loss was NaN"


def test_a_few_missing_windows_are_bridged() -> None:
    averages = averages_of(60)
    expected = summarise(averages, unit="rows", level=0.95)
    for _ in range(5):
        averages.n_seen += 1
        averages.drop(Drop("not_finite", "a loss was NaN"), SOUND)
    reading = summarise(averages, unit="rows", level=0.95)
    assert reading.status == "resolved"
    assert reading.low is not None
    assert expected.low is not None
    assert reading.low < expected.low  # the trend is carried on over them


@pytest.mark.parametrize("horizon", [1e9, math.inf])
def test_a_long_horizon_costs_nothing(horizon: float) -> None:
    """It once took memory in proportion to the horizon."""
    averages = averages_of(30, horizon=horizon)
    assert summarise(averages, unit="rows", level=0.95).status == "resolved"


def test_a_reading_can_be_made_however_long_ago_the_last_window_was() -> None:
    averages = averages_of(60, horizon=2.0)
    for _ in range(1600):
        averages.n_seen += 1
        averages.drop(Drop("single_piece", "one piece only"), SOUND)
    reading = summarise(averages, unit="rows", level=0.95)
    assert (reading.status, reading.b_simple, reading.grad_sq) == ("unresolved", None, None)
    assert reading.reason == "the last 1,600 windows could not be used: one piece only"
    assert set(reading.groups) == {"signal", "noise"}
    (_, series), *_ = averages.history.series(averages.n_seen)
    assert series.mean_grad_sq.isfinite().all()
