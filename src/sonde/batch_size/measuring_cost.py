"""What measuring costs: the share of the run's time, and the pace that a budget allows, from measured windows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_EVERY = 1000
"""At least one window in so many is measured, however small the budget."""
FEWEST = 8
"""Fewest measured windows from which a cost is computed."""
_FEWEST_STRETCHES = 3
"""Stretches of windows that were not measured, whose median is their length: not that of an evaluation in one of them.

Before, it is that of measured windows without their cost, which is too short where ranks wait for each other meanwhile.
"""
_AIM = 0.9
"""Part of the budget that is aimed at, since costs scatter."""
_OUTLIER = 10.0
"""A dear window counts with at most this many times the median cost: the first ones allocate and compile."""
_MOST_OUTLIERS = 2
"""If more windows are as dear, they are no accident (a reading with all groups may be), and count in full."""


@dataclass(frozen=True)
class WindowCosts:
    """What one rank has spent and seen since the measured window before; or the sum of that over ranks.

    Attributes:
        seconds: spent by the probe.
        idle_seconds: those of them that the windows which are not measured would cost in any case.
        idle_time: duration of the windows that were not measured, in seconds.
        n_idle: how many they are.
        measured_time: duration of measured windows, in seconds.
        n_measured: how many they are.
        start: digest of the options and of the state that a rank began with.
        sq_start: its square.
        changed: 1 if this rank has begun to measure windows in another way, else 0.
    """

    seconds: float = 0.0
    idle_seconds: float = 0.0
    idle_time: float = 0.0
    n_idle: float = 0.0
    measured_time: float = 0.0
    n_measured: float = 0.0
    start: float = 0.0
    sq_start: float = 0.0
    changed: float = 0.0

    @property
    def of_measuring(self) -> float:
        """Seconds that the measured window itself has cost."""
        return self.seconds - self.idle_seconds

    def numbers(self) -> list[float]:
        """All of it, in the order of the attributes."""
        return list(vars(self).values())  # astuple() copies each number, which takes ten times as long


@dataclass(frozen=True)
class CostRow:
    """The costs of one measured window and of those before it, as means over ranks."""

    number: int
    every: int
    costs: WindowCosts


@dataclass(frozen=True)
class Cost:
    """What measuring costs.

    Attributes:
        every: one window in so many is measured now, on average.
        share: part of the run's time that the probe takes, over the last 64 measured windows at most; None before it
            was timed. Windows before any was left out do not count once some are.
        error: standard error of `share`, from its scatter over measured windows; None where there were too few since N
            became the largest there is.
        budget: the share that was allowed; None without a limit.
    """

    every: int
    share: float | None
    error: float | None
    budget: float | None

    @property
    def is_over(self) -> bool:
        """Whether the share exceeds the budget by more than its scatter explains, at the slowest pace there is."""
        if self.budget is None or self.share is None or self.error is None or self.every < MOST_EVERY:
            return False
        return self.share - 2 * self.error > self.budget


def per_rank(costs: WindowCosts, n_ranks: int) -> WindowCosts:
    """The mean over ranks of costs that were summed over them."""
    return WindowCosts(*(value / n_ranks for value in costs.numbers()))


def since_change(rows: Iterable[CostRow]) -> list[CostRow]:
    """The rows after the last one in which a rank told of another way of measuring."""
    kept: list[CostRow] = []
    for row in rows:
        kept = [] if row.costs.changed else [*kept, row]
    return kept


def affordable_every(rows: Sequence[CostRow], budget: float) -> int | None:
    """The smallest N at which measuring one window in N costs nine tenths of the budget; None if it is not known.

    With c the cost of a measured window, i that of another and w the duration of a window without either,

        (c + (N − 1) i) / (N w + c + (N − 1) i) = b,     N = (c − i) / (w b/(1 − b) − i).
    """
    if len(rows) < FEWEST or not any(_lengths(rows)):  # a device may be so far behind that no window was timed
        return None
    (measured, idle, window), aim = _mean_costs(rows), _AIM * budget
    measured += _untimed(rows, measured - idle)
    room = window * aim / (1 - aim) - idle
    if room <= 0 or (measured - idle) > MOST_EVERY * room:
        return MOST_EVERY
    return max(math.ceil((measured - idle) / room), 1)


def _mean_costs(rows: Sequence[CostRow]) -> tuple[float, float, float]:
    """What a measured window and any other one cost, as timed, and how long a window is without, in seconds."""
    of_measured = [row.costs.of_measuring for row in rows]
    most = _OUTLIER * statistics.median(of_measured)
    if sum(seconds > most for seconds in of_measured) > _MOST_OUTLIERS:
        most = math.inf
    measured = statistics.fmean(min(seconds, most) for seconds in of_measured)
    n_idle = math.fsum(row.costs.n_idle for row in rows)
    idle = math.fsum(row.costs.idle_seconds for row in rows) / n_idle if n_idle else 0.0
    idle_lengths, measured_lengths = _lengths(rows)
    # The median: evaluations and checkpoints make some windows very long.
    if len(idle_lengths) >= _FEWEST_STRETCHES:
        window = statistics.median(idle_lengths) - idle
    else:
        window = statistics.median(measured_lengths) - statistics.median(of_measured) if measured_lengths else 0.0
    return measured, idle, max(window, 0.0)


def _lengths(rows: Sequence[CostRow]) -> tuple[list[float], list[float]]:
    """Durations of the windows that were not measured, as a mean for each row, and of those that were, in seconds."""
    idle = [row.costs.idle_time / row.costs.n_idle for row in rows if row.costs.n_idle]
    measured = [row.costs.measured_time / row.costs.n_measured for row in rows if row.costs.n_measured]
    return idle, measured


def _untimed(rows: Sequence[CostRow], timed: float) -> float:
    """Seconds by which measured windows are longer than the others, beyond what the probe has timed and chance."""
    idle, measured = _lengths(rows)
    if min(len(idle), len(measured)) < FEWEST:
        return 0.0
    longer = statistics.fmean(measured) - statistics.fmean(idle)
    error = math.sqrt(_variance_of_mean(measured) + _variance_of_mean(idle))
    return max(longer - 2 * error - timed, 0.0)


def _variance_of_mean(values: Sequence[float]) -> float:
    mean, n = statistics.fmean(values), len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (n * (n - 1))


def measured_share(rows: Sequence[CostRow]) -> tuple[float | None, float | None]:
    """Cost over time, each summed over measured windows, and the standard error of that ratio."""
    if len(rows) < 2:
        return None, None
    measured, idle, _ = _mean_costs(rows)
    untimed = _untimed(rows, measured - idle)  # as on a device that does extra work
    cost = [row.costs.seconds + untimed * row.costs.n_measured for row in rows]
    times = [row.costs.idle_time + row.costs.measured_time for row in rows]
    if not (total := math.fsum(times)) > 0:
        return None, None
    share = math.fsum(cost) / total
    scatter = math.fsum((c - share * t) ** 2 for c, t in zip(cost, times, strict=True))
    return share, math.sqrt(scatter * len(rows) / (len(rows) - 1)) / total
