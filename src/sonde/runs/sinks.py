"""The log of a run: one JSON object per line, each on disk at once: a crash costs at most the last line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sonde.runs.columns import LineWriter
from sonde.runs.lines import HEADER_START, blocks_of_lines, parse_record
from sonde.runs.locked_file import LockedFile

RECORDS_NAME = "records.jsonl"
"""Name of the log in a run's folder."""

_PROBE_START = b'{"kind":"probe"'


class JsonlSink:
    """Appends records to `folder/records.jsonl`, creating both; a restarted run appends to the same file.

    Nothing in the file is ever changed. If a crash left its last line torn, that line is ended before anything else is
    written, so the torn rest cannot merge with a new record. Files are touched with the first record, so every rank may
    make a sink: a run's log writes on rank 0 only. From then on the file is locked until `close`, or until the process
    ends.

    Args:
        folder: the run's folder.

    Raises:
        ValueError: when the folder is a file, or its log is something else than a run's log.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> sink = JsonlSink(folder)
        >>> sink.write({"kind": "header", "schema": 2, "unit": "sequences"})
        >>> sink.close()
        >>> (Path(folder) / "records.jsonl").read_text()
        '{"kind":"header","schema":2,"unit":"sequences"}\\n'
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / RECORDS_NAME
        _check_folder(Path(folder))
        self._units = _units_of_existing(self.path)
        self._lines = LineWriter()
        self._file: LockedFile | None = None
        self._closed = False

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record and hand it to the operating system before returning.

        Args:
            record: JSON values under string keys; the first record must be a header. Unknown numbers are None.

        Raises:
            ValueError: when a value is not JSON, NaN and infinity included, when a probe names another unit than the
                run so far had for the same kind of record, or when another process writes to the same log.
            RuntimeError: after `close`, or when the first record is not a header.
            OSError: when the disk is full, or the folder cannot be written to.
        """
        if self._closed:
            raise RuntimeError(f"the log {self.path} is closed, got a {record['kind']!r} record: open a new JsonlSink")
        if record["kind"] in ("header", "probe"):
            self._check_unit(record)
        if record["kind"] != "header" and self._file is None:
            raise RuntimeError(f"a run starts with its header, got a {record['kind']!r} record: write the header first")
        lines = self._lines.encode(record)
        if self._file is None:
            self._file = LockedFile(self.path)
        self._file.append(lines)  # killed here or later, the lines before stay whole
        self._lines.commit()

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        self._closed = True
        if self._file is not None:
            self._file.close()

    def write_report(self) -> None:
        """Write the report of the log so far beside it; see `sonde.write_report`.

        Called when the process is told to end (SIGTERM).
        """
        from sonde.runs.report.write import write_report  # here, since the report reads the log that this file writes

        write_report(self.path.parent)

    def _check_unit(self, probe: Mapping[str, object]) -> None:
        writes, unit = str(probe.get("writes", "")), str(probe["unit"])
        if (other := other_unit(self._units, writes, unit)) is not None:
            raise ValueError(
                f"{self.path} holds a run measured in {other!r}, got a probe that measures in {unit!r}; numbers in "
                "different units cannot be compared: log to a new folder"
            )
        self._units[writes] = unit


def other_unit(units: Mapping[str, str], writes: str, unit: str) -> str | None:
    """The unit of earlier records of the same kind, if it is another unit.

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


def _check_folder(folder: Path) -> None:
    """Refuse a folder that is a file, or lies in one."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if existing is not None and not existing.is_dir():
        raise ValueError(f"a run is logged to a folder, got {folder}, and {existing} is a file: give another folder")
    if (folder / RECORDS_NAME).is_dir():
        raise ValueError(f"a run is logged to a file, but {folder / RECORDS_NAME} is a folder: give another folder")


def _units_of_existing(path: Path) -> dict[str, str]:
    """Units by kind of record, of all starts of the run that are already in the log; empty when there is none."""
    units: dict[str, str] = {}
    if not path.exists() or path.stat().st_size == 0:
        return units
    with path.open("rb") as file:
        for lines in blocks_of_lines(file, path, advice="nothing was written; log to another folder"):
            for line in lines:
                if line.startswith((HEADER_START, _PROBE_START)) and (probe := parse_record(line)) is not None:
                    units[str(probe.get("writes", ""))] = str(probe["unit"])
    return units
