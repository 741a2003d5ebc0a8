"""`sonde report RUN`: the report of a log as one HTML file. It needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from sonde.runs.report.write import write_report


@dataclass(frozen=True)
class ReportOptions:
    """Write the report of a run: one HTML file that opens in any browser.

    Attributes:
        run: Folder of the run, or its records.jsonl; or the folder of `sonde branch`.
        out: File to write.
    """

    run: Positional[Path]
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: report.html beside the log)")] = None


def run_report(options: ReportOptions) -> int:
    """Write the report, and print where it lies.

    Args:
        options: of the command line.

    Returns:
        The exit status.
    """
    print(f"report  {write_report(options.run, options.out)}")
    return 0


COMMAND = (ReportOptions, run_report)
