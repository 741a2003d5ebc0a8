"""Lines of a log, read a block at a time: neither a long log nor a file without line breaks fills the memory."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

LONGEST_LINE = 16 * 2**20
"""Bytes. A longer line is neither written nor read."""

_CHUNK = 2**20

HEADER_START = b'{"kind":"header"'
_FRESH = re.compile(rb'^\{"kind":"fresh"', re.MULTILINE)


def blocks_of_lines(file: BinaryIO, path: Path, *, advice: str) -> Iterator[list[bytes]]:
    """The lines of a run's log without their line breaks, about a megabyte at a time.

    Args:
        file: open at its beginning.
        path: its name, for messages.
        advice: what to do if it is not a run's log.

    Raises:
        ValueError: when the file does not begin like a log, or holds a line of more than `LONGEST_LINE` bytes.
    """
    rest, n_lines = b"", 0
    while chunk := file.read(_CHUNK):
        lines = (rest + chunk).split(b"\n")
        if n_lines == 0 and not begins_header(lines[0]):
            raise ValueError(
                f"{path} is not a run's log: expected a header record first, got {lines[0][:40]!r}: {advice}"
            )
        rest = lines.pop()
        n_lines += len(lines)
        if len(rest) > LONGEST_LINE:
            raise ValueError(
                f"line {n_lines + 1} of {path} is longer than {LONGEST_LINE >> 20} MiB, which no record is: "
                "was the file damaged, or written by another program?"
            )
        if lines:
            yield lines
    if rest:
        yield [rest]
    elif n_lines == 0:
        raise ValueError(f"{path} is not a run's log: expected a header record first, got an empty file: {advice}")


def begins_header(line: bytes) -> bool:
    """Whether a line is a header as `JsonlSink` writes it, or the torn beginning of one.

    Args:
        line: without its line break.
    """
    return line.startswith(HEADER_START) or (line != b"" and HEADER_START.startswith(line))


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


def parse_block(lines: list[bytes]) -> list[dict[str, Any] | None]:
    """The JSON object on each line; None for each torn line.

    A call of the parser costs as much as a short line, so all lines of a sound block are parsed by one call.
    """
    try:
        records = _STRICT.decode(f"[{b','.join(lines).decode()}]")
    except (ValueError, RecursionError):
        records = []
    # Lines that are not an object each may still join to sound JSON, but rarely to as many objects as there are lines.
    if len(records) == len(lines) and all(type(record) is dict for record in records):
        return records  # type: ignore[no-any-return]
    return [parse_record(line) for line in lines]


def last_header(path: Path) -> dict[str, Any] | None:
    """The header of a log's last start; None where there is no log yet, or only a torn header.

    Raises:
        ValueError: when the file is not a run's log.
    """
    if not path.exists() or path.stat().st_size == 0:
        return None
    last = None
    with path.open("rb") as file:
        for line in chain.from_iterable(blocks_of_lines(file, path, advice="log to another folder")):
            if line.startswith(HEADER_START):
                last = parse_record(line)
    return last


@dataclass(frozen=True)
class LastRun:
    """Where the last run of a log begins, and how many lines and runs come before."""

    first_byte: int = 0
    lines_before: int = 0
    runs_before: int = 0


def last_run(path: Path) -> LastRun:
    """Find the last run of a log: it begins with the header before the last `fresh` record."""
    if path.stat().st_size == 0:
        return LastRun()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as log:
        fresh = [found.start() for found in _FRESH.finditer(log)]
        if len(fresh) < 2:
            return LastRun()
        first_byte = log.rfind(HEADER_START, 0, fresh[-1])
        return LastRun(first_byte, log[:first_byte].count(b"\n"), len(fresh) - 1)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_STRICT = json.JSONDecoder(parse_constant=_refuse)
"""Refuses NaN and infinities, so that a NaN in an array of numbers can only be a null."""
