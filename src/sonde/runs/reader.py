"""Reads a run's log back, up to the last whole line, and says where a crash tore it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from sonde.runs.contents import ANY_ORDER, Contents
from sonde.runs.lines import LastRun, begins_header, blocks_of_lines, last_run, parse_block
from sonde.runs.run import Alert, Header, MetricsReading, ProbeSetup, Reading, Run, Totals
from sonde.runs.sinks import RECORDS_NAME
from sonde.runs.windows import WindowContents, WindowReading

__all__ = [
    "Alert",
    "Header",
    "MetricsReading",
    "ProbeSetup",
    "Reading",
    "Run",
    "Totals",
    "WindowReading",
    "find_records",
    "read_run",
    "read_windows",
]

_STUB = b'{"kind":"unwanted"}'


def read_run(path: str | Path, *, thinned: bool = False) -> Run:
    """Read the last run of a log, whether it has ended, is being written, or was cut off.

    Args:
        path: the run's folder, or the `.jsonl` file itself.
        thinned: keep only the readings that a figure of about 1,000 pixels can show: for each pixel the first, the
            last, and those with the lowest and the highest value of each metric. Memory then depends on the figure, not
            on the length of the run, but for the readings of a policy: its verdict needs all of them, and only the
            parts of single prompts are left out. Damage in content that no figure shows, such as the groups of earlier
            readings, may go unnoticed.

    Returns:
        A `Run`. A line that a crash tore is left out, and `torn` says so: it is the last line, or a restart's header
        follows it. Kinds of record that this version does not know are skipped.

    Raises:
        FileNotFoundError: when there is no such folder or no log in it.
        ValueError: when the file is not a run's log, was written by a newer sonde, or is damaged other than by a crash.
    """
    file = find_records(path)
    last = last_run(file)
    contents = Contents(file, thinned=thinned)
    torn = _read_into(contents, file, last)
    return replace(contents.run(torn), earlier_runs=last.runs_before)


def read_windows(path: str | Path) -> Iterator[WindowReading]:
    """The windows of a log's last run (`RunLog(log_windows=True)`), one after the other, in little memory.

    Args:
        path: the run's folder, or the `.jsonl` file itself.

    Raises:
        FileNotFoundError: when there is no such folder or no log in it.
        ValueError: when the file is not a run's log, was written by a newer sonde, or is damaged other than by a crash.

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
    contents = WindowContents(file)
    for _ in _blocks_read_into(contents, file, last_run(file)):
        yield from contents.take()


def _read_into(contents: Contents, file: Path, last: LastRun) -> str | None:
    """Read the whole run. Returns which lines are torn, in words."""
    with _without_cycle_collector():
        torn = [words for found in _blocks_read_into(contents, file, last) for words in found]
    return "; ".join(torn) or None


@contextmanager
def _without_cycle_collector() -> Iterator[None]:
    """Each line makes a few objects and no cycles; looking for cycles among them took more time than all the rest."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _blocks_read_into(contents: Contents | WindowContents, file: Path, last: LastRun) -> Iterator[list[str]]:
    """Read the last run a block of lines at a time. Yields for each block which lines are torn, in words."""
    number = last.lines_before
    torn: tuple[int, bytes] | None = None  # a torn line whose next line was not read yet, with its number
    in_any_order = (*ANY_ORDER, contents.UNWANTED)
    with file.open("rb") as opened:
        opened.seek(last.first_byte)
        for block in blocks_of_lines(opened, file, advice="give a folder that sonde wrote"):
            found: list[str] = []
            for are_many, some in groupby(block, key=lambda line: line.startswith(in_any_order)):
                lines = list(some)
                first, number = number + 1, number + len(lines)
                if are_many and torn is None and contents.add_lines(lines, first):
                    continue
                records = _parsed(lines, contents.UNWANTED)
                if torn is None and None not in records:
                    contents.add([record for record in records if record is not None], first)
                    continue
                for at, (line, record) in enumerate(zip(lines, records, strict=True), first):
                    if torn is not None:
                        found.append(_torn_within(file, torn, line))
                        torn = None
                    if record is None:
                        torn = (at, line)
                    else:
                        contents.add([record], at)
            yield found
    if torn is not None:
        yield [f"line {torn[0]}, the last one, is cut off in the middle: the {torn[0] - 1} before it were read"]


def _parsed(lines: list[bytes], unwanted: bytes) -> list[dict[str, Any] | None]:
    """The record on each line; a stub for a line that is not wanted, if it is whole; None for a torn line."""
    return parse_block([_STUB if line.startswith(unwanted) and line.endswith(b"}") else line for line in lines])


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
