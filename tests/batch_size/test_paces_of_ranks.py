"""Every rank chooses its windows alone, and all choose the same, whenever the numbers of a window arrive."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sonde.batch_size.pace import Pace, WindowCosts
from tests.batch_size.paces import feed, late, timed
from tests.mutants import Mutant


def windows_of_ranks(
    delays: Sequence[Any],
    n_windows: int,
    options: Sequence[dict[str, Any]],
    cheaper_from: int = 0,
    noticing: Sequence[int] = (0, 1, 2),
    before: tuple[int, float] = (0, 0.0),
) -> tuple[list[list[int]], list[Pace]]:
    """The windows that each of several ranks measures, if numbers take a while to arrive, on each rank another.

    A rank that awaits a window gets it: its probe waits for it. From the first measured window after `cheaper_from` on,
    windows cost a fifth, and a rank notices that when that window's numbers arrive, if it is one of `noticing`.
    """
    n, rng = len(delays), random.Random(4)
    has_noticed = [False] * n
    paces = [Pace(**own, n_ranks=n) for own in options]
    paces[0].windows_before, paces[0].spent_before = before  # a state that one rank alone has loaded
    measured: list[list[int]] = [[] for _ in paces]
    first_cheap = 0

    def arrived(rank: int, number: int, costs: WindowCosts) -> None:
        has_noticed[rank] |= number == first_cheap and rank in noticing
        paces[rank].take(number, costs)

    under_way: list[list[tuple[int, int, WindowCosts]]] = [[] for _ in paces]
    for window in range(1, n_windows + 1):
        if cheaper_from and not first_cheap and window > cheaper_from and paces[0].is_measured:
            first_cheap = paces[0].windows + 1
        dear, sums = 0.01 if not cheaper_from or first_cheap else 0.05, [0.0] * len(WindowCosts().numbers())
        for rank, pace in enumerate(paces):
            own = timed(measured=dear, idle=1e-6, window=0.05, every=pace.every, rng=rng)
            before = {"windows_before": pace.windows_before, "spent_before": pace.spent_before}
            numbers = WindowCosts(**own, **before, changed=float(has_noticed[rank]))
            has_noticed[rank] &= not pace.is_measured
            sums = [a + b for a, b in zip(sums, numbers.numbers(), strict=True)]
        for rank, pace in enumerate(paces):
            number = pace.windows + 1
            while (awaited := pace.awaits) is not None:
                _, first, costs = under_way[rank].pop(0)
                assert first == awaited
                arrived(rank, first, costs)
            if pace.is_measured:
                measured[rank].append(window)
                under_way[rank].append((window + delays[rank](rng), number, WindowCosts(*sums)))
            pace.window_ends()
            while under_way[rank] and under_way[rank][0][0] <= window:
                _, first, costs = under_way[rank].pop(0)
                arrived(rank, first, costs)
    return measured, paces


DELAYS = (lambda rng: 0, lambda rng: rng.randint(0, 14), lambda rng: rng.randint(0, 40))


def test_ranks_measure_the_same_windows_whenever_their_numbers_arrive() -> None:
    # Each measured window takes 0.01 seconds: the allowance is of none, of 200, or of all of them.
    for allowance, least, most in ((0.0, 90, 140), (2.0, 220, 300), (1e9, 450, 650)):
        measured, paces = windows_of_ranks(DELAYS, 900, [{"budget": 0.005, "allowance": allowance}] * 3)
        assert measured[0] == measured[1] == measured[2]
        assert len({pace.every for pace in paces}) == 1
        assert paces[0].every > 2
        assert most > len(measured[0]) > least, allowance


@pytest.mark.parametrize("noticing", [(0, 1, 2), (1,)])
def test_ranks_forget_old_costs_at_the_same_window(noticing: tuple[int, ...]) -> None:
    for cheaper_from in (20, 100, 333, 600):
        options = [{"budget": 0.02, "allowance": 0.0}] * 3
        measured, paces = windows_of_ranks(DELAYS, 1500, options, cheaper_from=cheaper_from, noticing=noticing)
        assert measured[0] == measured[1] == measured[2]
        assert len({pace.every for pace in paces}) == 1
        _, paces = windows_of_ranks(DELAYS, cheaper_from + 300, options, cheaper_from=cheaper_from, noticing=noticing)
        numbers = [[row.number for row in pace._rows] for pace in paces]
        assert all(own and min(own) > cheaper_from for own in numbers), numbers


MISTAKES: list[tuple[Mutant, Callable[[], None]]] = [
    (
        Mutant(
            "forgets nothing",
            "sonde.batch_size.pace:_since_change",
            "[] if row.costs.changed else [*kept, row]",
            "[*kept, row]",
        ),
        lambda: test_ranks_forget_old_costs_at_the_same_window((1,)),
    ),
    (
        Mutant(
            "uses all that has arrived",
            "sonde.batch_size.pace:Pace._decide",
            "while self._arrived and self._arrived[0].number <= up_to:",
            "while self._arrived:",
        ),
        test_ranks_measure_the_same_windows_whenever_their_numbers_arrive,
    ),
]


@pytest.mark.parametrize(("mutant", "test"), MISTAKES, ids=lambda value: getattr(value, "name", ""))
def test_a_mistake_is_noticed(mutant: Mutant, test: Callable[[], None]) -> None:
    with mutant.applied(), pytest.raises(AssertionError):
        test()


def test_ranks_of_which_one_has_loaded_a_state_measure_the_same_windows() -> None:
    measured, paces = windows_of_ranks(DELAYS, 900, [{"budget": 0.005, "allowance": 2.0}] * 3, before=(10**6, 5.0))
    assert measured[0] == measured[1] == measured[2]
    assert len({pace.every for pace in paces}) == 1
    assert len(measured[0]) < 120  # a run that begins measures twice as many


def test_a_few_dear_windows_slow_the_pace_by_four_at_most() -> None:
    """At one window in 1,000, it would take thousands of windows to learn that they were an accident."""
    pace, rng = late(1), random.Random(5)
    chosen = []
    for i in range(80):
        idle = 1e-2 if 60 <= i < 64 else 1e-5
        feed(pace, timed(measured=0.005, idle=idle, window=0.03, every=pace.every, rng=rng))
        chosen.append(pace.every)
    steps = list(itertools.pairwise(chosen[chosen.index(next(n for n in chosen if n > 1)) :]))
    assert all(after <= 4 * before for before, after in steps)
    assert any(after > before for before, after in steps)


def test_windows_that_are_dearer_once_others_are_left_out_are_soon_rarer() -> None:
    """Caches are cold then, and each of them writes a reading. The first 64 were cheap, and are not asked for long."""
    pace, rng, n_sparse, chosen = late(1), random.Random(8), 0, []
    while n_sparse < 7:
        n_sparse += pace.every > 1
        chosen.append(pace.every)
        dear = 0.02 if pace.every > 1 else 0.008
        feed(pace, timed(measured=dear, idle=0.0, window=0.03, every=pace.every, rng=rng))
    first = next(n for n in chosen if n > 1)
    assert 20 < first < 50
    assert chosen[-1] > 1.6 * first
