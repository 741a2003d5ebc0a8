"""A reading made of averages: numbers where they are known, a reason where they are not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sonde.batch_size.stats.averages import NoiseScaleAverages
from sonde.batch_size.stats.noise_scale import WindowEstimate
from sonde.batch_size.stats.scale_witness import ScaleReading
from sonde.batch_size.stats.solved_window import SolvedWindow, solve_window
from sonde.batch_size.stats.summary import summarise
from sonde.batch_size.stats.window_row import Drop
from sonde.runs.report.logged_interval import logged_batch
from tests.batch_size.stats.windows import gaussian_windows, window_row

SOUND = ScaleReading(1.0, 0.0, "scaled", sound=frozenset({0}))
CHANGED = ScaleReading(1.0, 0.5, "changed", changed=frozenset({0}))


def averages_of(n_windows: int, *, noise: float = 1.0, signal: float = 1.0) -> NoiseScaleAverages:
    """Windows of two pieces of 4 units each: two elements, of which noise is on the second only."""
    averages = NoiseScaleAverages(["signal", "noise"])
    for window in range(n_windows):
        varied = noise * (1 + 0.1 * (window % 3))
        pieces = [[signal, signal + varied], [signal, signal - varied]]
        averages.see_units(8)
        averages.n_seen += 1
        averages.add(solve_window(window_row([pieces], units=4), scale=1.0, n_ranks=1), SOUND)
    return averages


def test_a_resolved_reading() -> None:
    averages = averages_of(30)
    reading = summarise(averages, unit="rows")
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


def test_a_batch_is_judged_by_as_many_units_as_the_noise_scale_counts() -> None:
    """Half of the units weigh nothing: the noise scale is in effective units, so the batch must be too."""
    averages, generator = NoiseScaleAverages(["a", "b"]), torch.Generator().manual_seed(0)
    for _ in range(400):
        averages.see_units(16)
        averages.n_seen += 1
        pieces = (torch.randn(2, 2, generator=generator) / 2).add(0.25).tolist()
        averages.add(solve_window(window_row([pieces], units=4), scale=1.0, n_ranks=1), SOUND)
    reading = summarise(averages, unit="rows")
    assert (reading.units_per_window, reading.effective_units) == (16, 8)
    assert reading.b_simple == pytest.approx(16, rel=0.4)  # 2 elements, 4 · 1/4 of noise and 1/16 of signal each
    assert reading.verdict is not None
    assert "the batch of 8 effective rows" in reading.verdict.headline
    metrics = reading.metrics()
    assert logged_batch(metrics, "rows") == (8, "effective rows")
    assert logged_batch(metrics | {"gns/effective_units": 15.9}, "rows") == (16, "rows")


@pytest.mark.parametrize("are_dropped", [True, False])
def test_windows_that_were_dropped_are_not_taken_for_unmeasured_ones(are_dropped: bool) -> None:
    averages, generator = NoiseScaleAverages(["a", "b"]), torch.Generator().manual_seed(0)
    for number in range(1, 61):
        pieces = torch.randn(2, 2, generator=generator).add(0.05).tolist()
        averages.n_seen = 2 * number
        averages.see_units(8)
        if are_dropped:
            averages.drop(Drop("not_finite", "a gradient was not finite"), SOUND)
        averages.add(solve_window(window_row([pieces], units=4), scale=1.0, n_ranks=1), SOUND)
    advice = summarise(averages, unit="rows").advice
    assert advice
    assert ("measure every window" in advice) == (not are_dropped)


def test_no_window_yet() -> None:
    reading = summarise(NoiseScaleAverages(["a"]), unit="rows")
    assert (reading.status, reading.reason) == ("unresolved", "no window has ended yet")
    assert (reading.b_simple, reading.grad_sq, reading.units_per_window) == (None, None, None)


def test_the_most_frequent_reason_is_given_where_all_windows_were_dropped() -> None:
    averages = NoiseScaleAverages(["a"])
    for reason in ("rare", "frequent", "frequent"):
        averages.drop(Drop("zero", reason), SOUND)
    assert summarise(averages, unit="rows").reason == "frequent"


def test_a_doubt_hides_every_number_and_is_the_reason() -> None:
    averages = averages_of(30)
    for _ in range(3):
        averages.drop(Drop("changed", "noise was added"), CHANGED)
    reading = summarise(averages, unit="rows")
    assert reading.status == "unresolved"
    assert list(reading.doubts) == ["changed"]
    assert reading.reason == reading.doubts["changed"]
    assert "noise was added" in reading.reason
    for known in (reading, *reading.groups.values()):
        assert (known.b_simple, known.low, known.high, known.grad_sq, known.trace_cov) == (None,) * 5
    assert reading.windows_needed is None
    assert reading.windows == 30


def test_pieces_without_any_noise_raise_the_doubt_of_the_same_data() -> None:
    reading = summarise(averages_of(10, noise=0.0), unit="rows")
    assert list(reading.doubts) == ["same_data"]
    assert reading.b_simple is None


def test_old_windows_say_nothing_about_now() -> None:
    averages = averages_of(60)
    for _ in range(40):
        averages.n_seen += 1
        averages.drop(Drop("not_finite", "a loss was NaN"), SOUND)
    reading = summarise(averages, unit="rows")
    assert (reading.status, reading.b_simple) == ("unresolved", None)
    assert reading.reason == "the last 40 windows could not be used: a loss was NaN"


def test_a_few_missing_windows_are_bridged() -> None:
    averages = averages_of(60)
    expected = summarise(averages, unit="rows")
    for _ in range(5):
        averages.n_seen += 1
        averages.drop(Drop("not_finite", "a loss was NaN"), SOUND)
    reading = summarise(averages, unit="rows")
    assert (reading.status, reading.dropped) == ("resolved", {"a loss was NaN": 5})
    assert (reading.low, reading.high) == (expected.low, expected.high)  # of the last window that was used


def test_a_reading_can_be_made_however_long_ago_the_last_window_was() -> None:
    averages = averages_of(60)
    for _ in range(1600):
        averages.n_seen += 1
        averages.drop(Drop("single_piece", "one piece only"), SOUND)
    reading = summarise(averages, unit="rows")
    assert (reading.status, reading.b_simple, reading.grad_sq, reading.scatter) == ("unresolved", None, None, None)
    assert (reading.average, reading.windows_needed, reading.advice) == (None, None, "")
    assert reading.reason == "the last 1,600 windows could not be used: one piece only"
    assert set(reading.groups) == {"signal", "noise"}


def test_the_level_and_the_scatter_are_those_of_the_windows() -> None:
    """One window in 10, of Gaussian gradients whose noise scale grows like the steps."""
    averages = NoiseScaleAverages([])
    ends = range(10, 2001, 10)
    windows = gaussian_windows([0.1 * (t + 30) for t in ends], n_runs=1, seed=3)[:, 0]
    for end, (x, y) in zip(ends, windows.tolist(), strict=True):
        averages.n_seen = end
        averages.see_units(32)
        averages.add(SolvedWindow(WindowEstimate(x, y), (), None, 1.0, 32.0, 1 / 8, 1.0, 1.0), SOUND)
    reading = summarise(averages, unit="rows")
    assert reading.status == "resolved"
    assert reading.b_simple == pytest.approx(203, rel=0.3)
    assert reading.low is not None
    assert reading.high is not None
    assert reading.low < 203 < reading.high
    # A single window knows |G|² badly: to first order, var y/y² with y = 1/B and var y = 4 |G|²/(n B) + 2/(n² r).
    y = 1 / 150  # about halfway in the last half
    expected = math.sqrt((4 * y / (200 * 32) + 2 / (200 * 32**2)) / y**2)
    assert reading.scatter == pytest.approx(expected, rel=0.5)
    assert reading.every == pytest.approx(10)
    # Over the run, each step weighs by its progress: Σ B/|F|² … over Σ 1/|F|² …, in which early steps are as good.
    assert reading.average is not None
    sizes = [1 / (0.1 * (t + 30)) + 1 / 32 for t in range(1, 2001)]
    mean_x = sum(1 / size for size in sizes) / 2000
    mean_y = sum(1 / (0.1 * (t + 30)) / size for t, size in enumerate(sizes, 1)) / 2000
    assert reading.average.low is not None
    assert reading.average.high is not None
    assert reading.average.low < mean_x / mean_y < reading.average.high


def test_a_reading_of_the_total_has_no_groups() -> None:
    averages = averages_of(30)
    total, whole = summarise(averages, unit="rows", with_groups=False), summarise(averages, unit="rows")
    assert total.groups == {}
    assert (total.b_simple, total.low, total.high) == pytest.approx((whole.b_simple, whole.low, whole.high), rel=1e-9)


@pytest.mark.parametrize(("n_windows", "batch"), [(20, 8.0), (300, 4.0), (300, 1e4)])
def test_a_reading_in_words_gives_the_advice_of_its_verdict(n_windows: int, batch: float) -> None:
    """In the first steps there is none, for a small batch none is needed, and a large one may be anything."""
    reading = replace(summarise(averages_of(n_windows), unit="rows"), units_per_window=batch, effective_units=batch)
    reading = replace(reading, status="lower_bound", low=20.0, high=math.inf, b_simple=None, advice="measure more")
    assert reading.verdict is not None
    ending = "; measure more" if batch == 1e4 else ""
    assert str(reading).endswith(f"{reading.verdict.in_short}{ending}" if n_windows > 100 else "20 windows")
    assert str(replace(reading, units_per_window=None)).endswith("; measure more")  # of a checkpoint: no verdict


def test_groups_without_a_gradient_are_left_out() -> None:
    averages = averages_of(30)
    averages.run.begin_anew(31)
    for _ in range(3):
        averages.n_seen += 1
        averages.see_units(8)
        row = window_row([[[1.0, 0.0], [2.0, 0.0]]], units=4)
        averages.add(solve_window(row, scale=1.0, n_ranks=1), SOUND)
    assert list(summarise(averages, unit="rows").groups) == ["signal"]
