"""Which windows are measured: one in each stretch, alike on all ranks, at a cost that the budget allows."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from sonde.batch_size.pace import FEWEST_PER_DOUBLING, MOST_EVERY, PER_DOUBLING, CostRow, Pace, WindowCosts
from tests.batch_size.paces import feed, late, measured_by, timed
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
    pace = Pace(budget=0.01, allowance=0.0)
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
                seconds=seconds, measured_time=1e-2 + seconds, n_measured=1, idle_time=1e-2 * n_idle, n_idle=n_idle
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
    pace = late(every, budget=allowed)
    pace._rows.extend(CostRow(7, every, costs) for _ in range(16))
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
        ("takes all windows for measured ones", "row.costs.of_measuring", "row.costs.seconds"),
        ("times windows wrongly", "statistics.median(idle_lengths) - idle", "2 * statistics.median(idle_lengths)"),
    ],
)
def test_a_wrong_number_of_windows_is_noticed(name: str, old: str, new: str) -> None:
    wrong = Mutant(name, "sonde.batch_size.pace:_mean_costs", old, new)
    with wrong.applied(), pytest.raises(AssertionError):
        test_the_smallest_n_within_nine_tenths_of_the_budget_is_chosen()


def test_a_window_that_evaluates_or_compiles_does_not_move_the_pace() -> None:
    """An evaluation makes one window very long, and the first window of a process is dear."""
    rng = random.Random(1)
    pace = late(10)
    for i in range(60):
        costs = timed(measured=0.01, idle=1e-6, window=0.1, every=10, rng=rng)
        if i == 20:
            costs["idle_time"] += 100.0
        if i == 0:
            costs |= {"seconds": costs["seconds"] + 5.0, "measured_time": costs["measured_time"] + 5.0}
        feed(pace, costs)
    assert 9 <= pace.every <= 14


def test_windows_that_are_longer_by_more_than_was_timed_count_as_dearer() -> None:
    """A device does extra work that no clock of the host sees."""
    rng = random.Random(2)
    pace = late(10)
    for _ in range(120):
        costs = timed(measured=0.002, idle=0.0, window=0.1, every=pace.every, rng=rng)
        costs["measured_time"] += 0.05
        feed(pace, costs)
    share = pace.cost.share
    assert share is not None
    assert 0.006 < share < 0.012  # by the host's clock alone it would be 0.0003
    assert pace.every > 20  # by the host's clock alone it would be 3


def test_cost_that_overlaps_with_waiting_does_not_slow_the_pace() -> None:
    """Ranks wait for each other while they measure, so measured windows are longer by less than their cost."""
    rng = random.Random(3)
    pace, chosen = late(1), []
    for _ in range(60):
        measured = 0.008 if pace.every == 1 else 0.016
        costs = timed(measured=measured, idle=1.3e-4, window=0.03, every=pace.every, rng=rng)
        costs["measured_time"] -= 0.75 * costs["seconds"]
        feed(pace, costs)
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
    pace = late(1)
    while pace.every == 1:
        feed(pace, timed(measured=0.01, idle=0.0, window=0.1, every=1, rng=rng))
    assert pace.every > 8
    for _ in range(5):
        feed(pace, timed(measured=0.01, idle=0.0, window=0.1, every=pace.every, rng=rng))
    share = pace.cost.share
    assert share is not None
    assert share < 0.012  # not the tenth of the time that the first windows took


# Windows spread over log time.

DEAR = {"seconds": 0.5, "measured_time": 1.0, "n_measured": 1.0}
"""A window that costs half of its time: a budget of 1 % would have one in 1,000 measured."""


def in_doublings(measured: Sequence[int], first: int, n: int) -> list[int]:
    """How many of the windows lie in each doubling of the run."""
    return [sum(first * 2**i < number <= first * 2 ** (i + 1) for number in measured) for i in range(n)]


def test_while_the_allowance_lasts_each_doubling_has_about_as_many_windows() -> None:
    measured = measured_by(Pace(budget=0.001, allowance=1e9), 16_000, **DEAR)
    assert measured[:400] == list(range(1, 401))  # a stretch of log time with fewer is measured in full
    for n in in_doublings(measured, 500, 5):
        # N is a whole number, and stays while another would be less than a tenth larger. At N = 2 the first of them has
        # up to half as many more.
        assert PER_DOUBLING <= n <= 1.6 * PER_DOUBLING
    assert in_doublings(measured, 4000, 2) == pytest.approx([PER_DOUBLING] * 2, rel=0.15)


def test_without_an_allowance_the_floor_decides_where_the_budget_allows_less() -> None:
    measured = measured_by(Pace(budget=0.001, allowance=0.0), 16_000, **DEAR)
    assert measured[:31] == list(range(1, 32))  # before costs are known
    counts = in_doublings(measured, 250, 6)
    # One window of a doubling is a sixteenth, and places within stretches are random.
    assert all(0.8 * FEWEST_PER_DOUBLING <= n <= 1.6 * FEWEST_PER_DOUBLING for n in counts), counts


def test_an_allowance_that_is_spent_leaves_the_floor() -> None:
    """0.05 seconds a window: 10 seconds are 200 windows, and those whose costs were not known yet."""
    costs = {"seconds": 0.05, "measured_time": 0.1, "n_measured": 1.0}
    measured = measured_by(Pace(budget=0.001, allowance=10.0), 32_000, **costs)
    assert measured[:200] == list(range(1, 201))
    assert sum(n <= 400 for n in measured) < 200 + 3 * 16 + FEWEST_PER_DOUBLING
    assert all(0.8 * FEWEST_PER_DOUBLING <= n <= 1.4 * FEWEST_PER_DOUBLING for n in in_doublings(measured, 500, 6))


def test_windows_that_others_are_left_out_for_are_paid_by_the_allowance_too() -> None:
    """What windows cost that are not measured is no cost of measuring them."""
    pace = Pace(budget=0.001, allowance=10.0)
    idle = {"idle_seconds": 0.49, "idle_time": 0.5, "n_idle": 1.0}
    measured = measured_by(pace, 16_000, **DEAR, **idle)  # 0.01 seconds each, above the others
    assert in_doublings(measured, 2000, 1)[0] > 0.9 * PER_DOUBLING
    assert in_doublings(measured, 4000, 2)[1] < 0.7 * PER_DOUBLING  # 1,000 windows are 10 seconds


def test_the_slowest_pace_is_reached_and_not_only_nearly() -> None:
    """N grows with the run by a tenth and more at a time, and stops at one in 1,000."""
    pace = Pace(budget=0.001, allowance=0.0)
    measured_by(pace, 26_000, **DEAR)
    assert pace.every == MOST_EVERY


def test_a_budget_that_allows_more_is_used() -> None:
    """1 % of the time allows one in 5 here, however long the run is."""
    costs = {"seconds": 0.045, "measured_time": 1.0, "n_measured": 1.0}
    for allowance in (0.0, 10.0):
        pace = Pace(budget=0.01, allowance=allowance)
        measured = measured_by(pace, 20_000, **costs)
        [n] = in_doublings(measured, 10_000, 1)
        assert n == pytest.approx(10_000 / pace.every, abs=2)
        assert 4 <= pace.every <= 6


def test_all_windows_are_measured_where_the_budget_allows_it() -> None:
    cheap = {"seconds": 0.005, "measured_time": 1.0, "n_measured": 1.0}
    assert measured_by(Pace(budget=0.01), 600, **cheap) == list(range(1, 601))
    assert measured_by(Pace(), 300, seconds=1.0, measured_time=1.0, n_measured=1.0) == list(range(1, 301))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("before.spent_before + self._spent < self._allowance", "False"),
        ("before.spent_before + self._spent < self._allowance", "True"),
        ("n_windows * math.log(2)", "n_windows"),
        ("max(min(wanted, int(", "max(max(wanted, int("),
        ("row.costs.of_measuring", "row.costs.seconds"),
    ],
)
def test_a_mistake_of_the_spread_is_noticed(old: str, new: str) -> None:
    wrong = Mutant(old, "sonde.batch_size.pace:Pace._decide", old, new)
    with wrong.applied(), pytest.raises(AssertionError):  # noqa: PT012
        test_while_the_allowance_lasts_each_doubling_has_about_as_many_windows()
        test_without_an_allowance_the_floor_decides_where_the_budget_allows_less()
        test_an_allowance_that_is_spent_leaves_the_floor()
        test_windows_that_others_are_left_out_for_are_paid_by_the_allowance_too()
        test_a_budget_that_allows_more_is_used()


def test_a_cost_that_no_pace_can_lower_is_told() -> None:
    rng = random.Random(5)
    pace = late(MOST_EVERY)
    for _ in range(20):
        feed(pace, timed(measured=1e-3, idle=5e-6, window=1e-4, every=MOST_EVERY, rng=rng))
    assert pace.every == MOST_EVERY
    assert pace.cost.is_over
    assert not replace(pace.cost, budget=0.5).is_over


# Restarts.


def test_a_restart_goes_on_as_a_long_run_does() -> None:
    """Once the costs of its first windows are known, it is as sparse as the run before: not as in a run that begins."""
    costs = {"seconds": 0.07, "measured_time": 1.0, "n_measured": 1.0}
    first, second = Pace(budget=0.001), Pace(budget=0.001)
    measured_by(first, 30_000, **costs)
    second.windows_before, second.spent_before = first.windows, first.spent
    before = {"windows_before": first.windows, "spent_before": first.spent}
    got = measured_by(second, 1000, **costs, **before)
    assert got[:31] == list(range(1, 32))
    assert len(got) < 50
    assert second.every == pytest.approx(first.every, rel=0.2)
    assert second.spent == pytest.approx(first.spent + 0.07 * len(got))
