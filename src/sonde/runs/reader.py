"""Reads a run's log back, up to the last whole line, and says where a crash tore it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from sonde.batch_size.stats.reading import GroupReading
from sonde.log.lines import LONGEST_LINE, begins_header, last_run, lines_of, parse_record
from sonde.log.sinks import RECORDS_NAME, other_unit
from sonde.record_values import SCHEMA
from sonde.runs.run import (
    Alert,
    ComparisonReading,
    Header,
    MetricsReading,
    PolicyReading,
    ProbeSetup,
    Reading,
    Run,
    WindowReading,
)
from sonde.runs.values import count, filled, read_as
from sonde.wording import plural

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


def read_windows(path: str | Path) -> Iterator[WindowReading]:
    """The windows of a log's last run (`RunLog(log_windows=True)`), one after the other, in little memory.

    Args:
        path: the run's folder, or the `.jsonl` file itself.

    Raises:
        FileNotFoundError: when there is no such folder or no log in it.
        ValueError: when the file is not a run's log, was written by another version of sonde, or is damaged other than
            by a crash.

    Example:
        >>> import tempfile
        >>> import sonde, torch
        >>> folder = tempfile.mkdtemp()
        >>> model = torch.nn.Linear(4, 1)
        >>> log = sonde.RunLog(sonde.JsonlSink(folder), log_windows=True)
        >>> with sonde.attach(model, unit="rows", log=log, verbose=False) as probe:
        ...     for _ in range(3):
        ...         for _ in range(2):
        ...             with probe.piece(units=8):
        ...                 model(torch.randn(8, 4)).square().mean().backward()
        ...         probe.step()
        ...         model.zero_grad()
        >>> [window.window for window in sonde.read_windows(folder)]
        [1, 2, 3]
    """
    file = find_records(path)
    lines = _WholeLines(file, unwanted=b'{"kind":"reading"')
    segment = -1
    for line in lines_of(file, advice=ADVICE):
        if (record := lines.record(line)) is None:
            continue
        try:
            if record["kind"] == "header":
                segment += 1
                _check_schema(file, record)
            elif record["kind"] == "window":
                yield filled(WindowReading, record, segment=segment)
        except (KeyError, TypeError, OverflowError, AttributeError) as error:
            _refuse(file, lines.number, error)


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


class _WholeLines:
    """Reads the lines of a log one after the other, and tells records of its last run from lines that a crash tore.

    Args:
        file: the log.
        unwanted: the beginning of lines to pass over. Not parsing them saves most of the time that they take.

    Attributes:
        last: where the last run begins.
        number: of the last line, from 1.
        torn: the lines that a restart follows, in words.
    """

    def __init__(self, file: Path, *, unwanted: bytes) -> None:
        self.last = last_run(file, advice=ADVICE)
        self.number = 0
        self.torn: list[str] = []
        self._file, self._unwanted = file, unwanted
        self._cut: tuple[int, bytes] | None = None
        """A torn line whose next line was not read yet, with its number."""

    def record(self, line: bytes) -> dict[str, Any] | None:
        """The record on the next line; None if the line is torn, not wanted, or of an earlier run.

        Raises:
            ValueError: when the file is damaged other than by a crash.
        """
        self.number += 1
        if self.number <= self.last.lines_before:
            return None
        if self._cut is not None:
            self.torn.append(_torn_within(self._file, self._cut, line))
            self._cut = None
        if line.startswith(self._unwanted) and line.endswith(b"}"):
            return None
        if (record := parse_record(line)) is None:
            self._cut = self.number, line
        return record

    def all_torn(self) -> list[str]:
        """The lines that are torn if no line follows, in words."""
        if self._cut is None:
            return self.torn
        n_before = self._cut[0] - 1
        last = f"line {n_before + 1}, the last one, is cut off in the middle: the {n_before} before it were read"
        return [*self.torn, last]


def _torn_within(file: Path, torn: tuple[int, bytes], following: bytes) -> str:
    number, line = torn
    if begins_header(following):
        return f"line {number} was cut off when the run was interrupted: it was left out"
    raise ValueError(
        f"{file} is damaged: line {number} is not a JSON object, got {line[:40]!r}, and no restart follows it: "
        "remove that line from a copy and read the copy"
    )


def _refuse(file: Path, line: int, error: Exception) -> NoReturn:
    found = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    raise ValueError(
        f"line {line} of {file} is not a record of schema {SCHEMA}: {found}. Was it written by another program?"
    ) from error


def _check_schema(file: Path, header: Mapping[str, Any]) -> None:
    if header["schema"] != SCHEMA:
        raise ValueError(
            f"{file} was written with record schema {header['schema']!r}, expected {SCHEMA}: read it with the version "
            "of sonde that wrote it"
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
        self._lines = _WholeLines(file, unwanted=b'{"kind":"window"')
        self._units: dict[str, str] = {}
        self._headers: list[Header] = []
        self._readings: list[Reading] = []
        self._others: dict[str, list[Any]] = {name: [] for name, _ in _KINDS.values()}
        self._ended: str | None = None
        self._n_fresh = 0

    def _add(self, record: Mapping[str, Any]) -> None:
        """Add a record as it was written; one of a kind that this version does not know is skipped.

        Raises:
            KeyError: when something is missing.
            TypeError: when something is of another kind than the schema says.
            ValueError: for another schema or another unit.
        """
        segment = len(self._headers) - 1
        match kind := record["kind"]:
            case "header":
                self._add_header(record)
            case "probe":
                header = self._headers[-1]
                self._headers[-1] = replace(header, probes=(*header.probes, self._probe(record)))
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
        _check_schema(self.file, record)
        self._headers.append(filled(Header, record, probes=(self._probe(record),)))
        self._ended = None

    def _probe(self, record: Mapping[str, Any]) -> ProbeSetup:
        probe = filled(ProbeSetup, record)
        if (other := other_unit(self._units, probe.writes, probe.unit)) is not None:
            raise ValueError(
                f"{self.file} holds runs measured in {other!r} and in {probe.unit!r}, "
                "expected one unit: log each run to its own folder"
            )
        self._units[probe.writes] = probe.unit
        return probe

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
                    if (record := self._lines.record(line.removesuffix(b"\n"))) is not None:
                        self._add(record)
                except (KeyError, TypeError, OverflowError, AttributeError) as error:
                    _refuse(self.file, self._lines.number, error)
        torn = self._lines.all_torn() if is_whole else self._lines.torn
        if not self._headers:
            raise ValueError(f"{self.file} holds no whole record yet: its header was cut off; start the run again")
        others = {name: tuple(of) for name, of in self._others.items()}
        return Run(
            self.file,
            tuple(self._headers),
            tuple(self._readings),
            ended=self._ended,
            torn="; ".join(torn) or None,
            earlier_runs=self._lines.last.runs_before,
            **others,
        )


def _groups(record: Mapping[str, Any]) -> dict[str, GroupReading]:
    groups: dict[str, GroupReading] = read_as(Mapping[str, GroupReading])(record["groups"])
    unbounded = {name: replace(of, high=math.inf) for name, of in groups.items() if of.status == "lower_bound"}
    return groups | unbounded
