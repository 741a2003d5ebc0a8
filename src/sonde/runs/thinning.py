"""Thins out a long run: for each pixel of a figure it keeps the first and last reading, and each metric's extremes.

Readings are collected until there are many. Then the horizontal axis is cut into bins of about a pixel, and only the
first and the last reading of each bin are kept, and the readings in which a metric is lowest or highest. The width of a
bin is a power of two and only ever grows, so bins nest: the lowest value of a wide bin is the lowest value of one of
its narrow bins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sonde.runs.blocks import LARGEST, NEVER_NEGATIVE, Block, State, WrittenGroups, reading_of
from sonde.runs.run import Reading, Totals

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

MAX_BINS = 1024
"""A figure of the report is narrower, in pixels."""

_COLLECT = 16_384
"""Readings that are collected at least before some are left out."""

_NOT_DRAWN = ("cost/", "run/")
"""Beginnings of metrics whose extremes no figure shows."""
_MAX_OWN = 16
"""Metrics of the user's own whose extremes are kept, losses first. A report draws fewer."""


class MetricsRow(Mapping[str, float | None]):
    """The metrics of one reading, as a row of a matrix."""

    __slots__ = ("_columns", "_row")

    def __init__(self, columns: Mapping[str, int], row: Floats) -> None:
        self._columns, self._row = columns, row

    def __getitem__(self, name: str) -> float | None:
        value = float(self._row[self._columns[name]])
        return None if math.isnan(value) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


@dataclass(frozen=True)
class Row:
    """One reading that was kept."""

    segment: int
    window: int
    time: float
    metrics: MetricsRow
    state: State


class ThinnedRows:
    """Collects blocks, and leaves out readings that no figure can show."""

    def __init__(self) -> None:
        import numpy as np  # comes with bokeh, which draws the figures; reading a log in full needs neither

        self._np = np
        self._columns: dict[str, int] = {}
        self._declared: frozenset[str] = frozenset()
        self._values: list[Floats] = []
        self._places: list[Floats] = []
        """For each matrix of values: segment, window and time of its rows; [rows, 3]."""
        self._states: list[State] = []
        self._limit = _COLLECT
        self._bin_width = 0.0

    def add(self, block: Block) -> Floats:
        """Take the readings of a block that was not checked yet.

        Returns:
            Their values, NaN for an unknown value; [readings, columns of the block].

        Raises:
            ValueError: for a reading that cannot be, with its line.
        """
        np = self._np
        values = self._checked(block)
        for name in block.columns.values:
            self._columns.setdefault(name, len(self._columns))
        self._declared |= block.declared
        spread = np.full((len(values), len(self._columns)), np.nan)
        spread[:, [self._columns[name] for name in block.columns.values]] = values
        self._values.append(spread)
        segments = [float(block.segment)] * len(values)
        self._places.append(np.array([segments, block.windows, block.times], dtype=np.float64).T)
        self._states += block.states
        if len(self._states) > self._limit:
            self._thin()
            self._limit = max(_COLLECT, 2 * len(self._states))
        return values

    def amend(self, state: State) -> None:
        """Replace the texts and counts of the last reading."""
        self._states[-1] = state

    def rows(self) -> list[Row]:
        """The readings that were kept, in order."""
        if not self._states:
            return []
        if len(self._states) > 2 * MAX_BINS:
            self._thin()
        values, places = self._joined()
        self._values, self._places = [values], [places]
        return [
            Row(int(segment), int(window), time, MetricsRow(self._columns, row), state)
            for (segment, window, time), row, state in zip(places.tolist(), values, self._states, strict=True)
        ]

    def _checked(self, block: Block) -> Floats:
        np = self._np
        if block.matrix is None:
            for row in range(len(block.values)):
                block.check(row)
            # Each of them is a number or None by now: anything else could pass for a number here, such as true for 1.
            values: Floats = np.array(block.values, dtype=np.float64).reshape(len(block.values), -1)
            return values
        self._check_declared(block, block.matrix)
        return block.matrix

    def _check_declared(self, block: Block, values: Floats) -> None:
        np = self._np
        sonde_s = [i for i, name in enumerate(block.columns.values) if name in block.declared]
        sizes = np.abs(values[:, sonde_s])
        can_be_negative = [not name.startswith(NEVER_NEGATIVE) for name in block.columns.values]
        suspects = (sizes > LARGEST).any(axis=1)
        suspects |= (values[:, [i for i in sonde_s if not can_be_negative[i]]] < 0).any(axis=1)
        for row in np.flatnonzero(suspects):
            block.check(int(row))

    def _joined(self) -> tuple[Floats, Floats]:
        np, width = self._np, len(self._columns)
        if len(self._values) == 1 and self._values[0].shape[1] == width:
            return self._values[0], self._places[0]
        joined = np.full((len(self._states), width), np.nan)
        start = 0
        for values in self._values:
            joined[start : start + len(values), : values.shape[1]] = values
            start += len(values)
        return joined, np.concatenate(self._places)

    def _thin(self) -> None:
        np = self._np
        values, places = self._joined()
        starts = self._bins(values, places)
        kept = np.zeros(len(values), dtype=bool)
        kept[starts] = True
        kept[np.append(starts[1:], len(values)) - 1] = True
        lowest, highest = values.min(axis=0), values.max(axis=0)
        for column in self._drawn_columns():
            if lowest[column] != highest[column]:  # otherwise the first reading of each bin has them already
                kept |= extremes(values[:, column], starts)
        self._values, self._places = [values[kept]], [places[kept]]
        self._states = [state for state, keep in zip(self._states, kept.tolist(), strict=True) if keep]

    def _bins(self, values: Floats, places: Floats) -> Ints:
        """Where each bin begins."""
        np = self._np
        segments, x = places[:, 0], places[:, 1].copy()
        if (seen := self._columns.get("run/units_seen")) is not None:  # what figures have on their horizontal axis
            x = np.where(np.isnan(values[:, seen]), x, values[:, seen])
        begins = np.flatnonzero(np.diff(segments, prepend=-2.0))
        lengths = np.maximum.reduceat(x, begins) - np.minimum.reduceat(x, begins)
        total = float(np.minimum(lengths, 1e300).sum())
        if total > 0:
            self._bin_width = max(self._bin_width, 2.0 ** math.ceil(math.log2(total / MAX_BINS)))
        bins = np.floor(x / (self._bin_width or 1.0))
        changes = (np.diff(bins, prepend=bins[0] - 1) != 0) | (np.diff(segments, prepend=segments[0] - 1) != 0)
        starts: Ints = np.flatnonzero(changes)
        return starts

    def _drawn_columns(self) -> list[int]:
        drawn = [name for name in self._columns if not name.startswith(_NOT_DRAWN)]
        own = sorted((name for name in drawn if name not in self._declared), key=lambda n: "loss" not in n.lower())
        return [self._columns[name] for name in drawn if name in self._declared or name in own[:_MAX_OWN]]


def extremes(values: Floats, starts: Ints) -> NDArray[np.bool_]:
    """Marks the first of the lowest and the first of the highest values of each bin. A NaN is neither.

    Args:
        values: [rows].
        starts: the first row of each bin; [bins].
    """
    import numpy as np

    sizes = np.diff(np.append(starts, len(values)))
    marked = np.zeros(len(values), dtype=bool)
    for series in (values, -values):
        lowest = np.repeat(np.fmin.reduceat(series, starts), sizes)
        rows = np.flatnonzero(series == lowest)
        bins = np.searchsorted(starts, rows, side="right")
        marked[rows[np.flatnonzero(np.diff(bins, prepend=-1))]] = True
    return marked


class ThinnedReadings:
    """Keeps the readings of the noise scale that a figure can show.

    Args:
        totals: counts the values of all readings.
    """

    def __init__(self, totals: Totals) -> None:
        self._rows, self._totals = ThinnedRows(), totals

    def add(self, block: Block) -> None:
        """Take the readings of a block that was not checked yet."""
        values = self._rows.add(block)
        import numpy as np

        known = ~np.isnan(values)
        with np.errstate(over="ignore"):
            sums = np.where(known, values, 0.0).sum(axis=0)
        self._totals.add(block.columns.values, known.sum(axis=0).tolist(), sums.tolist())

    def amend(self, state: State, groups: WrittenGroups) -> None:
        """Replace the texts and counts of the last reading, without its groups."""
        self._rows.amend(state)

    def readings(self) -> Sequence[Reading]:
        """The readings that were kept, in order, without groups."""
        return [reading_of(row.segment, row.window, row.time, row.state, row.metrics, {}) for row in self._rows.rows()]
