"""Collects the records of one log in the order in which they were written."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from sonde.probe import ReportSection
from sonde.records import SCHEMA
from sonde.runs.blocks import (
    AllReadings,
    Block,
    Readings,
    State,
    WrittenGroups,
    add_each,
    check_own_number,
    group_readings,
    no_groups,
    refuse,
    refuse_schema,
)
from sonde.runs.columns import Columns
from sonde.runs.json_values import as_count, as_descriptions, as_list, as_mapping, as_setup, as_time
from sonde.runs.lines import parse_block
from sonde.runs.own_metrics import OwnMetrics
from sonde.runs.policy_reading import PolicyReadings
from sonde.runs.reading_rows import READING_START, ReadingRows, read_rows
from sonde.runs.run import Alert, Header, ProbeSetup, Reading, Run, Totals
from sonde.runs.sinks import other_unit
from sonde.runs.thinning import ThinnedReadings

ANY_ORDER = (READING_START, b'{"kind":"metrics"', b'{"kind":"policy"', b'{"kind":"alert"')
"""The beginnings of lines that can be read kind by kind. What a reading means depends on lines of other kinds alone."""

_BARE_READING = 4
"""Keys of a reading in which nothing but the numbers has changed: kind, window, time, values."""


class Contents:
    """Collects the records of one log.

    Args:
        file: the log, for messages.
        thinned: keep only the readings that a figure can show.
    """

    UNWANTED: ClassVar[bytes] = b'{"kind":"window"'
    """The beginning of the lines of windows, which this class does not need."""

    def __init__(self, file: Path, *, thinned: bool) -> None:
        self._file, self._thinned = file, thinned
        self._units: dict[str, str] = {}
        self._headers: list[Header] = []
        self._alerts: list[Alert] = []
        self._ended: str | None = None
        self._totals = Totals()
        self._readings: Readings = ThinnedReadings(self._totals) if thinned else AllReadings(self._totals)
        self._policy = PolicyReadings(thinned=thinned)
        self._own = OwnMetrics(file, thinned=thinned)
        self._state, self._state_of = State(), -1
        """The texts and counts of the last reading, and the index of its start."""
        self._groups: WrittenGroups = no_groups
        """The groups that were written last."""
        self._line_of_groups = 0
        self._declared: frozenset[str] = frozenset()
        """Names of the metrics that sonde wrote, of all starts."""
        self._block = Block(file, -1, Columns(), self._declared)

    def add(self, records: Sequence[Mapping[str, Any]], first_line: int) -> None:
        """Add records that follow each other.

        Args:
            records: as they were written.
            first_line: number of the line of the first one, from 1.

        Raises:
            ValueError: for a record that cannot be, with its line.
        """
        add_each(records, self._add, self._file, count(first_line))
        self._flush()
        self._own.flush()

    def _add(self, record: Mapping[str, Any], line: int) -> None:
        if record["kind"] == "reading":
            self._add_row(record, line)
        else:
            self._add_other(record, line)

    def add_lines(self, lines: Sequence[bytes], first_line: int) -> bool:
        """Add readings, and lines whose order beside readings does not matter, each kind at once.

        Args:
            lines: lines that follow each other, with beginnings in `ANY_ORDER` or like `UNWANTED`.
            first_line: number of the line of the first one, from 1.

        Returns:
            False if nothing was added: then the lines must be parsed, and given to `add`.

        Raises:
            ValueError: for a record that cannot be, with its line.
        """
        if not self._thinned:
            return False
        readings, others = list[int](), list[int]()
        for i, line in enumerate(lines):
            if line.startswith(READING_START):
                readings.append(i)
            elif not line.startswith(self.UNWANTED):
                others.append(i)
            elif not line.endswith(b"}"):
                return False
        records = parse_block([lines[i] for i in others])
        whole = [record for record in records if record is not None]
        if len(whole) < len(records) or (readings and not self._block.columns.values):
            return False
        rows = read_rows([lines[i] for i in readings], len(self._block.columns.values)) if readings else None
        if readings and rows is None:
            return False
        add_each(whole, self._add, self._file, [first_line + i for i in others])
        if rows is not None:
            self._add_rows(rows, [first_line + i for i in readings])
        self._flush()
        self._own.flush()
        return True

    def _add_rows(self, rows: ReadingRows, numbers: list[int]) -> None:
        """Add readings, with the numbers of their lines."""
        block, states = self._block, list[State]()
        for row, record in rows.more.items():
            states += [self._state] * (row - len(states))
            try:
                self._see_reading(record, numbers[row])
            except (KeyError, TypeError, OverflowError, AttributeError) as error:
                refuse(self._file, numbers[row], error)
            if row in rows.groups:
                written = functools.partial(_parsed_groups, block.columns, rows.groups[row])
                self._groups_written(written, rows.windows[row], numbers[row])
        states += [self._state] * (len(numbers) - len(states))
        self._flush()
        self._block = Block(
            self._file, block.segment, block.columns, block.declared, rows.windows, rows.times, states=states,
            lines=numbers, matrix=rows.values,
        )  # fmt: skip
        self._ended = None

    def _add_row(self, record: Mapping[str, Any], line: int) -> None:
        if len(record) != _BARE_READING:
            self._see_reading(record, line)
        block = self._block
        block.windows.append(record["window"])
        block.times.append(record["time"])
        block.values.append(record["values"])
        block.states.append(self._state)
        block.groups.append(self._groups)
        block.lines.append(line)
        self._ended = None

    def _see_reading(self, record: Mapping[str, Any], line: int) -> None:
        """Take the texts, counts and groups of a reading. The first reading of a start gives all of them."""
        if self._block.segment != self._state_of:
            self._state, self._groups, self._state_of = State(), no_groups, self._block.segment
        self._see_state(record, line)

    def _see_state(self, record: Mapping[str, Any], line: int) -> None:
        self._state = self._state.changed(record)
        if (tap := self._state.pieces.get("tap")) is not None:
            self._totals.taps[str(tap)] = None
        if "groups" in record:
            groups = functools.partial(self._block.columns.by_name, as_list(record["groups"]))
            self._groups_written(groups, as_count(record["window"]), line)

    def _groups_written(self, groups: WrittenGroups, window: int, line: int) -> None:
        self._groups, self._totals.last_groups, self._line_of_groups = groups, window, line

    def _begin_block(self, columns: Columns) -> None:
        """Rows that follow have these columns."""
        self._flush()
        self._block = Block(self._file, len(self._headers) - 1, columns, self._declared)

    def _flush(self) -> None:
        block = self._block
        if not block.states:
            return
        self._readings.add(block)
        self._totals.n_readings += len(block.states)
        for state, window in zip(block.states, block.windows, strict=True):
            if state.alerts:
                self._totals.last_alerted |= dict.fromkeys(state.alerts, window)
        self._block = Block(self._file, block.segment, block.columns, block.declared)

    def _add_other(self, record: Mapping[str, Any], line: int) -> None:
        match record["kind"]:
            case "header":
                self._add_header(record)
            case "probe":
                self._add_probe(_probe(record))
            case "columns":
                self._add_columns(record)
            case "details":
                self._add_details(record, line)
            case "metrics":
                self._own.add(record, len(self._headers) - 1, line)
                self._ended = None  # the run went on after all, as below
            case "policy":
                self._policy.add(record, len(self._headers) - 1)
                for name, value in self._policy.readings[-1].metrics.items():
                    if value is not None and name in self._block.declared:
                        check_own_number(self._file, line, name, value)
                self._ended = None
            case "alert":
                window, name, message = as_count(record["window"]), str(record["name"]), str(record["message"])
                self._alerts.append(Alert(len(self._headers) - 1, window, name, message))
            case "end":
                self._ended = str(record["reason"])

    def _add_columns(self, record: Mapping[str, Any]) -> None:
        if record["of"] == "reading":
            self._begin_block(Columns.read(record))

    def _add_details(self, record: Mapping[str, Any], line: int) -> None:
        """Take the details of the last reading that were not written with it."""
        self._flush()
        self._see_state(record, line)
        if self._totals.n_readings:
            self._readings.amend(self._state, self._groups)

    def _add_header(self, record: Mapping[str, Any]) -> None:
        if record["schema"] != SCHEMA:
            refuse_schema(self._file, record["schema"])
        probe = _probe(record)
        self._note_probe(probe)
        self._flush()
        self._headers.append(
            Header(
                time=as_time(record["time"]),
                run=str(record["run"]),
                versions=as_mapping(record["versions"]),
                metadata=as_mapping(record["metadata"]),
                probes=(probe,),
            )
        )
        self._ended = None
        self._begin_block(Columns())

    def _add_probe(self, probe: ProbeSetup) -> None:
        self._note_probe(probe)
        header = self._headers[-1]
        self._headers[-1] = replace(header, probes=(*header.probes, probe))
        self._begin_block(self._block.columns)

    def _note_probe(self, probe: ProbeSetup) -> None:
        if (other := other_unit(self._units, probe.writes, probe.unit)) is not None:
            raise ValueError(
                f"{self._file} holds runs measured in {other!r} and in {probe.unit!r}, "
                "expected one unit: log each run to its own folder"
            )
        self._units[probe.writes] = probe.unit
        if not probe.metrics.keys() <= self._declared:
            self._declared |= probe.metrics.keys()

    def run(self, torn: str | None) -> Run:
        """Everything that was collected.

        Raises:
            ValueError: when there is no whole header.
        """
        if not self._headers:
            raise ValueError(f"{self._file} holds no whole record yet: its header was cut off; start the run again")
        return Run(
            self._file,
            tuple(self._headers),
            tuple(self._kept_readings()),
            tuple(self._policy.readings),
            tuple(self._own.readings()),
            tuple(self._alerts),
            self._ended,
            torn,
            self._totals,
            self._policy.effects,
        )

    def _kept_readings(self) -> list[Reading]:
        readings = list(self._readings.readings())
        if self._thinned and readings:
            try:
                readings[-1] = replace(readings[-1], groups=group_readings(self._groups()))
            except (KeyError, TypeError, ValueError) as error:
                refuse(self._file, self._line_of_groups, error)
        return readings


def _parsed_groups(columns: Columns, written: bytes) -> dict[str, dict[str, Any]]:
    """Groups that were left as JSON, by their names."""
    return columns.by_name(as_list(json.loads(written)))


def _probe(record: Mapping[str, Any]) -> ProbeSetup:
    return ProbeSetup(
        writes=str(record["writes"]),
        unit=str(record["unit"]),
        setup=as_setup(record["setup"]),
        metrics=as_descriptions(record["metrics"]),
        sections=tuple(_section(as_mapping(section)) for section in as_list(record.get("sections", []))),
    )


def _section(section: Mapping[str, Any]) -> ReportSection:
    names = tuple(str(name) for name in as_list(section["metrics"]))
    return ReportSection(str(section["title"]), str(section["text"]), names)
