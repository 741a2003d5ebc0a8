"""The compact form of records that come again and again: unchanged content is written once.

A reading holds the same names as the reading before, and most of its texts. So a `columns` record gives the names, and
each line after it gives `values` in their order. Any other content of a reading is written only when it has changed:

    {"kind":"columns","of":"reading","values":["gns/b_simple","loss"],"groups":["head"],"group_values":["low"]}
    {"kind":"reading","window":10,"time":1790000053.1,"values":[192.5,2.31],"status":"resolved","groups":[[150]]}
    {"kind":"reading","window":20,"time":1790000106.2,"values":[193.1,2.29]}

The columns of a start only ever grow: a name that a later reading lacks is null there. The numbers in `dropped` and
the messages in `alerts` are written every tenth reading, and the probe reads its groups as seldom. For the last
reading, a `details` record gives them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from sonde.records import has_details
from sonde.runs.json_values import as_list
from sonde.runs.lines import LONGEST_LINE

READING_DIGITS, WINDOW_DIGITS = 7, 9
"""Significant digits: of readings, whose own error is far larger; and of windows, from which readings are computed."""

_DETAILS = ("dropped", "alerts")
_IN_EVERY_LINE = ("kind", "window", "time", "metrics", "groups")
_LARGEST_WHOLE = 1e15


@dataclass(frozen=True)
class Columns:
    """The names behind the numbers of one kind of record.

    Attributes:
        values: names of the metrics.
        groups: names of the groups of parameters.
        group_values: names of the values of each group.
    """

    values: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    group_values: tuple[str, ...] = ()

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Self:
        """The columns that a `columns` record gives.

        Raises:
            TypeError: when something is of another kind than it should be, or a name stands twice.
        """
        names = [as_list(record.get(key, [])) for key in ("values", "groups", "group_values")]
        values, groups, group_values = (tuple(str(name) for name in each) for each in names)
        for each in (values, groups, group_values):
            if len(set(each)) != len(each):
                raise TypeError(f"{each!r:.60} where each name is expected once")
        return cls(values, groups, group_values)

    def grown(self, record: Mapping[str, Any]) -> Columns:
        """These columns with the names that a record has beside them."""
        groups: Mapping[str, Mapping[str, object]] = record.get("groups", {})
        return Columns(
            tuple(dict.fromkeys([*self.values, *record["metrics"]])),
            tuple(dict.fromkeys([*self.groups, *groups])),
            tuple(dict.fromkeys([*self.group_values, *(name for group in groups.values() for name in group)])),
        )

    def by_name(self, groups: list[list[Any] | None]) -> dict[str, dict[str, Any]]:
        """The groups of one record by their names.

        Raises:
            TypeError: for more or fewer groups, or values of a group, than there are columns.
        """
        named = dict(zip(self.groups, check_length(groups, self.groups, "groups"), strict=True))
        return {
            name: dict(zip(self.group_values, check_length(values, self.group_values, "values"), strict=True))
            for name, values in named.items()
            if values is not None
        }


def check_length(row: list[Any], columns: Sequence[str], what: str) -> list[Any]:
    """A row that has something in each column.

    Raises:
        TypeError: if the row is shorter or longer.
    """
    if len(row) != len(columns):
        raise TypeError(f"{len(row)} {what} for {len(columns)} columns")
    return row


class LineWriter:
    """Turns the records of one log into lines. After each record is written, `commit` must be called."""

    def __init__(self) -> None:
        self._columns: dict[str, Columns] = {}
        self._written: dict[str, object] = {}
        """The content of the last reading as far as it was written."""
        self._last: Mapping[str, Any] | None = None
        """The last reading."""
        self._n_readings = 0
        self._next: tuple[dict[str, Columns], dict[str, object], Mapping[str, Any] | None, int] | None = None

    def encode(self, record: Mapping[str, Any]) -> bytes:
        """One record as lines of JSON; nothing is remembered of it before `commit`.

        Raises:
            ValueError: when a value is not JSON, NaN and infinity included, or the record is too long.
        """
        self._next = None
        match record["kind"]:
            case "header":
                self._next = ({}, {}, None, 0)
                return encode_line(record)
            case "reading":
                return self._reading(record)
            case "window":
                return self._row(record, WINDOW_DIGITS, with_groups=True, more={})
            case "policy" | "metrics":
                return encode_line({**_shortened(record, READING_DIGITS), "time": _rounded_time(record)})
            case "details":
                return self._groups_of_last_reading(record)
            case "end":
                return self._details() + encode_line(record)
            case _:
                return encode_line(record)

    def commit(self) -> None:
        """The lines of the last record were written."""
        if self._next is not None:
            self._columns, self._written, self._last, self._n_readings = self._next
            self._next = None

    def _reading(self, record: Mapping[str, Any]) -> bytes:
        n = self._n_readings + 1
        is_due = has_details(n)
        written = dict(self._written)
        for key, content in record.items():
            if key in _IN_EVERY_LINE or written.get(key, ...) == content:
                continue
            if key not in _DETAILS or is_due or written.get(key, {}).keys() != content.keys():  # type: ignore[attr-defined]
                written[key] = content
        if "groups" in record:
            written["groups"] = record["groups"]
        changed = {key: content for key, content in written.items() if self._written.get(key, ...) != content}
        with_groups = bool(changed.pop("groups", None))
        line = self._row(record, READING_DIGITS, with_groups=with_groups, more=changed)
        columns = self._next[0] if self._next else self._columns
        self._next = (columns, written, record, n)
        return line

    def _row(self, record: Mapping[str, Any], digits: int, *, with_groups: bool, more: Mapping[str, object]) -> bytes:
        kind, known = record["kind"], self._columns.get(record["kind"], Columns())
        columns = known.grown(record if with_groups else {**record, "groups": {}})
        lines = b"" if columns == known else self._encode_columns(kind, columns)
        numbers = _shortened(record["metrics"], digits)
        row: dict[str, object] = {"kind": kind, "window": record["window"], "time": _rounded_time(record)}
        row["values"] = [numbers.get(name) for name in columns.values]
        row |= more
        if with_groups:
            row["groups"] = _group_rows(columns, record["groups"], digits)
        self._next = ({**self._columns, kind: columns}, self._written, self._last, self._n_readings)
        return lines + encode_line(row)

    @staticmethod
    def _encode_columns(kind: str, columns: Columns) -> bytes:
        record: dict[str, object] = {"kind": "columns", "of": kind, "values": list(columns.values)}
        if columns.groups:
            record |= {"groups": list(columns.groups), "group_values": list(columns.group_values)}
        return encode_line(record)

    def _details(self) -> bytes:
        """The details of the last reading that were not written with it."""
        if self._last is None:
            return b""
        last = {key: self._last[key] for key in _DETAILS if key in self._last}
        changed: dict[str, Any] = {key: value for key, value in last.items() if self._written.get(key) != value}
        return encode_line({"kind": "details", "window": self._last["window"], **changed}) if changed else b""

    def _groups_of_last_reading(self, record: Mapping[str, Any]) -> bytes:
        known = self._columns.get("reading", Columns())
        columns = known.grown({"metrics": {}, "groups": record["groups"]})
        lines = b"" if columns == known else self._encode_columns("reading", columns)
        self._next = ({**self._columns, "reading": columns}, self._written, self._last, self._n_readings)
        row = {"groups": _group_rows(columns, record["groups"], READING_DIGITS)}
        return lines + encode_line({"kind": "details", "window": record["window"], **row})


def _group_rows(columns: Columns, groups: Mapping[str, Mapping[str, Any]], digits: int) -> list[list[Any] | None]:
    """The values of each group, in the order of the columns; None for a group that the record lacks."""
    short = _shortened(groups, digits)
    return [[short[g].get(name) for name in columns.group_values] if g in short else None for g in columns.groups]


def encode_line(record: Mapping[str, object]) -> bytes:
    """One record as a line of JSON.

    Raises:
        ValueError: when a value is not JSON, NaN and infinity included, or the line is too long.
    """
    try:
        kind_first = {"kind": record["kind"], **record}
        text = json.dumps(kind_first, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a {record['kind']!r} record must hold JSON values only, with None for an unknown value; {error}: "
            "convert or leave out that value"
        ) from error
    # Text from file names may hold lone surrogates, which UTF-8 has no bytes for; \udcXX is their JSON escape as well.
    line = text.encode("utf-8", "backslashreplace") + b"\n"
    if len(line) > LONGEST_LINE:
        raise ValueError(
            f"a {record['kind']!r} record may have {LONGEST_LINE >> 20} MiB, got {len(line) / 2**20:.0f} MiB: "
            "log less at once"
        )
    return line


def _rounded_time(record: Mapping[str, Any]) -> object:
    """To a millisecond."""
    return round(record["time"], 3) if isinstance(record["time"], float) else record["time"]


def _shortened(value: Any, digits: int) -> Any:
    """The same value with shorter numbers. Whole numbers stay exact."""
    if isinstance(value, float):
        if value.is_integer() and abs(value) < _LARGEST_WHOLE:
            return int(value)
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {key: _shortened(each, digits) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shortened(each, digits) for each in value]
    return value
