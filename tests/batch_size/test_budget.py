"""Which windows are measured: one in each stretch, alike on all ranks, at a cost that the budget allows."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from sonde.batch_size.budget import FIRST_WINDOWS, Pace
from sonde.batch_size.measuring_cost import MOST_EVERY, N_COSTS, WindowCosts
from tests.batch_size.paces import feed, measured_by, timed
from tests.mutants import Mutant


@pytest.mark.parametrize("every", [1, 2, 3, 16, 100])
def test_one_window_of_each_stretch_is_measured(every: int) -> None:
    measured = measured_by(Pace(every=every), 200 * every)
    assert measured[0] == 1  # the first window is measured besides, to show early what is wrong with a set-up
    in_stretch = [(number - 1) // every for number in measured]
    assert sorted(set(in_stretch)) == list(range(200))
    assert len(measured) - 200 in (0, 1)


@pytest.mark.parametrize("every", [4, 12, 26])
def test_no_period_in_the_data_falls_in_step_with_the_windows(every: int) -> None:
    """Each phase of any short period is measured as often as the others."""
    measured = measured_by(Pace(every=every), 4000 * every)[1:]
    for period in (2, 3, 4, every - 1, every, every + 1, 2 * every):
        counts = [sum(number % period == phase for number in measured) for phase in range(period)]
        expected = len(measured) / period
        # χ² of so many phases, 5 standard deviations above its mean.
        chi_square = sum((n - expected) ** 2 / expected for n in counts)
        assert chi_square < period - 1 + 5 * math.sqrt(2 * (period - 1)), (period, counts)


def naive_every(measured: float, idle: float, window: float, allowed: float) -> int:
    """Try one N after the other."""
    for every in range(1, MOST_EVERY):
        cost = measured + (every - 1) * idle
        if cost <= allowed * (every * window + cost):
            return every
    return MOST_EVERY


def test_rare_dear_windows_count_in_full() -> None:
    """One measured window in 16 costs 100 times as much, as one with a large reading does: the budget still holds."""
    pace = Pace(budget=0.01)
    n_measured, spent, passed = 0, 0.0, 0.0
    settled = 20_000
    for number in range(1, 100_001):
        was_measured = pace.is_measured
        pace.window_ends()
        passed += 1e-2 * (number > settled)
        if was_measured:
            n_measured += 1
            seconds = 1e-3 * (100 if n_measured % 16 == 0 else 1)
            spent += seconds * (number > settled)
            n_idle = pace.every - 1
            costs = WindowCosts(
                seconds=seconds,
                measured_time=1e-2 + seconds,
                n_measured=1,
                idle_time=1e-2 * n_idle,
                n_idle=n_idle,
                has_verdict=1,
            )
            pace.take(pace.windows, costs)
    assert 0.007 < spent / (spent + passed) < 0.011


def test_the_smallest_n_within_nine_tenths_of_the_budget_is_chosen() -> None:
    rng = random.Random(0)
    chosen = set()
    for _ in range(300):
        window = 10 ** rng.uniform(-4, 0)
        measured, idle = window * 10 ** rng.uniform(-3, 0.5), window * 10 ** rng.uniform(-6, -2)
        measured = max(measured, idle)
        allowed = 10 ** rng.uniform(-2.5, -0.5)
        every = rng.choice([*range(2, 10), 400])
        costs = WindowCosts(
            seconds=measured + (every - 1) * idle,
            idle_seconds=(every - 1) * idle,
            idle_time=(every - 1) * (window + idle),
            n_idle=every - 1,
            measured_time=window + measured,
            n_measured=1,
        )
        pace = paced(costs, every=every, allowed=allowed)
        expected = naive_every(measured, idle, window, 0.9 * allowed)
        expected = min(expected, 4 * every)  # the most in one decision
        # A change by less than a quarter down, or a tenth up, is not worth it. Rounding may move N by one.
        expected = every if 0.75 * every <= expected <= 1.1 * every else expected
        assert abs(pace.every - expected) <= 1
        chosen.add(pace.every)
    assert {1, MOST_EVERY} < chosen


def paced(costs: WindowCosts, *, every: int, allowed: float) -> Pace:
    """A pace that has seen the same costs in 16 measured windows, one in `every`."""
    pace = Pace(budget=allowed)
    row = [7, every, *costs.numbers()]
    pace.load_state_dict({"windows": 500, "every": every, "base": 480, "has_verdict": 1, "costs": [row] * 16})
    measured_by(pace, 16, **vars(costs))
    return pace


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (
            "forgets idle windows",
            "math.fsum(row.costs.idle_seconds for row in rows) / n_idle if n_idle else 0.0",
            "0.0",
        ),
        ("takes all windows for measured ones", "row.costs.seconds - row.costs.idle_seconds", "row.costs.seconds"),
        ("times windows wrongly", "statistics.median(idle_lengths) - idle", "2 * statistics.median(idle_lengths)"),
    ],
)
def test_a_wrong_number_of_windows_is_noticed(name: str, old: str, new: str) -> None:
    wrong = Mutant(name, "sonde.batch_size.measuring_cost:_mean_costs", old, new)
    with wrong.applied(), pytest.raises(AssertionError):
        test_the_smallest_n_within_nine_tenths_of_the_budget_is_chosen()


def test_a_window_that_evaluates_or_compiles_does_not_move_the_pace() -> None:
    """An evaluation makes one window very long, and the first window of a process is dear."""
    rng = random.Random(1)
    pace = Pace(budget=0.01)
    pace.load_state_dict({"windows": 500, "every": 10, "base": 480, "has_verdict": 1, "costs": []})
    for i in range(60):
        costs = timed(measured=0.01, idle=1e-6, window=0.1, every=10, rng=rng)
        if i == 20:
            costs["idle_time"] += 100.0
        if i == 0:
            costs |= {"seconds": costs["seconds"] + 5.0, "measured_time": costs["measured_time"] + 5.0}
        feed(pace, costs)
    assert 9 <= pace.every <= 14


def test_costs_of_a_comparison_that_has_ended_are_forgotten() -> None:
    pace = Pace(budget=0.01)
    for i in range(60):
        seconds = 0.06 if i < 18 and i % 2 else 0.005
        pace.window_ends()
        times = {"seconds": seconds, "measured_time": 0.03 + seconds, "n_measured": 1.0}
        pace.take(pace.windows, WindowCosts(**times, has_verdict=float(i > 30), changed=float(i == 18)))
        if pace.every > 1:
            break
    assert pace.every == math.ceil(0.005 / (0.03 * 0.009 / 0.991))


def test_windows_that_are_longer_by_more_than_was_timed_count_as_dearer() -> None:
    """A device does extra work that no clock of the host sees."""
    rng = random.Random(2)
    pace = Pace(budget=0.01)
    pace.load_state_dict({"windows": 500, "every": 10, "base": 480, "has_verdict": 1, "costs": []})
    for _ in range(120):
        costs = timed(measured=0.002, idle=0.0, window=0.1, every=pace.every, rng=rng)
        costs["measured_time"] += 0.05
        feed(pace, costs)
    share = pace.cost.share
    assert share is not None
    assert share < 0.012
    assert pace.every > 20  # by the host's clock alone it would be 3


def test_cost_that_overlaps_with_waiting_does_not_slow_the_pace() -> None:
    """Ranks wait for each other while they measure, so measured windows are longer by less than their cost."""
    rng = random.Random(3)
    pace, chosen = Pace(budget=0.01), []
    for i in range(60):
        measured = 0.008 if pace.every == 1 else 0.016
        costs = timed(measured=measured, idle=1.3e-4, window=0.03, every=pace.every, rng=rng)
        costs["measured_time"] -= 0.75 * costs["seconds"]
        feed(pace, costs | {"has_verdict": float(i > 30)})
        chosen.append(pace.every)
    expected = naive_every(0.016, 1.3e-4, 0.03, 0.009)
    assert max(chosen) < 1.5 * expected
    assert chosen[-1] > 0.67 * expected


def test_the_shares_error_is_its_scatter() -> None:
    """The true share lies within two standard errors in about 95 % of runs."""
    rng = random.Random(3)
    held = []
    for _ in range(300):
        pace = Pace(every=5)
        for _ in range(64):
            feed(pace, timed(measured=0.02, idle=1e-4, window=0.1, every=5, rng=rng))
        cost = pace.cost
        assert cost.share is not None
        assert cost.error is not None
        expected = (0.02 + 4e-4) / (0.5 + 0.02 + 4e-4)
        held.append(abs(cost.share - expected) <= 2 * cost.error)
    # 300 runs: three standard deviations around 95 % are 91 and 99 %.
    assert 0.91 <= sum(held) / len(held) <= 0.99


def test_the_share_is_known_soon_after_a_change_of_n_and_leaves_out_the_first_windows() -> None:
    rng = random.Random(6)
    pace = Pace(budget=0.01)
    while pace.every == 1:
        feed(pace, timed(measured=0.01, idle=0.0, window=0.1, every=1, rng=rng))
    assert pace.every > 8
    for _ in range(5):
        feed(pace, timed(measured=0.01, idle=0.0, window=0.1, every=pace.every, rng=rng))
    share = pace.cost.share
    assert share is not None
    assert share < 0.012  # not the tenth of the time that the first windows took


# The first windows.


def test_all_windows_are_measured_until_a_verdict() -> None:
    dear = {"seconds": 0.5, "measured_time": 1.0, "n_measured": 1.0}
    pace = Pace(budget=0.01)
    assert measured_by(pace, 48, **dear) == list(range(1, 49))
    measured_by(pace, 32, **dear, has_verdict=1.0)
    assert pace.every > 50
    assert len(measured_by(pace, 500, **dear, has_verdict=1.0)) < 12


def test_without_a_verdict_the_allowance_ends_the_first_windows() -> None:
    dear = {"seconds": 0.5, "measured_time": 1.0, "n_measured": 1.0}
    pace = Pace(budget=0.01)
    assert len(measured_by(pace, 1000, **dear)) < FIRST_WINDOWS + 30
    assert measured_by(Pace(budget=0.01), FIRST_WINDOWS, **dear) == list(range(1, FIRST_WINDOWS + 1))


def test_all_windows_are_measured_where_the_budget_allows_it() -> None:
    cheap = {"seconds": 0.005, "measured_time": 1.0, "n_measured": 1.0, "has_verdict": 1.0}
    assert measured_by(Pace(budget=0.01), 600, **cheap) == list(range(1, 601))
    assert measured_by(Pace(), 300, seconds=1.0, measured_time=1.0, n_measured=1.0) == list(range(1, 301))


def test_a_cost_that_no_pace_can_lower_is_told() -> None:
    rng = random.Random(5)
    pace = Pace(budget=0.01)
    pace.load_state_dict({"windows": 500, "every": MOST_EVERY, "base": 480, "has_verdict": 1, "costs": []})
    for _ in range(20):
        feed(pace, timed(measured=1e-3, idle=5e-6, window=1e-4, every=MOST_EVERY, rng=rng))
    assert pace.every == MOST_EVERY
    assert pace.cost.is_over
    assert not replace(pace.cost, budget=0.5).is_over


# Restarts.


@pytest.mark.parametrize("options", [{"every": 7}, {"budget": 0.01}])
def test_a_restart_goes_on_with_the_same_windows(options: dict[str, Any]) -> None:
    costs = {"seconds": 0.07, "measured_time": 1.0, "n_measured": 1.0, "has_verdict": 1.0}
    whole, first, second = Pace(**options), Pace(**options), Pace(**options)
    n_before = 331
    measured_by(whole, n_before, **costs)
    measured_by(first, n_before, **costs)
    expected = measured_by(whole, 70, **costs)
    second.load_state_dict(first.state_dict())
    got = measured_by(second, 70, **costs)
    assert got in (expected, [n_before + 1, *expected])  # the first window after attach is measured besides
    assert len(got) < 20


def test_a_state_is_ignored_once_a_window_has_ended() -> None:
    """Otherwise a rank that alone loads a state would measure other windows than its peers."""
    other = Pace(every=7)
    measured_by(other, 50)
    pace, same = Pace(every=7), Pace(every=7)
    measured_by(pace, 3)
    measured_by(same, 3)
    pace.load_state_dict(other.state_dict())
    assert measured_by(pace, 100) == measured_by(same, 100)


@pytest.mark.parametrize(
    "damage",
    [
        {"windows": -1},
        {"every": 0},
        {"every": 2.5},
        {"base": 11},
        {"has_verdict": None},
        {"costs": 3},
        {"costs": [[1.0, 2.0]]},
        {"costs": [[1, 1, *[math.nan] * N_COSTS]]},
        {"more": 1},
    ],
)
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    pace = Pace(every=7)
    before = pace.state_dict()
    with pytest.raises(ValueError, match="pace of the probe state"):
        pace.load_state_dict({"windows": 10, "every": 3, "base": 3, "has_verdict": 0, "costs": []} | damage)
    assert pace.state_dict() == before
