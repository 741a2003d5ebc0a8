"""Terminal output that the demos share: the console, the output folder, the verdict, the paths at the end."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from sonde.runs.report.write import write_report

PANEL_WIDTH = 88
INTERRUPTED = 128 + signal.SIGINT
"""The exit status that shells expect after Ctrl-C."""


class LastingConsole(Console):
    """A console that goes silent when its reader is gone (`sonde demo | head`). rich would end the process."""

    def on_broken_pipe(self) -> None:
        """rich calls this. All later output is discarded, also the output at exit."""
        self.quiet = True
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)


def choose_folder(out: Path | None) -> Path:
    """The folder for the log and the report: the folder that the user chose, or a new folder named after the time.

    Raises:
        FileExistsError: when the folder is not empty.
    """
    if out is None:
        return Path("sonde-demo") / time.strftime("%Y%m%d-%H%M%S")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        kind = "a folder that is not empty" if out.is_dir() else "a file"
        raise FileExistsError(f"log and report go to a new or empty folder, got {out}, {kind}: choose another --out")
    return out


def verdict_panel(headline: str, detail: str, *, style: str, width: int) -> Panel:
    """A verdict in a frame.

    Args:
        headline: one sentence. An interval in it stays on one line.
        detail: what follows from the verdict, or what it rests on.
        style: style of the frame.
        width: width of the screen, in characters.
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
    """Write the report of a run, and print where the log and the report are."""
    console.print(f"log     {log}", soft_wrap=True)
    try:
        report = write_report(folder)
    except ImportError as error:
        console.print(f"report  {error}, then run: sonde report {folder}", markup=False, soft_wrap=True)
    else:
        console.print(f"report  {report}  (open it in a browser)", soft_wrap=True)
        console.print(f"        sonde report {folder}  writes it again", soft_wrap=True)
