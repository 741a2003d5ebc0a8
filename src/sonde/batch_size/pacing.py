"""Measures windows at a pace: switches the tap on and off between windows, and times the probe and the run."""

from __future__ import annotations

import time

from sonde.batch_size.budget import Pace
from sonde.batch_size.measuring_cost import WindowCosts
from sonde.batch_size.mechanism import Mechanism
from sonde.batch_size.taps.tap import Tap
from sonde.batch_size.taps.window_reader import WindowReader
from sonde.batch_size.window_clock import WindowClock, marks_of

_COST_OVER_TIMED = 2.5
"""What calls in windows that are not measured cost, over the time that they see themselves.

They are short, and training has pushed their code out of the caches, so it takes as long again to enter and to leave
them. 2.1 to 2.3 was measured: `python -m benchmarks.idle_calls`.
"""


class Pacing:
    """Lets a pace decide which windows are measured, and feeds it with their costs.

    Costs are host time inside the probe, without what it waits for and without the clip that the user asked for. Calls
    in windows that are not measured count 2.5 times what they see of themselves, since so much longer they take. If
    measured windows turn out to be longer than the others by more than that time, as on a device that does extra work,
    the difference counts.

    Args:
        pace: chooses the windows.
        tap: is paused in windows that are not measured.
        mechanism: reads single examples in some of the measured windows.
        reader: of the windows.
    """

    def __init__(self, pace: Pace, tap: Tap, mechanism: Mechanism, reader: WindowReader) -> None:
        self.pace = pace
        self._tap, self._mechanism, self._reader = tap, mechanism, reader
        self._clock = WindowClock(marks_of(reader.device))
        self._has_changed = False
        self._spent = self._idle = self._in_all = 0.0
        self._taken = self._idle_taken = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether the present window is measured."""
        return self.pace.is_measured

    @property
    def seconds(self) -> float:
        """Host time that the probe has cost so far."""
        return self._spent + self._idle_seconds + self._reader.seconds

    @property
    def _idle_seconds(self) -> float:
        """The part of it that is spent in windows which are not measured, and as much in each that is."""
        return (self._idle + self._in_all) * _COST_OVER_TIMED

    def spent(self, start: float, *, waited: float = 0.0) -> None:
        """Count the time since a moment as a cost of measured windows.

        Args:
            start: of `time.perf_counter`.
            waited: seconds of it in which the probe waited for a device or for other ranks.
        """
        self._spent += time.perf_counter() - start - waited

    def spent_idle(self, start: float) -> None:
        """Count the time since a moment as a cost of windows that are not measured."""
        self._idle += time.perf_counter() - start

    def spent_in_all_windows(self, seconds: float) -> None:
        """Count time that is spent in every window, measured or not.

        Args:
            seconds: since the probe was attached.
        """
        self._in_all = seconds

    def take_costs(self) -> WindowCosts:
        """This rank's costs since the last call, and what it has seen. They ride in the sum over ranks."""
        times, seconds, idle = self._clock.take(), self.seconds, self._idle_seconds
        start = self.pace.start
        costs = WindowCosts(
            seconds=seconds - self._taken,
            idle_seconds=idle - self._idle_taken,
            idle_time=times.idle,
            n_idle=times.n_idle,
            measured_time=times.measured,
            n_measured=times.n_measured,
            start=start,
            sq_start=float(start * start),
            changed=float(self._has_changed),
        )
        self._has_changed = False
        self._taken, self._idle_taken = seconds, idle
        return costs

    def quiet_windows_ended(self, n: int) -> None:
        """Begin the window after some quiet ones.

        Args:
            n: how many; see `Pace.n_quiet`.
        """
        self._clock.windows_ended_unmarked(n)
        self.pace.quiet_windows_end(n)

    def window_ended(self) -> None:
        """Begin the next window: switch the tap on or off if that window differs from the one that has ended."""
        start = time.perf_counter()
        if self.pace.n_quiet:
            self.quiet_windows_ended(1)
            self.spent_idle(start)
            return
        was_measured, before = self.pace.is_measured, self._reader.seconds
        self._clock.window_ended(was_measured=was_measured)
        self.pace.window_ends()
        is_measured = self.pace.is_measured
        if not (was_measured or is_measured):
            self.spent_idle(start)
            return
        # The tap's hooks are the first to come and the last to go: nothing of them stays behind then.
        if is_measured and not was_measured:
            self._tap.resume()
        self._mechanism.begin_window(is_measured=is_measured)
        if was_measured and not is_measured:
            self._tap.pause()
        self.spent(start, waited=self._reader.seconds - before)  # the reader counts its own time

    def measures_otherwise(self) -> None:
        """Note that windows are measured in another way from now on. All ranks hear of it with the next costs."""
        self._has_changed = True
