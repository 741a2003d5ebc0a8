"""The log of one model of a script, and what is left to do when the script ends."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import sonde
from sonde.commands.run_script.messages import say
from sonde.runs.lines import last_header
from sonde.runs.locked_file import SECONDS_TO_WAIT
from sonde.runs.sinks import RECORDS_NAME, JsonlSink

PATIENCE = 2.0
"""Seconds in which other ranks may still sum the last windows with this one. They may be gone."""


class LogOfScript(JsonlSink):
    """A log in a folder that no other model of this start of `sonde run` writes to.

    A script trains several models, and a command starts several processes that know nothing of each other. So the
    folder is looked for with the first record: the given one, or the same with -2, -3 and so on at the end. A log of an
    earlier start is continued.

    Args:
        folder: the first to try.
        start: of `sonde run`, as in the metadata of its logs.
        before_the_end: called when SIGTERM is about to end the process, where no exit handler runs; in place of writing
            the report, which it may write.
    """

    def __init__(self, folder: Path, start: str, before_the_end: Callable[[], None]) -> None:
        super().__init__(folder)
        self._first, self._start, self._before_the_end = folder, start, before_the_end
        self._has_folder = False

    @property
    def folder(self) -> Path:
        """Of the log."""
        return self.path.parent

    def write(self, record: Mapping[str, object]) -> None:
        """Append a record; the first one takes a folder."""
        if not self._has_folder:
            self._take_folder()
        if record["kind"] == "header":
            record = {**record, "run": self.folder.name}
        super().write(record)

    def _take_folder(self) -> None:
        deadline = time.monotonic() + SECONDS_TO_WAIT
        for n in itertools.count(1):
            folder = self._first if n == 1 else self._first.with_name(f"{self._first.name}-{n}")
            self.path = folder / RECORDS_NAME
            while not self._is_of_this_start():
                try:
                    self.lock(patience=0.0)
                except ValueError:  # a process that has just begun its log, or one of an earlier start that is ending
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
                    continue
                if self._is_of_this_start():  # begun and ended meanwhile
                    self.unlock()
                    break
                self._has_folder = True
                return

    def _is_of_this_start(self) -> bool:
        header = last_header(self.path)
        return header is not None and header.get("metadata", {}).get("start") == self._start

    def write_report(self) -> None:
        """Let the script's log be ended; the file is unlocked first, as by other logs."""
        self.unlock()
        self._before_the_end()


def say_where(folder: Path, *, writes_report: bool) -> None:
    """Write the report, and say where it and the log lie.

    Args:
        folder: of the log.
        writes_report: whether a report is wanted.
    """
    say(f"log     {folder}")
    if not writes_report:
        return
    try:
        say(f"report  {sonde.write_report(folder)}")
    except Exception as error:  # of a log without a reading, without bokeh, on a full disk
        say(f"no report was written: {error}")
