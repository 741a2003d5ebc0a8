"""Reads a run's log back, up to the last whole line, and says where a crash tore it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sonde.batch_size.stats.reading import GroupReading
from sonde.probe import ReportSection
from sonde.records import SCHEMA
from sonde.runs.json_values import as_count, as_list, as_mapping, as_number, as_numbers, as_status, as_time
from sonde.runs.policy_reading import PolicyReading, policy_reading
from sonde.runs.sinks import RECORDS_NAME, begins_header, other_unit, parse_record
from sonde.stats.intervals import Status


@dataclass(frozen=True)
class ProbeSetup:
    """How one probe measured.

    Attributes:
        writes: the kind of record that it writes; empty in logs of an older sonde, which do not say.
        unit: plural name of one independent sample, such as "sequences".
        setup: what was found and chosen: wrapper, ranks, groups in the model's order, horizon, …
        metrics: unit and meaning of each metric that the probe writes.
        sections: of the report, as the probe declares them.
    """

    writes: str
    unit: str
    setup: Mapping[str, Any]
    metrics: Mapping[str, Mapping[str, str]]
    sections: tuple[ReportSection, ...]


@dataclass(frozen=True)
class Header:
    """One start of the run.

    Attributes:
        time: seconds since 1970.
        run: the run's name; may be empty.
        versions: version of each package.
        metadata: the user's own, any JSON.
        probes: how each probe of the log measured, at least one, in the order in which they began.
    """

    time: float
    run: str
    versions: Mapping[str, str]
    metadata: Mapping[str, Any]
    probes: tuple[ProbeSetup, ...]

    def probe(self, writes: str) -> ProbeSetup | None:
        """The probe of this start that writes this kind of record, "reading" or "policy"; None if there is none."""
        return next((probe for probe in self.probes if probe.writes in (writes, "")), None)

    @property
    def unit(self) -> str:
        """The unit of the probe that began first."""
        return self.probes[0].unit

    @property
    def setup(self) -> Mapping[str, Any]:
        """The set-up of the probe that began first."""
        return self.probes[0].setup

    @property
    def metrics(self) -> dict[str, Mapping[str, str]]:
        """Unit and meaning of each metric that the probes of this start write."""
        return {name: metric for probe in self.probes for name, metric in probe.metrics.items()}


@dataclass(frozen=True)
class Reading:
    """One reading of the noise scale, with everything logged beside it.

    Attributes:
        segment: index into `Run.headers` of the start it belongs to.
        window: number of windows (optimizer steps) so far.
        time: seconds since 1970.
        status: how far B_simple is known, see `stats.intervals.RatioInterval`.
        reason: why B_simple is not resolved; empty when it is.
        metrics: a number for each name, None where it is not known.
        groups: the noise scale of each group of parameters, by name.
        dropped: windows left out so far, by reason.
        alerts: what looked wrong since the reading before, a message by name.
        pieces: how a window was cut into pieces, such as pieces per window.
    """

    segment: int
    window: int
    time: float
    status: Status
    reason: str
    metrics: Mapping[str, float | None]
    groups: Mapping[str, GroupReading]
    dropped: Mapping[str, int]
    alerts: Mapping[str, str]
    pieces: Mapping[str, Any]

    @property
    def high(self) -> float | None:
        """Upper end of the interval of B_simple: infinite for a lower bound, None when unresolved."""
        return math.inf if self.status == "lower_bound" else self.metrics.get("gns/b_simple_high")


@dataclass(frozen=True)
class MetricsReading:
    """Metrics of a probe of the user's own.

    Attributes:
        segment: index into `Run.headers` of the start it belongs to.
        window: the optimizer step, from 1.
        time: seconds since 1970.
        metrics: a number per name, None where it is not known.
        alerts: always empty; the user's own probes have no alerts.
    """

    segment: int
    window: int
    time: float
    metrics: Mapping[str, float | None]
    alerts: Mapping[str, str]


@dataclass(frozen=True)
class Alert:
    """Something that looked wrong for the first time.

    Attributes:
        window: when.
        name: which check.
        message: what, in plain words.
    """

    window: int
    name: str
    message: str


@dataclass(frozen=True)
class Run:
    """Everything a run's log holds.

    Attributes:
        path: the log file.
        headers: one per start of the run, at least one; a restarted run has several.
        readings: of the noise scale, of all starts, in the order written.
        policy: readings of a policy, in the same order.
        own: metrics of the user's own probes, in the same order.
        alerts: of all starts, in the order written.
        ended: why the last start ended; None while it goes on, or if it was cut off.
        torn: which lines a crash cut off, in words; None if no line is torn.
    """

    path: Path
    headers: tuple[Header, ...]
    readings: tuple[Reading, ...]
    policy: tuple[PolicyReading, ...]
    own: tuple[MetricsReading, ...]
    alerts: tuple[Alert, ...]
    ended: str | None
    torn: str | None

    @property
    def header(self) -> Header:
        """The header of the last start."""
        return self.headers[-1]

    def probe(self, writes: str) -> ProbeSetup:
        """How this kind of record was measured, by the last start that has it; the first probe of all if none has."""
        setups = [setup for header in reversed(self.headers) if (setup := header.probe(writes)) is not None]
        return setups[0] if setups else self.header.probes[0]

    @property
    def metrics(self) -> dict[str, Mapping[str, str]]:
        """Unit and meaning of each metric that sonde wrote, of all starts."""
        return {name: metric for header in self.headers for name, metric in header.metrics.items()}

    @property
    def sections(self) -> tuple[ReportSection, ...]:
        """The sections of the report that probes declared, of all starts, each title once."""
        declared = [section for header in self.headers for probe in header.probes for section in probe.sections]
        return tuple({section.title: section for section in declared}.values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured yet."""
        return not self.readings and not self.policy and not self.own

    @property
    def last(self) -> Reading | PolicyReading | MetricsReading:
        """The last reading of any kind, of a run that has one."""
        kinds: list[Sequence[Reading | PolicyReading | MetricsReading]] = [self.readings, self.policy, self.own]
        return max((kind[-1] for kind in kinds if kind), key=lambda reading: reading.time)

    @property
    def alerts_now(self) -> dict[str, str]:
        """What looks wrong now, by the last reading of each kind: a message by name."""
        last: list[Reading | PolicyReading] = [*self.readings[-1:], *self.policy[-1:]]
        return {name: message for reading in last for name, message in reading.alerts.items()}

    @property
    def name(self) -> str:
        """The run's name; the name of its folder if the run was given none."""
        return self.header.run or self.path.resolve().parent.name

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """One metric over the run. Readings that do not know the metric are left out.

        Args:
            metric: its name, such as "gns/b_simple".

        Returns:
            Windows and values, of equal length; both empty for a metric that was never known.
        """
        readings: list[Reading | PolicyReading | MetricsReading] = [*self.readings, *self.policy, *self.own]
        known = [(r.window, value) for r in readings if (value := r.metrics.get(metric)) is not None]
        return [window for window, _ in known], [value for _, value in known]


def read_run(path: str | Path) -> Run:
    """Read the log of a run, whether it has ended, is being written, or was cut off.

    Args:
        path: the run's folder, or the `.jsonl` file itself.

    Returns:
        A `Run`. A line that a crash tore is left out, and `torn` says so: it is the last line, or a restart's header
        follows it. Kinds of record that this version does not know are skipped.

    Raises:
        FileNotFoundError: when there is no such folder or no log in it.
        ValueError: when the file is not a run's log, was written by a newer sonde, or is damaged other than by a crash.
    """
    file = find_records(path)
    lines = file.read_bytes().split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    if not lines or not begins_header(lines[0]):
        found = repr(lines[0][:40]) if lines else "an empty file"
        raise ValueError(
            f"{file} is not a run's log: expected a header record first, got {found}: give a folder that sonde wrote"
        )

    content = _Content(file)
    torn: list[str] = []
    for number, line in enumerate(lines, start=1):
        record = parse_record(line)
        if record is not None:
            content.add(record, number)
        elif number == len(lines):
            torn.append(f"line {number}, the last one, is cut off in the middle: the {number - 1} before it were read")
        elif begins_header(lines[number]):
            torn.append(f"line {number} was cut off when the run was interrupted: it was left out")
        else:
            raise ValueError(
                f"{file} is damaged: line {number} is not a JSON object, got {line[:40]!r}, and no restart follows it: "
                "remove that line from a copy and read the copy"
            )
    return content.run("; ".join(torn) or None)


def find_records(path: str | Path) -> Path:
    """The log file of a run.

    Args:
        path: the run's folder, or the `.jsonl` file itself.

    Raises:
        FileNotFoundError: when there is no such folder or no log in it.
        ValueError: when it is a file of another kind.
    """
    path = Path(path)
    if path.is_dir():
        file = path / RECORDS_NAME
        if not file.is_file():
            raise FileNotFoundError(f"no {RECORDS_NAME} in the folder {path}: give the folder a run was logged to")
        return file
    if not path.exists():
        raise FileNotFoundError(f"no run at {path}: give the folder a run was logged to, or its {RECORDS_NAME}")
    if path.suffix != ".jsonl":
        raise ValueError(f"expected a run's folder or its {RECORDS_NAME}, got the file {path}: give the run's folder")
    return path


class _Content:
    """Collects the records of one file in order."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.units: dict[str, str] = {}
        self.headers: list[Header] = []
        self.readings: list[Reading] = []
        self.policy: list[PolicyReading] = []
        self.own: list[MetricsReading] = []
        self.alerts: list[Alert] = []
        self.ended: str | None = None

    def add(self, record: Mapping[str, Any], number: int) -> None:
        try:
            match record["kind"]:
                case "header":
                    self._add_header(record)
                case "probe":
                    self._add_probe(_probe(record))
                case "metrics":
                    self.own.append(_metrics_reading(record, segment=len(self.headers) - 1))
                case "reading":
                    self.readings.append(_reading(record, segment=len(self.headers) - 1))
                case "policy":
                    self.policy.append(policy_reading(record, segment=len(self.headers) - 1))
                case "alert":
                    self.alerts.append(Alert(as_count(record["window"]), str(record["name"]), str(record["message"])))
                case "end":
                    self.ended = str(record["reason"])
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(
                f"line {number} of {self.file} is not a record of schema {SCHEMA}, "
                f"got {type(error).__name__} at {error}: was it written by another program?"
            ) from error

    def _add_header(self, record: Mapping[str, Any]) -> None:
        if record["schema"] != SCHEMA:
            raise ValueError(
                f"{self.file} was written with record schema {record['schema']!r}, expected {SCHEMA}: "
                "read it with the version of sonde that wrote it"
            )
        probe = _probe(record)
        self._check_unit(probe)
        self.headers.append(
            Header(
                time=as_time(record["time"]),
                run=str(record["run"]),
                versions=as_mapping(record["versions"]),
                metadata=as_mapping(record["metadata"]),
                probes=(probe,),
            )
        )
        self.ended = None

    def _add_probe(self, probe: ProbeSetup) -> None:
        self._check_unit(probe)
        header = self.headers[-1]
        self.headers[-1] = replace(header, probes=(*header.probes, probe))

    def _check_unit(self, probe: ProbeSetup) -> None:
        if (other := other_unit(self.units, probe.writes, probe.unit)) is not None:
            raise ValueError(
                f"{self.file} holds runs measured in {other!r} and in {probe.unit!r}, "
                "expected one unit: log each run to its own folder"
            )
        self.units[probe.writes] = probe.unit

    def run(self, torn: str | None) -> Run:
        if not self.headers:
            raise ValueError(f"{self.file} holds no whole record yet: its header was cut off; start the run again")
        return Run(
            self.file,
            tuple(self.headers),
            tuple(self.readings),
            tuple(self.policy),
            tuple(self.own),
            tuple(self.alerts),
            self.ended,
            torn,
        )


def _probe(record: Mapping[str, Any]) -> ProbeSetup:
    return ProbeSetup(
        writes=str(record.get("writes", "")),
        unit=str(record["unit"]),
        setup=as_mapping(record["setup"]),
        metrics=as_mapping(record["metrics"]),
        sections=tuple(_section(as_mapping(section)) for section in as_list(record.get("sections", []))),
    )


def _section(section: Mapping[str, Any]) -> ReportSection:
    names = tuple(str(name) for name in as_list(section["metrics"]))
    return ReportSection(str(section["title"]), str(section["text"]), names)


def _metrics_reading(record: Mapping[str, Any], segment: int) -> MetricsReading:
    window, time = as_count(record["window"]), as_time(record["time"])
    return MetricsReading(segment, window, time, as_numbers(record["metrics"]), alerts={})


def _reading(record: Mapping[str, Any], segment: int) -> Reading:
    return Reading(
        segment=segment,
        window=as_count(record["window"]),
        time=as_time(record["time"]),
        status=as_status(record["status"]),
        reason=str(record["reason"]),
        metrics={name: as_number(value) for name, value in as_mapping(record["metrics"]).items()},
        groups={name: _group(as_mapping(group)) for name, group in as_mapping(record["groups"]).items()},
        dropped={reason: as_count(count) for reason, count in as_mapping(record["dropped"]).items()},
        alerts={name: str(message) for name, message in as_mapping(record["alerts"]).items()},
        pieces=as_mapping(record["pieces"]),
    )


def _group(group: Mapping[str, Any]) -> GroupReading:
    status = as_status(group["status"])
    high = math.inf if status == "lower_bound" else as_number(group["high"])
    b_simple, low, grad_sq, trace_cov = (as_number(group[key]) for key in ("b_simple", "low", "grad_sq", "trace_cov"))
    return GroupReading(status, b_simple, low, high, grad_sq, trace_cov)
