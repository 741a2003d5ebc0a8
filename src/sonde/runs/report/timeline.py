"""Readings as columns over the units seen or over optimizer steps."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, overload

from sonde.runs.policy_reading import PolicyReading
from sonde.runs.run import Run
from sonde.wording import count


class Measured(Protocol):
    """A reading of any kind."""

    @property
    def segment(self) -> int:
        """Index of the start of the run that the reading belongs to."""

    @property
    def window(self) -> int:
        """The optimizer step."""

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """A number for each name, None if it is not known."""


R = TypeVar("R", bound=Measured)

WINDOWS, STEPS = "windows (optimizer steps)", "optimizer steps"
"""What a window is called on the axis: in a policy's figures, an optimizer step."""
MAX_POINTS = 600
"""Largest number of marks in a figure that marks each reading. (A curve thins itself out: see `curve_style`.)"""


@dataclass(frozen=True)
class Timeline(Generic[R]):
    """Columns of equal length, one row per reading.

    Attributes:
        unit: plural name of the unit.
        rows: the readings; None between two starts of the run, where curves break.
        x: position on the horizontal axis; NaN where the row is None.
        x_label: label of the horizontal axis, with its unit.
        restarts: positions on the horizontal axis where later starts begin.
    """

    unit: str
    rows: tuple[R | None, ...]
    x: tuple[float, ...]
    x_label: str
    restarts: tuple[float, ...]

    @property
    def windows(self) -> list[float]:
        """The window number of each row."""
        return self.column(lambda reading: reading.window)

    def metric(self, name: str) -> list[float]:
        """One metric, NaN where it is not known."""
        return self.column(lambda reading: reading.metrics.get(name))

    def column(self, value: Callable[[R], float | None]) -> list[float]:
        """Any other number of each reading, NaN where it is None."""
        values = (None if row is None else value(row) for row in self.rows)
        return [math.nan if v is None else float(v) for v in values]

    def texts(self, text: Callable[[R], str]) -> Sequence[str]:
        """A text for each row, empty between two starts. Each is made when it is asked for: hover texts are few."""
        return _Texts(self.rows, text)


class _Texts(Sequence[str], Generic[R]):
    """The text of each row."""

    def __init__(self, rows: Sequence[R | None], text: Callable[[R], str]) -> None:
        self._rows, self._text = rows, text

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[str]: ...
    def __getitem__(self, at: int | slice) -> str | Sequence[str]:
        if isinstance(at, slice):
            return _Texts(self._rows[at], self._text)
        row = self._rows[at]
        return "" if row is None else self._text(row)

    def __len__(self) -> int:
        return len(self._rows)


def timeline(readings: Sequence[R], unit: str, *, at_most: int | None = None, windows: str = WINDOWS) -> Timeline[R]:
    """Lay out readings over the units seen, or over windows if a reading does not know the units seen.

    Args:
        readings: at least one.
        unit: plural name of the unit.
        at_most: leave readings out if there are more, evenly; None for all.
        windows: what windows are called on the axis.
    """
    if at_most is not None:
        # Thin out from the end backwards, so that the newest reading is always drawn.
        readings = readings[::-1][:: math.ceil(len(readings) / at_most)][::-1]
    seen = [reading.metrics.get("run/units_seen") for reading in readings]
    if all(value is not None for value in seen):
        largest = max(value for value in seen if value is not None)
        factor, word = next(
            (f, w) for f, w in ((1e9, "billion "), (1e6, "million "), (1.0, "")) if largest >= 10 * f or f == 1
        )
        positions, label = [(value or 0.0) / factor for value in seen], f"{word}{unit} seen"
    else:
        positions, label = [float(reading.window) for reading in readings], windows
    return _with_breaks(unit, readings, positions, label)


def _with_breaks(unit: str, readings: Sequence[R], positions: Sequence[float], label: str) -> Timeline[R]:
    rows: list[R | None] = []
    x: list[float] = []
    restarts: list[float] = []
    for reading, position in zip(readings, positions, strict=True):
        last = rows[-1] if rows else None
        if last is not None and last.segment != reading.segment:
            rows.append(None)
            x.append(math.nan)
            restarts.append(position)
        rows.append(reading)
        x.append(position)
    return Timeline(unit, tuple(rows), tuple(x), label[0].upper() + label[1:], tuple(restarts))


def position_text(reading: Measured, unit: str) -> str:
    """The point of the run at which a reading was taken, in words."""
    seen = reading.metrics.get("run/units_seen")
    after = "" if seen is None else f", after {count(seen)} {unit}"
    noun = "step" if isinstance(reading, PolicyReading) else "window"
    return f"{noun} {count(reading.window)}{after}"


def step_noun(run: Run) -> str:
    """What an optimizer step is called: a window, unless only a policy is measured, in which nothing is averaged."""
    return "step" if run.policy and not run.readings else "window"


def place_in_words(run: Run, window: int, until: int | None = None) -> str:
    """A window, or several, and where they lie on the axis of the figures, which may show units.

    Args:
        run: with the window.
        window: its number.
        until: the last of several windows; None for one.
    """
    noun, several = step_noun(run), until is not None and until > window
    ends = [window, until] if several and until is not None else [window]
    words = f"{noun}{'s' if several else ''} {' to '.join(map(count, ends))}"
    seen = [_units_seen(run.readings, end) for end in ends]
    if not run.readings or None in seen:
        return words
    return f"{words}, after about {' to '.join(count(n) for n in seen if n is not None)} {run.probe('reading').unit}"


def _units_seen(readings: Sequence[Measured], window: int) -> float | None:
    """Units seen up to a window, in proportion to those of the nearest readings; None where the axis shows windows."""
    points = [(0.0, 0.0)]
    for reading in readings:
        if (seen := reading.metrics.get("run/units_seen")) is None:
            return None
        points.append((float(reading.window), seen))
    points.sort()
    after = min(bisect.bisect_left(points, (float(window), 0.0)), len(points) - 1)
    (first, at_first), (last, at_last) = points[max(after - 1, 0)], points[after]
    return at_last if last == first else at_first + (window - first) * (at_last - at_first) / (last - first)
