"""Paces that are given costs, window by window."""

from __future__ import annotations

import random

from sonde.batch_size.pace import Pace, WindowCosts


def measured_by(pace: Pace, n_windows: int, **costs: float) -> list[int]:
    """The windows that a pace measures, if the costs of each have arrived before the next begins."""
    measured = []
    for _ in range(n_windows):
        number, was_measured = pace.windows + 1, pace.is_measured
        pace.window_ends()
        if was_measured:
            measured.append(number)
            pace.take(number, WindowCosts(**costs))
    return measured


def timed(*, measured: float, idle: float, window: float, every: int, rng: random.Random) -> dict[str, float]:
    """The costs of one stretch: a measured window and the others before it, all of them with scatter."""
    spent_idle = sum(idle * rng.uniform(0.5, 1.5) for _ in range(every - 1))
    spent = measured * rng.uniform(0.5, 1.5)
    times = [window * rng.uniform(0.8, 1.2) for _ in range(every)]
    return {
        "seconds": spent + spent_idle,
        "idle_seconds": spent_idle,
        "idle_time": sum(times[1:]) + spent_idle,
        "n_idle": every - 1,
        "measured_time": times[0] + spent,
        "n_measured": 1,
    }


def feed(pace: Pace, costs: dict[str, float]) -> None:
    """Let windows end until one was measured, and give its costs."""
    while not pace.is_measured:
        pace.window_ends()
    number = pace.windows + 1
    pace.window_ends()
    pace.take(number, WindowCosts(**costs))


def late(every: int, *, budget: float = 0.01) -> Pace:
    """A pace of so long a run that the budget alone decides: 16 windows of a doubling are less than one in 1,000."""
    pace = Pace(budget=budget, allowance=0.0)
    pace.every, pace.windows, pace._base = every, 10**7, 10**7 - 20
    return pace
