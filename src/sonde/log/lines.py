"""Lines of a log, one JSON object each. They are read one at a time: a file without line breaks fills no memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST_LINE = 16 * 2**20
"""Bytes. A longer line is neither written nor read."""

_HEADER_START = b'{"kind":"header"'


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


def lines_of(path: Path, *, advice: str) -> Iterator[bytes]:
    """The lines of a run's log without their line breaks.

    Args:
        path: the log.
        advice: what to do if it is not a run's log, for the message.

    Raises:
        ValueError: when the file does not begin like a log, or holds a line of more than `LONGEST_LINE` bytes.
    """
    number = 0
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if number == 1 and not begins_header(line.removesuffix(b"\n")):
                raise ValueError(
                    f"{path} is not a run's log: expected a header record first, got {line[:40]!r}: {advice}"
                )
            if len(line) > LONGEST_LINE:
                raise ValueError(
                    f"line {number} of {path} is longer than {LONGEST_LINE >> 20} MiB, which no record is: "
                    "was the file damaged, or written by another program?"
                )
            yield line.removesuffix(b"\n")
    if number == 0:
        raise ValueError(f"{path} is not a run's log: expected a header record first, got an empty file: {advice}")


def begins_header(line: bytes) -> bool:
    """Whether a line is a header, or the torn beginning of one as `JsonlSink` writes it.

    Args:
        line: without its line break.
    """
    is_torn = line != b"" and (line.startswith(_HEADER_START) or _HEADER_START.startswith(line))
    return is_torn or record_of_kind(line, "header") is not None


def record_of_kind(line: bytes, *kinds: str) -> dict[str, Any] | None:
    """The record on a line if it is of one of these kinds, whatever program has written it, with or without spaces.

    To parse each line of a long log takes seconds. A line that does not hold the name of a kind is not parsed.
    """
    if not any(f'"{kind}"'.encode() in line for kind in kinds):
        return None
    record = parse_record(line)
    return record if record is not None and record.get("kind") in kinds else None


def parse_record(line: bytes) -> dict[str, Any] | None:
    """The JSON object on one line; None for a torn line, since an object is whole only with its last brace."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def last_header(path: Path) -> dict[str, Any] | None:
    """The header of a log's last start; None where there is no log yet, or only a torn header.

    Raises:
        ValueError: when the file is not a run's log.
    """
    if not path.exists() or path.stat().st_size == 0:
        return None
    last = None
    for line in lines_of(path, advice="log to another folder"):
        last = record_of_kind(line, "header") or last
    return last


@dataclass(frozen=True)
class LastRun:
    """Where the last run of a log begins.

    Attributes:
        lines_before: lines of earlier runs.
        runs_before: how many earlier runs there are.
    """

    lines_before: int
    runs_before: int


def last_run(path: Path, *, advice: str) -> LastRun:
    """Find the last run of a log: it begins with the header before the last `fresh` record.

    Raises:
        ValueError: as `lines_of`.
    """
    header = first = n_fresh = 0
    for number, line in enumerate(lines_of(path, advice=advice)):
        if (record := record_of_kind(line, "header", "fresh")) is None:
            continue
        if record["kind"] == "header":
            header = number
        else:
            first = header if n_fresh else 0  # starts before the first `fresh` record are of the first run
            n_fresh += 1
    return LastRun(first, max(n_fresh - 1, 0))
