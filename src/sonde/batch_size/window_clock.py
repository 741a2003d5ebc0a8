"""What the probe takes of the host's time, and how long windows take, on the host's clock or on a device's."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, Self

import torch

from sonde.parallel.devices import has_timed_events, record_event

MEASURING, ALWAYS, NO_COST = range(3)
"""What the probe takes time for: measured windows alone; every window, measured or not; and what is no cost of it,
waiting for a device or for other ranks, and a clip that the user asked for."""


class OwnTime:
    """One clock for all parts of a probe. Of stretches inside each other, each moment counts for the innermost."""

    def __init__(self) -> None:
        self.spent = [0.0, 0.0, 0.0]
        """Seconds of host time so far, by purpose. Short code that runs often adds to it by itself."""
        self.measuring, self.always, self.no_cost = (
            _Stretch(self.spent, purpose) for purpose in (MEASURING, ALWAYS, NO_COST)
        )
        """Contexts whose time is spent on each purpose."""


class _Stretch:
    """Time inside the probe that is spent on one purpose; may be entered again inside itself."""

    __slots__ = ("_begun", "_purpose", "_spent")

    def __init__(self, spent: list[float], purpose: int) -> None:
        self._spent, self._purpose = spent, purpose
        self._begun: list[tuple[float, float]] = []

    def __enter__(self) -> None:
        self._begun.append((sum(self._spent), time.perf_counter()))

    def __exit__(self, *error: object) -> None:
        before, start = self._begun.pop()
        inside = sum(self._spent) - before
        self._spent[self._purpose] += time.perf_counter() - start - inside


class Mark(Protocol):
    """A moment in the work of a device, such as a `torch.Event`."""

    def query(self) -> bool:
        """Whether the device has come to that moment; never waits."""

    def elapsed_time(self, later: Self, /) -> float:
        """Milliseconds from this moment to a later one, when both have passed."""


class HostMark:
    """The present moment on the host, whose work is done when it is called."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        """Always."""
        return True

    def elapsed_time(self, later: Self, /) -> float:
        """Milliseconds between the two."""
        return (later.at - self.at) * 1e3


class WindowClock:
    """Times windows from end to end. The first one, whose beginning nobody marked, is left out.

    Several windows that are not measured may be timed as one stretch, with a mark at its end alone.

    Args:
        mark: makes a mark of the present moment; see `marks_of`.
    """

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._last: tuple[Mark, int] | None = None
        self._marks: deque[tuple[Mark, int, bool]] = deque()
        """The end of a stretch of windows, the number of the last one, and whether that was measured."""

    def window_ended(self, number: int, *, was_measured: bool) -> None:
        """Mark the end of a window. Marks of a device are read when it has passed them; nothing waits for it."""
        self._marks.append((self._mark(), number, was_measured))

    def take(self) -> dict[str, float]:
        """The durations that have become known since the last call, in seconds, and of how many windows they are.

        Under the names that `WindowCosts` has for them.
        """
        known = dict.fromkeys(("idle_time", "n_idle", "measured_time", "n_measured"), 0.0)
        while self._marks and self._marks[0][0].query():
            mark, number, was_measured = self._marks.popleft()
            if self._last is not None:
                before, n_before = self._last
                seconds, n = ("measured_time", "n_measured") if was_measured else ("idle_time", "n_idle")
                known[seconds] += before.elapsed_time(mark) / 1e3
                known[n] += number - n_before
            self._last = mark, number
        return known


def marks_of(device: torch.device) -> Callable[[], Mark]:
    """Makes marks of the present moment: events on a device that the host runs ahead of, else the host's clock.

    Asks the device once whether its events can be timed, and waits for its answer.
    """
    return functools.partial(record_event, device, enable_timing=True) if has_timed_events(device) else HostMark
