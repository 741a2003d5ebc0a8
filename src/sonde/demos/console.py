"""Terminal output that the demos share: the console, the output folder, the verdict, the paths at the end."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from sonde.runs.report.verdicts import verdict_panels
from sonde.runs.report.write import write_report
from sonde.runs.run import Run

PANEL_WIDTH = 88
INTERRUPTED = 128 + signal.SIGINT
"""The exit status that shells expect after Ctrl-C."""
_STYLES = {"keep": "green", "holds": "green", "wait": "cyan", "unknown": "cyan", "collapses": "red"}
"""Colours of the frame of a verdict; yellow for all others."""


def check_ranges(options: Any, *counts: str) -> None:
    """Refuse options of a demo out of their range.

    Args:
        options: with a `seed` and a `learning_rate`.
        *counts: names of options that are at least 1, or None.

    Raises:
        ValueError: naming the option.
    """
    for name in counts:
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}: give a whole number from 1 up")
    if not 0 <= options.seed < 2**31:
        raise ValueError(f"seed must be at least 0 and less than 2³¹, got {options.seed}: choose another seed")
    if not 0 < options.learning_rate < math.inf:
        raise ValueError(f"learning_rate must be positive and finite, got {options.learning_rate}: try 0.001")


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


def conclude(run: Run, console: Console) -> None:
    """Print the verdict on a run that has ended, write its report, and print where the log and the report are.

    Args:
        run: as its log has it.
        console: where to print.
    """
    if not (run.readings or run.policy):
        console.print(f"Nothing was measured. The log is {run.path}.", soft_wrap=True)
        return
    panel = verdict_panels(run)[-1]
    text = Text.assemble(
        (panel.action.replace(" – ", "–"), "bold"), "\n\n", panel.headline
    )  # an interval stays on one line
    style, width = _STYLES.get(panel.kind, "yellow"), min(console.width, PANEL_WIDTH)
    console.print()
    console.print(Panel(text, title="verdict", title_align="left", border_style=style, width=width, padding=(1, 2)))
    console.print(f"log     {run.path}", soft_wrap=True)
    folder = run.path.parent
    try:
        console.print(f"report  {write_report(folder)}  (open it in a browser)", soft_wrap=True)
        console.print(f"        sonde report {folder}  writes it again", soft_wrap=True)
    except ImportError as error:
        console.print(f"report  {error}, then run: sonde report {folder}", markup=False, soft_wrap=True)
