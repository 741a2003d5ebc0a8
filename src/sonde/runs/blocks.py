"""Readings as they stand in a log: rows of numbers with common names, and what seldom changes beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from sonde.batch_size.stats.reading import GroupReading
from sonde.records import SCHEMA
from sonde.runs.columns import Columns, check_length
from sonde.runs.json_values import as_count, as_list, as_mapping, as_number, as_pieces, as_status, as_time
from sonde.runs.run import Reading, Totals
from sonde.stats.intervals import Status

if TYPE_CHECKING:
    from sonde.runs.reading_rows import Floats

LARGEST = 1e150
"""Largest size of a number that sonde writes. The square of a larger number overflows."""

NEVER_NEGATIVE = ("gns/b_simple", "gns_prompts/b_simple")
"""Beginnings of the names of metrics that are never negative."""


@dataclass(frozen=True)
class State:
    """The texts and counts of a reading, beside its numbers; fields as in `Reading`."""

    status: Status = "unresolved"
    reason: str = ""
    advice: str = ""
    dropped: Mapping[str, int] = field(default_factory=dict)
    alerts: Mapping[str, str] = field(default_factory=dict)
    pieces: Mapping[str, Any] = field(default_factory=dict)

    def changed(self, record: Mapping[str, Any]) -> State:
        """The state after a record that gives some of it."""
        dropped, alerts = as_mapping(record.get("dropped", {})), as_mapping(record.get("alerts", {}))
        return State(
            as_status(record["status"]) if "status" in record else self.status,
            str(record["reason"]) if "reason" in record else self.reason,
            str(record["advice"]) if "advice" in record else self.advice,
            {reason: as_count(n) for reason, n in dropped.items()} if "dropped" in record else self.dropped,
            {name: str(message) for name, message in alerts.items()} if "alerts" in record else self.alerts,
            as_pieces(record["pieces"]) if "pieces" in record else self.pieces,
        )


WrittenGroups = Callable[[], Mapping[str, Any]]
"""The groups of a reading by name, as they were written. Most are never asked for, so they are named only on demand."""


def no_groups() -> Mapping[str, Any]:
    """The groups of a reading before which no groups were written."""
    return {}


@dataclass
class Block:
    """Readings of one start with the same columns. The lists have one entry for each reading.

    Attributes:
        file: the log, for messages.
        segment: index of the start.
        columns: the names of the values.
        declared: names of the metrics that sonde wrote; the others are the user's own.
        windows: optimizer steps.
        times: in seconds since 1970.
        values: numbers, and None for an unknown number.
        states: the texts and counts of each reading.
        groups: as they were written last; empty beside a matrix.
        lines: where each reading stands in the file.
        matrix: finite numbers in place of `values`, NaN for an unknown number; [readings, columns].
    """

    file: Path
    segment: int
    columns: Columns
    declared: frozenset[str]
    windows: list[Any] = field(default_factory=list)
    times: list[Any] = field(default_factory=list)
    values: list[list[Any]] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    groups: list[WrittenGroups] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    matrix: Floats | None = None

    def check(self, row: int) -> None:
        """Refuse a reading whose numbers are of another kind than they should be, or cannot be.

        Raises:
            ValueError: with the file and the line.
        """
        names = self.columns.values
        if self.matrix is not None:
            self._check_declared(row, [None if math.isnan(v) else v for v in self.matrix[row].tolist()])
            return
        try:
            as_count(self.windows[row])
            as_time(self.times[row])
            values = [as_number(value) for value in check_length(as_list(self.values[row]), names, "values")]
        except (TypeError, OverflowError) as error:
            refuse(self.file, self.lines[row], error)
        self._check_declared(row, values)

    def _check_declared(self, row: int, values: Sequence[float | None]) -> None:
        for name, value in zip(self.columns.values, values, strict=True):
            if value is not None and name in self.declared:
                check_own_number(self.file, self.lines[row], name, value)


def check_own_number(file: Path, line: int, name: str, value: float) -> None:
    """Refuse a number of sonde's own that cannot be.

    Raises:
        ValueError: with the file and the line.
    """
    if abs(value) <= LARGEST and not (value < 0 and name.startswith(NEVER_NEGATIVE)):
        return
    expected = "0 or more" if value < 0 and abs(value) <= LARGEST else f"at most {LARGEST:g} in size"
    raise ValueError(
        f"line {line} of {file} holds {name} = {value:g}, expected {expected}: "
        "sonde writes no such number; was the log edited, or written by another program?"
    )


def refuse(file: Path, line: int, error: Exception) -> NoReturn:
    """Refuse a record.

    Raises:
        ValueError: always.
    """
    found = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    raise ValueError(
        f"line {line} of {file} is not a record of schema {SCHEMA}: {found}. Was it written by another program?"
    ) from error


def refuse_schema(file: Path, schema: object) -> NoReturn:
    """Refuse a log of another schema.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"{file} was written with record schema {schema!r}, expected {SCHEMA}: read it with the version of sonde that "
        "wrote it"
    )


def add_each(
    records: Iterable[Mapping[str, Any]],
    add: Callable[[Mapping[str, Any], int], None],
    file: Path,
    lines: Iterable[int],
) -> None:
    """Add records one by one.

    Args:
        records: as they were written.
        add: takes a record and the number of its line.
        file: the log, for messages.
        lines: the number of each record's line, from 1.

    Raises:
        ValueError: for a record that cannot be, with its line.
    """
    for record, line in zip(records, lines, strict=False):
        try:
            add(record, line)
        except (KeyError, TypeError, OverflowError, AttributeError) as error:
            refuse(file, line, error)


class Readings(Protocol):
    """Takes blocks of readings, and keeps all of them or some."""

    def add(self, block: Block) -> None:
        """Take the readings of a block that was not checked yet.

        Raises:
            ValueError: for a reading that cannot be, with its line.
        """

    def amend(self, state: State, groups: WrittenGroups) -> None:
        """Replace the texts, counts and groups of the last reading."""

    def readings(self) -> Sequence[Reading]:
        """The readings that were kept, in order."""


class AllReadings:
    """Keeps every reading.

    Args:
        totals: counts the values of all readings.
    """

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._readings: list[Reading] = []
        self._groups: tuple[WrittenGroups, Mapping[str, GroupReading]] = (no_groups, {})
        """The groups of the last reading, as written and as read."""

    def add(self, block: Block) -> None:
        """Take all readings of a block."""
        names = block.columns.values
        for row, values in enumerate(block.values):
            block.check(row)
            known = [None if value is None else float(value) for value in values]
            metrics = dict(zip(names, known, strict=True))
            self._totals.add(
                list(metrics), [v is not None for v in metrics.values()], [v or 0.0 for v in metrics.values()]
            )
            self._readings.append(
                reading_of(
                    block.segment, block.windows[row], float(block.times[row]), block.states[row], metrics,
                    self._read_groups(block.groups[row], block, row),
                )
            )  # fmt: skip

    def amend(self, state: State, groups: WrittenGroups) -> None:
        """Replace the texts, counts and groups of the last reading."""
        last = self._readings[-1]
        self._readings[-1] = reading_of(
            last.segment, last.window, last.time, state, last.metrics, group_readings(groups())
        )

    def readings(self) -> Sequence[Reading]:
        """Every reading."""
        return self._readings

    def _read_groups(self, written: WrittenGroups, block: Block, row: int) -> Mapping[str, GroupReading]:
        if written is not self._groups[0]:
            try:
                self._groups = (written, group_readings(written()))
            except (KeyError, TypeError) as error:
                refuse(block.file, block.lines[row], error)
        return self._groups[1]


def reading_of(
    segment: int,
    window: int,
    time: float,
    state: State,
    metrics: Mapping[str, float | None],
    groups: Mapping[str, GroupReading],
) -> Reading:
    """A reading made of its parts."""
    return Reading(
        segment=segment,
        window=window,
        time=time,
        status=state.status,
        reason=state.reason,
        advice=state.advice,
        metrics=metrics,
        groups=groups,
        dropped=state.dropped,
        alerts=state.alerts,
        pieces=state.pieces,
    )


def group_readings(groups: Mapping[str, Any]) -> dict[str, GroupReading]:
    """The groups of one reading.

    Raises:
        KeyError: when something is missing.
        TypeError: when something is of another kind than it should be.
    """
    return {name: _group(as_mapping(group)) for name, group in groups.items()}


def _group(group: Mapping[str, Any]) -> GroupReading:
    status = as_status(group["status"])
    high = math.inf if status == "lower_bound" else as_number(group["high"])
    b_simple, low, grad_sq, trace_cov = (as_number(group[key]) for key in ("b_simple", "low", "grad_sq", "trace_cov"))
    return GroupReading(status, b_simple, low, high, grad_sq, trace_cov)
