"""What is left to do when a script ends: where its log and its report lie."""

from __future__ import annotations

from pathlib import Path

import sonde
from sonde.commands.run_script.messages import say

PATIENCE = 2.0
"""Seconds in which other ranks may still sum the last windows with this one. They may be gone."""


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
