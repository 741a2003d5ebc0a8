"""Reads a run's log back, up to the last whole line, and says where a crash tore it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sonde.batch_size.stats.reading import GroupReading
from sonde.log.lines import LONGEST_LINE, begins_header, last_run, parse_record
from sonde.log.sinks import RECORDS_NAME
from sonde.log.values import count, filled, read_as
from sonde.record_values import SCHEMA
from sonde.runs.run import Alert, ComparisonReading, Header, MetricsReading, PolicyReading, ProbeSetup, Reading, Run
from sonde.wording import plural

_UNWANTED = b'{"kind":"window"'
"""The beginning of lines that are passed over. Not parsing them saves most of the time that they take."""
ADVICE = "give a folder that sonde wrote"
"""What to do with a file that is not a run's log."""
_KINDS: dict[str, tuple[str, type]] = {
    "policy": ("policy", PolicyReading),
    "comparison": ("comparisons", ComparisonReading),
    "metrics": ("own", MetricsReading),
    "alert": ("alerts", Alert),
}
"""Kinds of record that hold what they are read as, and where a `Run` has them."""


def read_run(path: str | Path) -> Run:
    """Read the last run of a log, whether it has ended, is being written, or was cut off.

    Args:
        path: the run's folder, or the `.jsonl` file itself.

    Returns:
        A `Run`. A line that a crash tore is left out, and `torn` says so: it is the last line, or a restart's header
        follows it. Kinds of record that this version does not know are skipped.

    Raises:
        FileNotFoundError: when there is no such folder or no log in it.
        ValueError: when the file is not a run's log, was written by another version of sonde, or is damaged other than
            by a crash.
    """
    return Contents(find_records(path)).read_on(is_whole=True)


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
            runs = sorted(each.parent.name for each in path.glob(f"*/{RECORDS_NAME}"))
            if runs:
                one = f"which holds {plural(len(runs), 'run')}: give the folder of one, such as {path / runs[0]}"
                raise FileNotFoundError(f"no {RECORDS_NAME} in the folder {path}, {one}")
            raise FileNotFoundError(f"no {RECORDS_NAME} in the folder {path}: give the folder a run was logged to")
        return file
    if not path.exists():
        raise FileNotFoundError(f"no run at {path}: give the folder a run was logged to, or its {RECORDS_NAME}")
    if path.suffix != ".jsonl":
        raise ValueError(f"expected a run's folder or its {RECORDS_NAME}, got the file {path}: give the run's folder")
    return path


def _torn_within(file: Path, torn: tuple[int, bytes], following: bytes) -> str:
    number, line = torn
    if begins_header(following):
        return f"line {number} was cut off when the run was interrupted: it was left out"
    raise ValueError(
        f"{file} is damaged: line {number} is not a JSON object, got {line[:40]!r}, and no restart follows it: "
        "remove that line from a copy and read the copy"
    )


class Contents:
    """Collects what a log holds of its last run, and reads on where the log has grown.

    Args:
        file: the log. It is read to find where its last run begins.

    Attributes:
        end: bytes of the lines that were read.

    Raises:
        ValueError: when the file is not a run's log.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.end = 0
        self._last = last_run(file, advice=ADVICE)
        self._n_lines = 0
        self._torn: list[str] = []
        """The lines that a restart follows, in words."""
        self._cut: tuple[int, bytes] | None = None
        """A torn line whose next line was not read yet, with its number."""
        self._headers: list[Header] = []
        self._readings: list[Reading] = []
        self._others: dict[str, list[Any]] = {name: [] for name, _ in _KINDS.values()}
        self._ended: str | None = None
        self._n_fresh = 0

    def _record(self, line: bytes) -> dict[str, Any] | None:
        """The record on the next line; None if the line is torn, not wanted, or of an earlier run.

        Raises:
            ValueError: when the file is damaged other than by a crash.
        """
        self._n_lines += 1
        if self._n_lines <= self._last.lines_before:
            return None
        if self._cut is not None:
            self._torn.append(_torn_within(self.file, self._cut, line))
            self._cut = None
        if line.startswith(_UNWANTED) and line.endswith(b"}"):
            return None
        if (record := parse_record(line)) is None:
            self._cut = self._n_lines, line
        return record

    def _add(self, record: Mapping[str, Any]) -> None:
        """Add a record as it was written; one of a kind that this version does not know is skipped.

        Raises:
            KeyError: when something is missing.
            TypeError: when something is of another kind than the schema says.
            ValueError: for another schema.
        """
        segment = len(self._headers) - 1
        match kind := record["kind"]:
            case "header":
                self._add_header(record)
            case "probe":
                header = self._headers[-1]
                self._headers[-1] = replace(header, probes=(*header.probes, filled(ProbeSetup, record)))
            case "reading":
                self._add_reading(record, segment)
            case "details" if self._readings:  # the groups of the last reading, which was written without them
                last = self._readings[-1]
                self._readings[-1] = replace(last, groups=_groups(record), groups_window=last.window)
            case "policy" | "comparison" | "metrics" | "alert":
                name, of = _KINDS[kind]
                self._others[name].append(filled(of, record, segment=segment))
            case "end":
                self._ended = str(record["reason"])
            case "fresh":
                self._n_fresh += 1

    def _add_header(self, record: Mapping[str, Any]) -> None:
        if (schema := record["schema"]) != SCHEMA:
            raise ValueError(
                f"{self.file} was written with record schema {schema!r}, expected {SCHEMA}: read it with the version "
                "of sonde that wrote it"
            )
        self._headers.append(filled(Header, record, probes=(filled(ProbeSetup, record),)))
        self._ended = None

    def _add_reading(self, record: Mapping[str, Any], segment: int) -> None:
        last = self._readings[-1] if self._readings else None
        groups: Mapping[str, GroupReading] = {}
        groups_window = 0
        if "groups" in record:
            groups, groups_window = _groups(record), count(record["window"])
        elif last is not None and last.segment == segment:  # those that this start wrote last
            groups, groups_window = last.groups, last.groups_window
        self._readings.append(filled(Reading, record, segment=segment, groups=groups, groups_window=groups_window))

    @property
    def is_of_last_run(self) -> bool:
        """Whether no new run has begun among the lines. The run after that is read from the log's first line on."""
        return self._n_fresh < 2

    def read_on(self, *, is_whole: bool) -> Run:
        """Add the lines that were not read yet, and return everything that was collected.

        Args:
            is_whole: whether nothing follows, so that a torn line at the end is one that a crash tore. Otherwise, a
                line without its line break is still being written, and waits.

        Raises:
            ValueError: when a line was not written by this version of sonde, is damaged other than by a crash, or
                there is no whole header.
        """
        with self.file.open("rb") as log:
            log.seek(self.end)
            while (line := log.readline(LONGEST_LINE + 1)) and (is_whole or line.endswith(b"\n")):
                self.end += len(line)
                try:
                    if (record := self._record(line.removesuffix(b"\n"))) is not None:
                        self._add(record)
                except (KeyError, TypeError, OverflowError, AttributeError) as error:
                    found = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
                    raise ValueError(
                        f"line {self._n_lines} of {self.file} is not a record of schema {SCHEMA}: {found}. Was it "
                        "written by another program?"
                    ) from error
        torn = [*self._torn]
        if is_whole and self._cut is not None:
            n = self._cut[0] - 1
            torn.append(f"line {n + 1}, the last one, is cut off in the middle: the {n} before it were read")
        if not self._headers:
            raise ValueError(f"{self.file} holds no whole record yet: its header was cut off; start the run again")
        others = {name: tuple(of) for name, of in self._others.items()}
        return Run(
            self.file,
            tuple(self._headers),
            tuple(self._readings),
            ended=self._ended,
            torn="; ".join(torn) or None,
            earlier_runs=self._last.runs_before,
            **others,
        )


def _groups(record: Mapping[str, Any]) -> dict[str, GroupReading]:
    groups: dict[str, GroupReading] = read_as(Mapping[str, GroupReading])(record["groups"])
    unbounded = {name: replace(of, high=math.inf) for name, of in groups.items() if of.status == "lower_bound"}
    return groups | unbounded
