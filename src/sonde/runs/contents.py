"""Collects the records of one log in the order in which they were written."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from sonde.batch_size.stats.reading import GroupReading
from sonde.log.sinks import other_unit
from sonde.probe import ReportSection
from sonde.record_values import SCHEMA
from sonde.runs.json_values import (
    as_count,
    as_descriptions,
    as_list,
    as_mapping,
    as_number,
    as_numbers,
    as_pieces,
    as_setup,
    as_status,
    as_time,
)
from sonde.runs.policy_reading import PolicyReading, policy_reading
from sonde.runs.run import Alert, Header, MetricsReading, ProbeSetup, Reading, Run

LARGEST = 1e150
"""Largest size of a number that sonde writes. The square of a larger number overflows."""

NEVER_NEGATIVE = ("gns/b_simple", "gns_prompts/b_simple")
"""Beginnings of the names of metrics that are never negative."""


class Contents:
    """Collects the records of one log.

    Args:
        file: the log, for messages.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._units: dict[str, str] = {}
        self._headers: list[Header] = []
        self._readings: list[Reading] = []
        self._policy: list[PolicyReading] = []
        self._own: list[MetricsReading] = []
        self._alerts: list[Alert] = []
        self._ended: str | None = None
        self._declared: set[str] = set()
        """Names of the metrics that sonde wrote, of all starts."""

    def add(self, record: Mapping[str, Any], line: int) -> None:
        """Add a record as it was written.

        Args:
            record: of any kind; one that this version does not know is skipped.
            line: its number in the file, from 1.

        Raises:
            ValueError: for a record that cannot be, with its line.
        """
        try:
            self._add(record, line)
        except (KeyError, TypeError, OverflowError, AttributeError) as error:
            refuse(self._file, line, error)

    def _add(self, record: Mapping[str, Any], line: int) -> None:
        segment = len(self._headers) - 1
        match record["kind"]:
            case "header":
                self._add_header(record)
            case "probe":
                self._add_probe(record)
            case "reading":
                self._add_reading(record, segment, line)
            case "details":
                self._add_details(record)
            case "policy":
                self._policy.append(policy_reading(record, segment))
                self._check_own_numbers(self._policy[-1].metrics, line)
            case "metrics":
                window, time = as_count(record["window"]), as_time(record["time"])
                self._own.append(MetricsReading(segment, window, time, _metrics(record), alerts={}))
            case "alert":
                window, name, message = as_count(record["window"]), str(record["name"]), str(record["message"])
                self._alerts.append(Alert(segment, window, name, message))
            case "end":
                self._ended = str(record["reason"])

    def _add_header(self, record: Mapping[str, Any]) -> None:
        if record["schema"] != SCHEMA:
            raise ValueError(other_schema(self._file, record["schema"]))
        probe = _probe(record)
        self._note_probe(probe)
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

    def _add_probe(self, record: Mapping[str, Any]) -> None:
        probe = _probe(record)
        self._note_probe(probe)
        header = self._headers[-1]
        self._headers[-1] = replace(header, probes=(*header.probes, probe))

    def _note_probe(self, probe: ProbeSetup) -> None:
        if (other := other_unit(self._units, probe.writes, probe.unit)) is not None:
            raise ValueError(
                f"{self._file} holds runs measured in {other!r} and in {probe.unit!r}, "
                "expected one unit: log each run to its own folder"
            )
        self._units[probe.writes] = probe.unit
        self._declared |= probe.metrics.keys()

    def _add_reading(self, record: Mapping[str, Any], segment: int, line: int) -> None:
        metrics, window = _metrics(record), as_count(record["window"])
        self._check_own_numbers(metrics, line)
        groups, groups_window = self._groups_before(segment)
        if "groups" in record:
            groups, groups_window = _groups(record), window
        reading = Reading(
            segment=segment,
            window=window,
            time=as_time(record["time"]),
            status=as_status(record["status"]),
            reason=str(record["reason"]),
            advice=str(record["advice"]),
            metrics=metrics,
            groups=groups,
            groups_window=groups_window,
            dropped={reason: as_count(n) for reason, n in as_mapping(record["dropped"]).items()},
            alerts={name: str(message) for name, message in as_mapping(record["alerts"]).items()},
            pieces=as_pieces(record["pieces"]),
        )
        self._readings.append(reading)

    def _groups_before(self, segment: int) -> tuple[Mapping[str, GroupReading], int]:
        """The groups that this start wrote last, and their window."""
        last = self._readings[-1] if self._readings else None
        return ({}, 0) if last is None or last.segment != segment else (last.groups, last.groups_window)

    def _add_details(self, record: Mapping[str, Any]) -> None:
        """The groups of the last reading, which was written without them."""
        if self._readings:
            last = self._readings[-1]
            self._readings[-1] = replace(last, groups=_groups(record), groups_window=last.window)

    def _check_own_numbers(self, metrics: Mapping[str, float | None], line: int) -> None:
        """Refuse a number of sonde's own that cannot be."""
        for name, value in metrics.items():
            if value is None or name not in self._declared:
                continue
            is_negative = value < 0 and name.startswith(NEVER_NEGATIVE)
            if abs(value) > LARGEST or is_negative:
                expected = f"at most {LARGEST:g} in size" if abs(value) > LARGEST else "0 or more"
                raise ValueError(
                    f"line {line} of {self._file} holds {name} = {value:g}, expected {expected}: "
                    "sonde writes no such number; was the log edited, or written by another program?"
                )

    def run(self, torn: str | None, *, earlier_runs: int) -> Run:
        """Everything that was collected.

        Args:
            torn: which lines a crash cut off, in words.
            earlier_runs: runs in the same log that began before.

        Raises:
            ValueError: when there is no whole header.
        """
        if not self._headers:
            raise ValueError(f"{self._file} holds no whole record yet: its header was cut off; start the run again")
        return Run(
            self._file,
            tuple(self._headers),
            tuple(self._readings),
            tuple(self._policy),
            tuple(self._own),
            tuple(self._alerts),
            self._ended,
            torn,
            earlier_runs,
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


def other_schema(file: Path, schema: object) -> str:
    """Says that a log is of another schema."""
    return (
        f"{file} was written with record schema {schema!r}, expected {SCHEMA}: read it with the version of sonde that "
        "wrote it"
    )


def _metrics(record: Mapping[str, Any]) -> dict[str, float | None]:
    """Numbers by name. Each line brings the same names: interned, they are held once."""
    return {sys.intern(name): value for name, value in as_numbers(record["metrics"]).items()}


def _groups(record: Mapping[str, Any]) -> dict[str, GroupReading]:
    return {name: _group(as_mapping(group)) for name, group in as_mapping(record["groups"]).items()}


def _group(group: Mapping[str, Any]) -> GroupReading:
    status = as_status(group["status"])
    high = math.inf if status == "lower_bound" else as_number(group["high"])
    b_simple, low, grad_sq, trace_cov = (as_number(group[key]) for key in ("b_simple", "low", "grad_sq", "trace_cov"))
    return GroupReading(status, b_simple, low, high, grad_sq, trace_cov)


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
