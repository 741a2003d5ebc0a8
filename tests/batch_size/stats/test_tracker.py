"""A reading made of averages: numbers where they are known, a reason where they are not; and their saved state."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from sonde.batch_size.stats.reading import Coverage
from sonde.batch_size.stats.tracker import NoiseScaleTracker
from sonde.batch_size.stats.window_row import Drop, SolvedWindow, solve_window
from sonde.decision.facts import FROM_HERE_ON, facts_of
from sonde.stats.intervals import RatioInterval
from tests.batch_size.stats.windows import gaussian_windows, solved, take, tracker_of, window_row


def averages_of(n_windows: int, *, noise: float = 1.0, signal: float = 1.0) -> NoiseScaleTracker:
    """Windows of two pieces of 4 units each: two elements, of which noise is on the second only."""
    tracker = tracker_of(["signal", "noise"])
    for window in range(n_windows):
        varied = noise * (1 + 0.1 * (window % 3))
        take(tracker, of_pieces([[signal, signal + varied], [signal, signal - varied]]))
    return tracker


def of_pieces(pieces: list[list[float]]) -> SolvedWindow:
    return solve_window(window_row([pieces], units=4), scale=1.0, n_ranks=1, apart={})


def test_a_resolved_reading() -> None:
    averages = averages_of(30)
    reading = averages.reading()
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
    averages, generator = tracker_of(["a", "b"]), torch.Generator().manual_seed(0)
    for _ in range(400):
        take(averages, of_pieces((torch.randn(2, 2, generator=generator) / 2).add(0.25).tolist()), units=16)
    reading = averages.reading()
    assert (reading.units_per_window, reading.effective_units) == (16, 8)
    assert reading.b_simple == pytest.approx(16, rel=0.4)  # 2 elements, 4 · 1/4 of noise and 1/16 of signal each
    setup = {"optimizer_kind": "Adam or AdamW (β = 0.9)"}
    known = facts_of(
        reading.metrics(), setup, now=reading.now, window=400, pieces=4, optimizer_changed=False, unit="rows"
    )
    assert (known.batch, known.scopes[FROM_HERE_ON].known.ratio) == (16, 2 * (reading.b_simple or 0.0))


@pytest.mark.parametrize("are_dropped", [True, False])
def test_windows_that_were_dropped_are_not_taken_for_unmeasured_ones(are_dropped: bool) -> None:
    averages, generator = tracker_of(["a", "b"]), torch.Generator().manual_seed(0)
    for _ in range(60):
        if are_dropped:
            averages.drop(Drop("not_finite", "a gradient was not finite"))
        take(averages, of_pieces(torch.randn(2, 2, generator=generator).add(0.05).tolist()), every=2)
    advice = averages.reading().advice
    assert advice
    assert ("measure every window" in advice) == (not are_dropped)


def test_the_most_frequent_reason_is_given_where_all_windows_were_dropped() -> None:
    averages = tracker_of(["a"])
    for reason in ("rare", "frequent", "frequent"):
        averages.drop(Drop("zero", reason))
    assert averages.reading().reason == "frequent"


def test_a_doubt_hides_every_number_and_is_the_reason() -> None:
    averages = averages_of(30)
    for _ in range(3):
        change(averages)
    reading = averages.reading()
    assert reading.status == "unresolved"
    assert list(reading.doubts) == ["changed"]
    assert reading.reason == reading.doubts["changed"]
    assert "noise was added" in reading.reason
    for known in (reading, *reading.groups.values()):
        assert (known.b_simple, known.low, known.high, known.grad_sq, known.trace_cov) == (None,) * 5
    assert reading.windows_needed is None
    assert reading.windows == 30


def test_a_reading_can_be_made_however_long_ago_the_last_window_was() -> None:
    averages = averages_of(60)
    for _ in range(1600):
        averages.n_seen += 1
        averages.drop(Drop("single_piece", "one piece only"))
    reading = averages.reading()
    assert (reading.status, reading.b_simple, reading.grad_sq, reading.scatter) == ("unresolved", None, None, None)
    assert (reading.average, reading.windows_needed, reading.advice) == (None, None, "")
    assert reading.reason == "the last 1,600 windows could not be used: one piece only"
    assert set(reading.groups) == {"signal", "noise"}


def test_the_level_and_the_scatter_are_those_of_the_windows() -> None:
    """One window in 10, of Gaussian gradients whose noise scale grows like the steps."""
    averages = tracker_of()
    ends = range(10, 2001, 10)
    windows = gaussian_windows([0.1 * (t + 30) for t in ends], n_runs=1, seed=3)[:, 0]
    take(averages, *(solved([window]) for window in windows.tolist()), units=32, every=10)
    reading = averages.reading()
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


def test_a_reading_in_words_says_what_would_make_it_known_better() -> None:
    reading = replace(averages_of(300).reading(), units_per_window=8.0, unit="prompts")
    reading = replace(reading, status="lower_bound", low=20.0, high=math.inf, b_simple=None, advice="measure more")
    assert str(reading).startswith("B_simple > 20 prompts")
    assert str(reading).endswith("batch 8 prompts, 300 windows; measure more")


def test_the_pieces_of_a_short_window_say_nothing_of_the_others() -> None:
    """The last window of an epoch: 1 micro-batch of 2 where the others have 4."""
    tracker = tracker_of(["a", "b"])
    for pieces in ([[1.0, 2.0], [3.0, 1.0], [2.0, 2.0], [1.0, 1.0]],) * 3 + ([[1.0, 2.0]],):
        tracker.update(window_row([pieces], units=2))
    assert tracker.n_pieces == 4


def of_two(trace_cov: float, grad_sq: float) -> SolvedWindow:
    """A window of two groups that share its estimates one to three."""
    shares = [(part * trace_cov, part * grad_sq) for part in (1.0, 0.25, 0.75)]
    return solved(shares, 8.0, u=0.25, compared={"consistency": (2.0, 1.0), "differences": (1.0, 10.0)})


def change(tracker: NoiseScaleTracker, *changed: int) -> None:
    """A window in which the gradients of these parameters were changed."""
    tracker.dependence.see_change("noise was added", set(changed))
    tracker.drop(Drop("changed", "noise was added"))


def averages_of_some_windows() -> NoiseScaleTracker:
    averages = tracker_of(["a", "b"])
    take(averages, of_two(30.0, 14.0), of_two(34.0, 18.0), of_two(31.0, 17.0))
    averages.see_units(8)
    for _ in range(2):
        change(averages)
    return averages


def test_averages_by_hand() -> None:
    averages = tracker_of(["a", "b"])
    assert (averages.units_per_window, averages.reading().consistency) == (None, None)
    averages.see_units(8)
    averages.see_units(16)
    assert averages.units_per_window == pytest.approx((0.98 * 8 + 16) / 1.98)  # the decay is 1 − 1/memory
    take(averages, of_two(30.0, 14.0), of_two(34.0, 18.0), residual=1e-8)
    recent = averages.run.recent()
    assert recent is not None
    assert (recent.n_windows, recent.n_steps) == (2, 2)
    assert recent.trace_cov == pytest.approx([32.0, 8.0, 24.0])
    assert recent.grad_sq == pytest.approx([16.0, 4.0, 12.0])
    reading = averages.reading()
    assert (reading.consistency, reading.doubts) == (pytest.approx(2.0), {})
    assert reading.effective_units == reading.units_per_window  # units weigh alike
    assert (reading.u, reading.scale, reading.scale_residual) == (0.25, 1.0, 1e-8)


def test_the_state_round_trips_through_json() -> None:
    averages, restored = averages_of_some_windows(), tracker_of(["a", "b"])
    restored.load_state_dict(json.loads(json.dumps(averages.state_dict())))
    assert restored.state_dict() == averages.state_dict()
    assert restored.reading() == averages.reading()
    assert "noise was added" in restored.reading().doubts["changed"]
    for each in (averages, restored):  # and both go on alike
        take(each, of_two(40.0, 10.0), units=16)
    assert restored.state_dict() == averages.state_dict()


def test_a_batch_that_was_changed_is_not_averaged_with_the_one_before() -> None:
    averages = tracker_of()
    for n_units in [512.0] * 60 + [16.0] * 4:
        averages.see_units(n_units)
    assert averages.units_per_window > 400  # type: ignore[operator]
    averages.see_units(16.0)
    assert averages.units_per_window == 16.0


def test_a_change_is_an_accident_once_one_of_its_parameters_is_seen_sound() -> None:
    averages = averages_of(40)
    change(averages, 1, 7)
    assert "noise was added; no unchanged gradient" in averages.reading().doubts["changed"]
    take(averages, *[of_two(32.0, 16.0)])  # which compares parameters 0 and 1
    assert averages.reading().status == "resolved"
    take(averages, *[of_two(32.0, 16.0)] * 200)
    change(averages, 7)
    take(averages, *[of_two(32.0, 16.0)] * 40)
    restored = tracker_of(["signal", "noise"])
    restored.load_state_dict(json.loads(json.dumps(averages.state_dict())))
    for each in (averages, restored):
        assert "no unchanged gradient" in each.reading().doubts["changed"]
        each.dependence.see_change(None, sound={0, 1, 7})
        assert each.reading().status == "resolved"


@pytest.mark.parametrize("part", [0.8, 0.95, 0.999])
@pytest.mark.parametrize("of_rest", [0.0, 0.3, 1.0])
def test_the_interval_holds_what_uncovered_parameters_may_add(part: float, of_rest: float) -> None:
    """Whatever part of the rest's |F|² is signal, and the other noise."""
    units, covered = 16.0, RatioInterval("resolved", 8.0, 40.0, "", 20.0)
    whole = Coverage(3, 4, part).with_the_rest(covered, units)
    for b in (8.0, 20.0, 40.0):
        grad_sq, trace_cov = 1.0, b
        rest = (grad_sq + trace_cov / units) * (1 - part) / part
        grad_sq, trace_cov = grad_sq + of_rest * rest, trace_cov + (1 - of_rest) * rest * units
        assert whole.low is not None
        assert whole.high is not None
        assert whole.low * (1 - 1e-9) <= trace_cov / grad_sq <= whole.high * (1 + 1e-9)
    assert Coverage(3, 4, part).with_the_rest(RatioInterval("unresolved", None, None), units).low is None
