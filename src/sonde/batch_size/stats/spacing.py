"""How many windows of training there are for each measured one, and how far back a horizon therefore reaches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sonde.stats.state import check_number

_MOST_STRETCHES = 64
"""Stretches that are kept apart. The two oldest share one beyond that."""


@dataclass
class _Stretch:
    """Windows of training, of which one in `every` was measured.

    Attributes:
        first: number of its first window.
        every: windows of training for each measured one.
    """

    first: float
    every: float


class Spacing:
    """Remembers which part of the windows was measured, and when that part changed.

    A window that was measured and then dropped counts as measured, so that drops do not change a horizon.
    """

    def __init__(self) -> None:
        self._stretches = [_Stretch(1.0, 1.0)]
        self._last = 0.0

    def measured(self, number: float, every: float) -> None:
        """Note a measured window.

        Args:
            number: of the window.
            every: one window in so many was measured at that time, on average.
        """
        if every != self._stretches[-1].every:
            # The new pace began at some window since the last measured one.
            self._stretches.append(_Stretch(self._last + 1, float(every)))
            if self._stretches[-2].first >= self._stretches[-1].first:  # no window was measured at the pace before
                del self._stretches[-2]
        self._last = float(number)
        if len(self._stretches) > _MOST_STRETCHES:
            self._join_oldest()

    @property
    def now(self) -> float:
        """N: one window in so many is measured now, on average."""
        return self._stretches[-1].every

    def windows_in(self, horizon: float) -> float:
        """How many windows of training, back from the last measured one, hold `horizon` measured ones."""
        return horizon * self.per_measured(horizon)

    def per_measured(self, horizon: float) -> float:
        """Windows of training for each measured one, averaged over a horizon that ends with the last measured one.

        Args:
            horizon: in measured windows; infinite for the whole run.
        """
        if len(self._stretches) == 1:
            return self._stretches[0].every
        left, windows, end = horizon, 0.0, self._last + 1
        for stretch in reversed(self._stretches):
            n_measured = (end - stretch.first) / stretch.every
            if n_measured >= left:
                return (windows + left * stretch.every) / horizon
            left, windows, end = left - n_measured, windows + end - stretch.first, stretch.first
        if math.isinf(horizon):
            oldest = self._stretches[0].first
            n_measured = math.fsum((b - a.first) / a.every for a, b in zip(self._stretches, self._ends(), strict=True))
            return (self._last + 1 - oldest) / n_measured
        return (windows + left * self._stretches[0].every) / horizon  # before the first window, as at the first

    def _ends(self) -> list[float]:
        return [stretch.first for stretch in self._stretches[1:]] + [self._last + 1]

    def _join_oldest(self) -> None:
        a, b, end = *self._stretches[:2], self._ends()[1]
        n_measured = (b.first - a.first) / a.every + (end - b.first) / b.every
        self._stretches[:2] = [_Stretch(a.first, (end - a.first) / n_measured)]

    def state_dict(self) -> list[float]:
        """The number of the last window, then the first window and N of each stretch."""
        return [self._last, *(value for s in self._stretches for value in (s.first, s.every))]

    def load_state_dict(self, label: str, state: object) -> None:
        """Restore what `state_dict` returned.

        Args:
            label: of the state, for messages.
            state: the list.

        Raises:
            ValueError: when it cannot be such a list; nothing is changed then.
        """
        if not isinstance(state, Sequence) or len(state) < 3 or len(state) % 2 == 0:
            raise ValueError(f"{label}: 'spacing' must be a list of stretches, got {state!r:.60}: is it damaged?")
        numbers = {str(i): value for i, value in enumerate(state)}
        for name in numbers:
            check_number(f"{label}, spacing", numbers, name, low=0)
        firsts, everies = list(map(float, state[1::2])), list(map(float, state[2::2]))
        if min(everies) < 1 or sorted(set(firsts)) != firsts:
            raise ValueError(f"{label}: stretches of 1 or more windows must follow each other, got {state!r:.60}")
        self._last = float(state[0])
        self._stretches = [_Stretch(first, every) for first, every in zip(firsts, everies, strict=True)]
