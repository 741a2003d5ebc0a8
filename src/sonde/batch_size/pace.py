"""Which windows are measured, and what that costs: all at first, then about as many in each doubling, or one in N.

Nothing here knows tensors or ranks. Every rank has a `Pace` of its own, and all of them must choose the same windows:
a measured window has a collective that the others lack. So a pace decides by numbers that were summed over ranks
alone, also of what the ranks have loaded from saved states; every 16 windows, about windows that are at least 15
windows old. Their numbers must have arrived: a rank waits for them (`window_ends.py`).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

DEFAULT_BUDGET: float | None = 0.01
"""Part of the run's time that measuring may cost, unless the user says otherwise; None measures every window."""
DEFAULT_ALLOWANCE = 10.0
"""Seconds that measuring may take in any case, unless the user says otherwise."""
PER_DOUBLING = 150
"""Windows that are measured while the run doubles in steps, as long as the allowance lasts."""
FEWEST_PER_DOUBLING = 16
"""Windows that are measured while the run doubles in steps, whatever that costs."""
REVIEW = 16
"""Windows between two decisions."""
_ARRIVAL = 15
"""Windows that the numbers of a window have to arrive on the host, on all ranks, before a decision uses them."""
_REMEMBERED = 64
"""Measured windows whose cost is remembered."""
_LEAST_CHANGE = (0.75, 1.1)
"""Factors between which another number of windows is not worth a change."""
_MOST_SLOWER = 4
"""The largest factor by which N grows in one decision, once windows are left out."""
MOST_EVERY = 1000
"""At least one window in so many is measured, however small the budget."""
_FEWEST = 8
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
        changed: 1 if this rank has begun to measure windows in another way, else 0.
        windows_before: windows of the run before this start, as this rank's saved state has it.
        spent_before: seconds that measuring had taken by then.
    """

    seconds: float = 0.0
    idle_seconds: float = 0.0
    idle_time: float = 0.0
    n_idle: float = 0.0
    measured_time: float = 0.0
    n_measured: float = 0.0
    changed: float = 0.0
    windows_before: float = 0.0
    spent_before: float = 0.0

    @property
    def of_measuring(self) -> float:
        """Seconds that the measured window itself has cost."""
        return self.seconds - self.idle_seconds

    def numbers(self) -> list[float]:
        """All of it, in the order of the attributes."""
        return list(vars(self).values())  # astuple() copies each number, which takes ten times as long


@dataclass(frozen=True)
class CostRow:
    """The costs of one measured window and of those before it, as means over ranks; N at that time."""

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


class Pace:
    """Chooses the windows that are measured, one in each stretch of N, at a place that is as good as random.

    A period in the data therefore cannot fall in step with the choice. The place follows from the stretch's number
    alone, so that it is the same on every rank. The first window after attach is always measured.

    With a budget, measured windows are spread over log time, as training resembles itself there: N grows with the run,
    so that each doubling has `PER_DOUBLING` of them until measuring has taken the allowance, and at least
    `FEWEST_PER_DOUBLING` in any case. Where the budget allows more, N is the smallest that keeps the cost within it,
    computed again as costs become known better. After a restart, the first windows are all measured, until their costs
    are known.

    Args:
        every: N, from 1 up; None to choose it by the budget.
        budget: part of the run's time that measuring may cost, from 0 to 1; None for no limit.
        allowance: seconds that measuring may take in any case.
        n_ranks: ranks whose costs are summed.
    """

    def __init__(
        self,
        *,
        every: int | None = None,
        budget: float | None = None,
        allowance: float = DEFAULT_ALLOWANCE,
        n_ranks: int = 1,
    ) -> None:
        self.every = every or 1
        """N: one window in so many is measured now."""
        self.budget, self._n_ranks, self._allowance = (budget if every is None else None), n_ranks, allowance
        self.windows = 0
        """Windows ended since this start."""
        self.windows_before, self.spent_before = 0, 0.0
        """Windows before, and the seconds that measuring had taken: of a saved state that only some ranks may have
        loaded. So a decision uses the mean over ranks."""
        self.is_measured = True
        """Whether the present window is measured."""
        self.n_quiet = 0
        """How many windows, from the present one on, are not measured, nor the next, with no decision between them."""
        self.is_changed = False
        """Whether windows are measured in another way from now on. All ranks hear of it with the next costs."""
        self._base, self._spent = 0, 0.0
        self._rows: deque[CostRow] = deque(maxlen=_REMEMBERED)
        self._arrived: deque[CostRow] = deque()
        self._awaited: deque[tuple[int, int]] = deque()
        """Measured windows whose costs have not been taken: their number, and N at that time."""

    @property
    def spent(self) -> float:
        """Seconds that measuring has taken in the whole run, on average over ranks."""
        return self.spent_before + self._spent + math.fsum(row.costs.of_measuring for row in self._arrived)

    @property
    def cost(self) -> Cost:
        """What measuring costs: at the present N, or, so soon after a change of N, since windows are left out."""
        alike = self._alike()
        rows = [row for row in alike if row.every == self.every]
        if len(rows) < _FEWEST and self.every < MOST_EVERY:
            rows = alike
        share, error = _measured_share(rows)
        if share is None:  # at the slowest pace, too few windows so far
            share, _ = _measured_share(alike)
        return Cost(self.every, share, error, self.budget)

    def _alike(self) -> list[CostRow]:
        """The rows that tell of this pace: costs depend on whether windows are left out before, not on how many."""
        return [row for row in self._rows if (row.every > 1) == (self.every > 1)]

    def take(self, number: int, costs: WindowCosts) -> None:
        """Take the costs of a measured window, summed over ranks, once they are on the host; in order.

        Once windows are measured in another way, costs of earlier ones say nothing of later ones, and are forgotten.

        Args:
            number: what `windows` was when the window had ended.
            costs: summed over ranks.
        """
        if self._awaited and self._awaited[0][0] == number:
            _, every = self._awaited.popleft()
            per_rank = WindowCosts(*(value / self._n_ranks for value in costs.numbers()))
            self._arrived.append(CostRow(number, every, per_rank))

    @property
    def awaits(self) -> int | None:
        """The measured window whose costs must be taken before the present window may end; None if all are there.

        On one rank nothing is waited for: no other rank has to decide alike.
        """
        if self._n_ranks == 1 or (self.windows + 1) % REVIEW or not self._awaited:
            return None
        number, _ = self._awaited[0]
        return number if number <= self.windows + 1 - _ARRIVAL else None

    def window_ends(self, n: int = 1) -> None:
        """Note the end of the present window, and choose whether the next one is measured.

        Args:
            n: windows that end: one, or at most `n_quiet`, which changes no choice.
        """
        self.windows += n
        if self.n_quiet:
            self.n_quiet -= n
            return
        if self.is_measured:
            self._awaited.append((self.windows, self.every))
        if self.windows % REVIEW == 0:
            self._decide(self.windows - _ARRIVAL)
        n_before = self._next_measured() - self.windows
        self.is_measured = n_before == 0
        self.n_quiet = max(min(n_before - 1, REVIEW - 1 - self.windows % REVIEW), 0)

    def _next_measured(self) -> int:
        """The next window that is measured, from the present one on: each stretch has one."""
        every = self.every
        stretch = self._base + (self.windows - self._base) // every * every
        here = stretch + _place(stretch, every)
        return here if here >= self.windows else stretch + every + _place(stretch + every, every)

    def _decide(self, up_to: int) -> None:
        """Choose N from the costs of the windows up to a number that all ranks have."""
        if not self._arrived or self._arrived[0].number > up_to:  # nothing new to decide by
            return
        while self._arrived and self._arrived[0].number <= up_to:
            row = self._arrived.popleft()
            self._spent += row.costs.of_measuring
            self._rows.append(row)
        before = self._rows[-1].costs
        self._rows = deque(_since_change(self._rows), maxlen=_REMEMBERED)
        if self.budget is None:
            return
        rows, alike = list(self._rows), self._alike()
        # Where few rows are alike, the last ones may show already that windows are dearer now.
        looked_at = [alike] if len(alike) >= _FEWEST else [rows, rows[-_FEWEST:]]
        affordable = [n for each in looked_at if (n := _affordable_every(each, self.budget)) is not None]
        if not affordable:
            return
        wanted = max(affordable)
        if self.every > 1:  # a few windows may have been dear by accident, and a slow pace learns it late
            wanted = min(wanted, _MOST_SLOWER * self.every)
        per_doubling = PER_DOUBLING if before.spent_before + self._spent < self._allowance else FEWEST_PER_DOUBLING
        n_windows = before.windows_before + self.windows
        wanted = max(min(wanted, int(n_windows * math.log(2) / per_doubling)), 1)
        low, high = _LEAST_CHANGE
        # The slowest pace is reached in any case: there, an alert names a cost above the budget.
        if not low * self.every <= wanted <= high * self.every or wanted == MOST_EVERY > self.every:
            self.every, self._base = wanted, self.windows


def _place(stretch: int, every: int) -> int:
    """Which window of a stretch is measured, from 0: the splitmix64 hash of the window before it."""
    mask = 2**64 - 1
    x = (stretch + 1) * 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return (x ^ x >> 31) % every


# What measuring costs.


def _since_change(rows: Iterable[CostRow]) -> list[CostRow]:
    """The rows after the last one in which a rank reported another way of measuring."""
    kept: list[CostRow] = []
    for row in rows:
        kept = [] if row.costs.changed else [*kept, row]
    return kept


def _affordable_every(rows: Sequence[CostRow], budget: float) -> int | None:
    """The smallest N at which measuring one window in N costs nine tenths of the budget; None if it is not known.

    With c the cost of a measured window, i that of another and w the duration of a window without either,

        (c + (N − 1) i) / (N w + c + (N − 1) i) = b,     N = (c − i) / (w b/(1 − b) − i).
    """
    if len(rows) < _FEWEST or not any(_lengths(rows)):  # a device may be so far behind that no window was timed
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
    if min(len(idle), len(measured)) < _FEWEST:
        return 0.0
    longer = statistics.fmean(measured) - statistics.fmean(idle)
    error = math.sqrt(_variance_of_mean(measured) + _variance_of_mean(idle))
    return max(longer - 2 * error - timed, 0.0)


def _variance_of_mean(values: Sequence[float]) -> float:
    mean, n = statistics.fmean(values), len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (n * (n - 1))


def _measured_share(rows: Sequence[CostRow]) -> tuple[float | None, float | None]:
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
