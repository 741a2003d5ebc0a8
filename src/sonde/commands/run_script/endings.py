"""What is left to do when a script ends: its reading, its log and its report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import sonde
from sonde.commands.run_script.messages import say
from sonde.runs.sinks import JsonlSink

PATIENCE = 2.0
"""Seconds in which other ranks may still sum the last windows with this one. They may be gone."""


class LogOfScript(JsonlSink):
    """A log that calls a function when SIGTERM is about to end the process. No exit handler runs then.

    Args:
        folder: of the log.
        before_the_end: called in place of writing the report, which it may write.
    """

    def __init__(self, folder: Path, before_the_end: Callable[[], None]) -> None:
        super().__init__(folder)
        self._before_the_end = before_the_end

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
