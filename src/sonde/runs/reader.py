"""Reads a run's log back, up to the last whole line, and says where a crash tore it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sonde.log.lines import LastRun, begins_header, last_run, lines_of, parse_record
from sonde.log.sinks import RECORDS_NAME
from sonde.record_values import SCHEMA
from sonde.runs.contents import Contents, other_schema, refuse
from sonde.runs.run import Alert, Header, MetricsReading, ProbeSetup, Reading, Run
from sonde.runs.windows import WindowReading, window_reading

__all__ = [
    "Alert",
    "Header",
    "MetricsReading",
    "ProbeSetup",
    "Reading",
    "Run",
    "WindowReading",
    "find_records",
    "read_run",
    "read_windows",
]

_ADVICE = "give a folder that sonde wrote"


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
    file = find_records(path)
    last = last_run(file, advice=_ADVICE)
    contents, torn = Contents(file), list[str]()
    for number, record in _records(file, last, torn, unwanted=b'{"kind":"window"'):
        contents.add(record, number)
    return contents.run("; ".join(torn) or None, earlier_runs=last.runs_before)


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
    segment = -1
    for number, record in _records(file, last_run(file, advice=_ADVICE), [], unwanted=b'{"kind":"reading"'):
        try:
            if record["kind"] == "header":
                segment += 1
                if record["schema"] != SCHEMA:
                    raise ValueError(other_schema(file, record["schema"]))
            elif record["kind"] == "window":
                yield window_reading(record, segment)
        except (KeyError, TypeError, OverflowError, AttributeError) as error:
            refuse(file, number, error)


def _records(file: Path, last: LastRun, torn: list[str], *, unwanted: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """The records of the last run, each with the number of its line from 1.

    Args:
        file: the log.
        last: where that run begins.
        torn: gets which lines are torn, in words.
        unwanted: the beginning of lines to pass over. Not parsing them saves most of the time that they take.

    Raises:
        ValueError: when the file is damaged other than by a crash.
    """
    cut: tuple[int, bytes] | None = None  # a torn line whose next line was not read yet, with its number
    for number, line in enumerate(lines_of(file, advice=_ADVICE), start=1):
        if number <= last.lines_before:
            continue
        if cut is not None:
            torn.append(_torn_within(file, cut, line))
            cut = None
        if line.startswith(unwanted) and line.endswith(b"}"):
            continue
        if (record := parse_record(line)) is None:
            cut = number, line
        else:
            yield number, record
    if cut is not None:
        torn.append(f"line {cut[0]}, the last one, is cut off in the middle: the {cut[0] - 1} before it were read")


def _torn_within(file: Path, torn: tuple[int, bytes], following: bytes) -> str:
    number, line = torn
    if begins_header(following):
        return f"line {number} was cut off when the run was interrupted: it was left out"
    raise ValueError(
        f"{file} is damaged: line {number} is not a JSON object, got {line[:40]!r}, and no restart follows it: "
        "remove that line from a copy and read the copy"
    )


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
