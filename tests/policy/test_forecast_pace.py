"""In which windows `step()` forecasts: every so many, and within a budget of the run's time, alike on all ranks."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist

from sonde.policy import entropy_change
from sonde.policy.entropy_change import ForecastPace
from tests.closure import closure
from tests.ranks import Ranks


class Clock:
    """A clock that stands still unless it is moved."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def forecasts(
    every: int, budget: float | None, n: int = 400, window: float = 1.0, cost: float = 4.0, group: object = None
) -> list[int]:
    """The windows of a run that have a forecast, from 0: each window takes a second, and a forecast 4."""
    clock, due = Clock(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entropy_change, "time", clock)
        pace = ForecastPace(every, budget, group)  # type: ignore[arg-type]
        for k in range(n):
            if pace.is_due():
                due.append(k)
                clock.now += cost
                pace.took(cost)
            clock.now += window
    return due


def test_without_a_budget_every_so_many() -> None:
    assert forecasts(10, None, 35) == [0, 10, 20, 30]
    assert forecasts(1, None, 3) == [0, 1, 2]


@pytest.mark.parametrize("budget", [0.05, 0.2])
@pytest.mark.parametrize("every", [1, 10])
def test_a_budget_is_kept_and_used(budget: float, every: int) -> None:
    """4 seconds of each 20, or of each 80. The first two forecasts come in any case: nothing is known before them."""
    due = forecasts(every, budget, 2000)
    spent = 4.0 * len(due)
    share = spent / (2000 + spent)
    affordable = min(budget, 4.0 / (4.0 + every))
    assert 0.9 * affordable < share < affordable + 8.0 / 2000
    assert all(b - a >= every for a, b in itertools.pairwise(due))
    assert due[:2] == [0, every]


def on_rank() -> list[int]:
    rank = dist.get_rank()
    return forecasts(1, 0.1, 200, window=1.0 + rank, cost=2.0 + 3.0 * rank, group=dist.group.WORLD)


def test_ranks_choose_alike_whatever_their_clocks_say(ranks2: Ranks) -> None:
    first, second = ranks2(on_rank)
    assert first == second
    assert 5 < len(first) < 30


def test_a_forecast_closes_over_nothing_of_contrib() -> None:
    assert not [name for name in closure("sonde.policy.entropy_change") if name.startswith("sonde.contrib")]
