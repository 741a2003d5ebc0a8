"""The log of a run: one JSON object per line, each flushed, so that a crash costs at most the line being written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

RECORDS_NAME = "records.jsonl"
"""Name of the log in a run's folder."""

_HEADER_START = b'{"kind":"header"'
_PROBE_START = b'{"kind":"probe"'


class JsonlSink:
    """Appends records to `folder/records.jsonl`, creating both; a restarted run appends to the same file.

    Nothing in the file is ever changed. If a crash left its last line torn, that line is ended before anything else is
    written, so the torn rest cannot merge with a new record. Files are touched with the first record, so every rank may
    make a sink: a run's log writes on rank 0 only.

    Args:
        folder: the run's folder.

    Raises:
        ValueError: when the file holds something that is not a run's log.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> sink = JsonlSink(folder)
        >>> sink.write({"kind": "header", "schema": 1, "unit": "sequences"})
        >>> sink.close()
        >>> (Path(folder) / "records.jsonl").read_text()
        '{"kind":"header","schema":1,"unit":"sequences"}\\n'
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / RECORDS_NAME
        self._units = _units_of_existing(self.path)
        self._file: BinaryIO | None = None
        self._closed = False

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record and hand it to the operating system before returning.

        Args:
            record: JSON values under string keys; the first record must be a header. Unknown numbers are None.

        Raises:
            ValueError: when a value is not JSON, NaN and infinity included, or a probe names another unit than the run
                so far had for the same kind of record.
            RuntimeError: after `close`, or when the first record is not a header.
        """
        if self._closed:
            raise RuntimeError(f"the log {self.path} is closed, got a {record['kind']!r} record: open a new JsonlSink")
        if record["kind"] in ("header", "probe"):
            self._check_unit(record)
        if record["kind"] != "header" and self._file is None:
            raise RuntimeError(f"a run starts with its header, got a {record['kind']!r} record: write the header first")
        line = _encode(record)
        if self._file is None:
            self._file = self._open()
        self._file.write(line)  # one write, one flush: killed here or later, the lines before stay whole
        self._file.flush()

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        self._closed = True
        if self._file is not None:
            self._file.close()

    def _open(self) -> BinaryIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab")
        if _last_line_is_torn(self.path):
            file.write(b"\n")
        return file

    def _check_unit(self, probe: Mapping[str, object]) -> None:
        writes, unit = str(probe.get("writes", "")), str(probe["unit"])
        if (other := other_unit(self._units, writes, unit)) is not None:
            raise ValueError(
                f"{self.path} holds a run measured in {other!r}, got a probe that measures in {unit!r}; numbers in "
                "different units cannot be compared: log to a new folder"
            )
        self._units[writes] = unit


def other_unit(units: Mapping[str, str], writes: str, unit: str) -> str | None:
    """A unit in which the same kind of record was written before, if it is another one.

    Args:
        units: unit by the kind of record written in it; "" for a log of an older sonde, which does not say the kind.
        writes: the kind of record that a probe writes, or "".
        unit: the probe's unit.
    """
    if writes == "metrics":  # of the user's own probes, each with units of its own
        return None
    for kind, known in units.items():
        if kind != "metrics" and known != unit and (kind == writes or "" in (kind, writes)):
            return known
    return None


def begins_header(line: bytes) -> bool:
    """Whether a line is a header as `JsonlSink` writes it, or the torn beginning of one.

    Args:
        line: without its line break.
    """
    return line.startswith(_HEADER_START) or (line != b"" and _HEADER_START.startswith(line))


def parse_record(line: bytes) -> dict[str, Any] | None:
    """The JSON object on one line; None for a torn line, since an object is whole only with its last brace.

    Args:
        line: with or without its line break.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _encode(record: Mapping[str, object]) -> bytes:
    kind_first = {"kind": record["kind"], **record}
    try:
        text = json.dumps(kind_first, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a {record['kind']!r} record must hold JSON values only, with None for what is not known; {error}: "
            "convert or leave out that value"
        ) from error
    # Text from file names may hold lone surrogates, which UTF-8 has no bytes for; \udcXX is their JSON escape as well.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _units_of_existing(path: Path) -> dict[str, str]:
    """Units by kind of record, of all starts of the run that are already in the log; empty when there is none."""
    units: dict[str, str] = {}
    if not path.exists():
        return units
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if number == 0 and not begins_header(line.rstrip(b"\n")):
                raise ValueError(
                    f"{path} is not a run's log: it starts with {line[:40]!r} where a header record is expected; "
                    "nothing was written: log to another folder"
                )
            if not line.startswith((_HEADER_START, _PROBE_START)) or (probe := parse_record(line)) is None:
                continue
            units[str(probe.get("writes", ""))] = str(probe["unit"])
    return units


def _last_line_is_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"
