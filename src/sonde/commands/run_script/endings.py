"""The log of one model of a script, and what is said of it when the script ends."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import sonde
from sonde.commands.run_script.words import say
from sonde.log.lines import last_header
from sonde.log.sinks import RECORDS_NAME, SECONDS_TO_WAIT, JsonlSink

PATIENCE = 2.0
"""Seconds in which other ranks may still sum the last windows with this one. They may be gone."""


class LogOfScript(JsonlSink):
    """A log in a folder that no other model of this start of `sonde run` writes to.

    A script trains several models, and a command starts several processes that know nothing of each other. So the
    folder is looked for with the first reading: the given one, or the same with -2, -3 and so on at the end. A log of
    an earlier start gets another run. A training without a reading leaves no log: its first batch may not have fitted
    into memory, and the script begins anew with a smaller one.

    Args:
        folder: the first to try.
        start: of `sonde run`, as in the metadata of its logs.
    """

    def __init__(self, folder: Path, start: str) -> None:
        super().__init__(folder)
        self._first, self._start = folder, start
        self._held: list[Mapping[str, object]] = []
        """Records before the first reading."""
        self.folder: Path | None = None
        """Of the log; None before the first reading."""

    def write(self, record: Mapping[str, object]) -> None:
        """Append a record; the first reading takes a folder, and brings what came before it."""
        if self.folder is not None:
            super().write(record)
            return
        self._held.append(record)
        if record["kind"] == "reading":
            self.folder = self._take_folder()
            for held in self._held:
                super().write({**held, "run": self.folder.name} if held["kind"] == "header" else held)
            self._held = []

    def _take_folder(self) -> Path:
        deadline = time.monotonic() + SECONDS_TO_WAIT
        for n in itertools.count(1):
            folder = self._first if n == 1 else self._first.with_name(f"{self._first.name}-{n}")
            self.path = folder / RECORDS_NAME
            while not is_of_start(folder, self._start):
                try:
                    self.lock(patience=0.05)
                except ValueError:  # a process that has just begun its log, or one of an earlier start that is ending
                    if time.monotonic() > deadline:
                        raise
                    continue
                if not is_of_start(folder, self._start):
                    return folder
                self.unlock()  # begun and ended meanwhile
        raise AssertionError("unreachable")


def is_of_start(folder: Path, start: str) -> bool:
    """Whether the last run of a folder's log, if it has one, is of this start of `sonde run`."""
    header = last_header(folder / RECORDS_NAME)
    return header is not None and header.get("metadata", {}).get("start") == start


def say_end(verdict: Sequence[str], file: LogOfScript | None, *, writes_report: bool) -> None:
    """Say what was measured of one model, and where its log and its report lie, which is written now.

    Args:
        verdict: in lines.
        file: the log.
        writes_report: whether a report is wanted.
    """
    for line in verdict:
        say(line)
    if not verdict or file is None or (folder := file.folder) is None:
        return
    say(f"log     {folder}")
    if not writes_report:
        return
    try:
        say(f"report  {sonde.write_report(folder)}")
    except Exception as error:  # of a log without a reading, without bokeh, on a full disk
        say(f"no report was written: {error}")
