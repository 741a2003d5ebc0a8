"""What demos share on the screen: a console that lasts, the folder they write to, and their last words."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from sonde.runs.report.write import write_report

PANEL_WIDTH = 88


class LastingConsole(Console):
    """A console that falls silent when nobody reads on (`sonde demo | head`), where rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Called by rich; what is written from now on, at exit too, goes nowhere."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def choose_folder(out: Path | None) -> Path:
    """Where log and report go: what was asked for, or a new folder named after the time.

    Raises:
        FileExistsError: when there is something in it.
    """
    if out is None:
        return Path("sonde-demo") / time.strftime("%Y%m%d-%H%M%S")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "a folder that is not empty" if out.is_dir() else "a file"
        raise FileExistsError(f"log and report go to a new or empty folder, got {out}, {what}: choose another --out")
    return out


def verdict_panel(headline: str, detail: str, *, style: str, width: int) -> Panel:
    """A judgement in a frame.

    Args:
        headline: one sentence; an interval in it stays on one line.
        detail: what follows.
        style: of the frame.
        width: of the screen, in characters.
    """
    return Panel(
        Text.assemble((headline.replace(" – ", "–"), "bold"), "\n\n", detail),
        title="verdict",
        title_align="left",
        border_style=style,
        width=min(width, PANEL_WIDTH),
        padding=(1, 2),
    )


def leave_report(log: Path, folder: Path, console: Console) -> None:
    """Write a run's report, and say where it and the log lie."""
    console.print(f"log     {log}", soft_wrap=True)
    try:
        report = write_report(folder)
    except ImportError as error:
        console.print(f"report  {error}, then run: sonde report {folder}", markup=False, soft_wrap=True)
    else:
        console.print(f"report  {report}  (open it in a browser)", soft_wrap=True)
        console.print(f"        sonde report {folder}  writes it again", soft_wrap=True)
