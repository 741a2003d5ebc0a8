"""Measures windows at a pace: switches the tap on and off between windows, and times the probe and the run."""

from __future__ import annotations

from sonde.batch_size.budget import Pace
from sonde.batch_size.measuring_cost import WindowCosts
from sonde.batch_size.mechanism import Mechanism
from sonde.batch_size.taps.tap import Tap
from sonde.batch_size.taps.window_reader import WindowReader
from sonde.batch_size.window_clock import ALWAYS, MEASURING, OwnTime, WindowClock, marks_of

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
        own: the probe's time.
    """

    def __init__(self, pace: Pace, tap: Tap, mechanism: Mechanism, reader: WindowReader, own: OwnTime) -> None:
        self.pace, self._own = pace, own
        self._tap, self._mechanism = tap, mechanism
        self._clock = WindowClock(marks_of(reader.device))
        self._has_changed = False
        self._taken = self._idle_taken = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether the present window is measured."""
        return self.pace.is_measured

    @property
    def seconds(self) -> float:
        """Host time that the probe has cost so far."""
        return self._own.spent[MEASURING] + self._idle_seconds

    @property
    def _idle_seconds(self) -> float:
        """The part of it that is spent in windows which are not measured, and as much in each that is."""
        return self._own.spent[ALWAYS] * _COST_OVER_TIMED

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
        with self._own.on(ALWAYS) as stretch:
            if self.pace.n_quiet:
                self.quiet_windows_ended(1)
                return
            was_measured = self.pace.is_measured
            self._clock.window_ended(was_measured=was_measured)
            self.pace.window_ends()
            is_measured = self.pace.is_measured
            if not (was_measured or is_measured):
                return
            stretch.purpose = MEASURING
            # The tap's hooks are the first to come and the last to go: nothing of them stays behind then.
            if is_measured and not was_measured:
                self._tap.resume()
            self._mechanism.begin_window(is_measured=is_measured)
            if was_measured and not is_measured:
                self._tap.pause()

    def measures_otherwise(self) -> None:
        """Note that windows are measured in another way from now on. All ranks hear of it with the next costs."""
        self._has_changed = True
