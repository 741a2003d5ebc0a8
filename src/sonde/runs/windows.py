"""The windows of a run that logged each window: tr Σ and |G|² of that window alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from sonde.records import SCHEMA
from sonde.runs.blocks import add_each, refuse_schema
from sonde.runs.columns import Columns, check_length
from sonde.runs.json_values import as_count, as_list, as_mapping, as_numbers, as_time


@dataclass(frozen=True)
class WindowReading:
    """One window, solved on its own. Windows that were dropped are not in a log.

    Attributes:
        segment: index of the start of the run it belongs to.
        window: number of the optimizer step, from 1.
        time: its end, in seconds since 1970.
        metrics: by name; "gns/trace_cov" and "gns/grad_sq" among them, None where a number is not known.
        groups: the same by group of parameters: "trace_cov" and "grad_sq".
    """

    segment: int
    window: int
    time: float
    metrics: Mapping[str, float | None]
    groups: Mapping[str, Mapping[str, float | None]]


class WindowContents:
    """Collects the windows of one log.

    Args:
        file: the log, for messages.
    """

    UNWANTED: ClassVar[bytes] = b'{"kind":"reading"'
    """The beginning of the lines of readings, which this class does not need."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._segment = -1
        self._columns = Columns()
        self._windows: list[WindowReading] = []

    def add(self, records: Sequence[Mapping[str, Any]], first_line: int) -> None:
        """Add records that follow each other.

        Args:
            records: as they were written.
            first_line: number of the line of the first one, from 1.

        Raises:
            ValueError: for a record that cannot be, with its line.
        """
        add_each(records, self._add, self._file, count(first_line))

    def add_lines(self, lines: Sequence[bytes], first_line: int) -> bool:
        """Adds nothing and returns False: each line is parsed, since windows keep all their values and groups."""
        return False

    def take(self) -> list[WindowReading]:
        """The windows since the last call."""
        windows, self._windows = self._windows, []
        return windows

    def _add(self, record: Mapping[str, Any], line: int) -> None:
        match record["kind"]:
            case "header":
                if record["schema"] != SCHEMA:
                    refuse_schema(self._file, record["schema"])
                self._segment += 1
                self._columns = Columns()
            case "columns" if record["of"] == "window":
                self._columns = Columns.read(record)
            case "window":
                names = self._columns.values
                metrics = dict(zip(names, check_length(as_list(record["values"]), names, "values"), strict=True))
                groups = self._columns.by_name(as_list(record["groups"])) if "groups" in record else {}
                self._windows.append(
                    WindowReading(
                        self._segment,
                        as_count(record["window"]),
                        as_time(record["time"]),
                        as_numbers(metrics),
                        {name: as_numbers(as_mapping(group)) for name, group in groups.items()},
                    )
                )
