"""`sonde report RUN`: the report of a log as one HTML file. It needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from sonde.commands.as_json import alone, place, print_json, run_as_json
from sonde.runs.report.branch_page import BRANCHES_NAME
from sonde.runs.report.write import readable_run, write_report


@dataclass(frozen=True)
class ReportOptions:
    """Write the report of a run: one HTML file that opens in any browser.

    Attributes:
        run: Folder of the run, or its records.jsonl; or the folder of `sonde branch`.
        out: File to write.
        json: Print the numbers as JSON, and write no page.
    """

    run: Positional[Path]
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: report.html beside the log)")] = None
    json: Annotated[bool, FlagCreatePairsOff] = False


def run_report(options: ReportOptions) -> int:
    """Write the report, and print where it lies.

    Args:
        options: of the command line.

    Returns:
        The exit status.
    """
    if options.json:
        if (branches := options.run / BRANCHES_NAME).is_file():
            raise ValueError(f"the numbers of these branches are JSON already: read {branches}")
        run = readable_run(options.run)
        each = alone(run, run.name)
        readings = [{**place(each, reading), "metrics": reading.metrics} for reading in each.readings]
        found = {"runs": [run_as_json(each, run)], "readings": readings, "comparisons": run.comparisons}
        print_json(found | {"groups": run.readings[-1].groups if run.readings else {}})
        return 0
    print(f"report  {write_report(options.run, options.out)}")
    return 0


COMMAND = (ReportOptions, run_report)
