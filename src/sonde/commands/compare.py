"""`sonde compare A B …`: several runs side by side, in the terminal and on one page. It needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import Positional, arg

from sonde.commands.branch_result import print_table
from sonde.runs.compare.side_by_side import By, read_runs
from sonde.runs.compare.words import beside_rows, run_rows, sentences, setting_rows, summary
from sonde.runs.report.page import check_bokeh


@dataclass(frozen=True)
class CompareOptions:
    """Compare up to 20 runs: noise scales, losses, norms, costs, entropies, and the settings that differ.

    Attributes:
        runs: Folders of the runs, or their records.jsonl. The others are compared with the first.
        by: What brings the runs together.
        out: File to write the page to.
    """

    runs: Positional[tuple[Path, ...]]
    by: By = "units"
    out: Annotated[Path, arg(metavar="FILE")] = Path("compare.html")


def run_compare(options: CompareOptions) -> int:
    """Print how runs differ, write the page, and print where it lies.

    Args:
        options: of the command line.

    Returns:
        The exit status.
    """
    found, console = read_runs(options.runs, by=options.by), Console(highlight=False, markup=False, soft_wrap=True)
    shown = summary(found)
    for sentence in filter(None, (shown.action, shown.headline, shown.detail)):
        console.print(sentence)
    console.print()
    for sentence in sentences(found):
        if sentence not in f"{shown.headline} {shown.detail}":
            console.print(sentence)
    for rows, n_keys in ((run_rows(found), 1), (beside_rows(found), 2), (setting_rows(found), 1)):
        print_table(rows, console, n_keys=n_keys)
    for notice in found.notices:
        console.print(f"\n{notice}.")
    try:
        check_bokeh()
    except ImportError as error:
        console.print(f"\npage  {error}, then run the command again")
        return 0
    from sonde.runs.compare.page import write_comparison

    console.print(f"\npage  {write_comparison(found, options.out)}")
    return 0


COMMAND = (CompareOptions, run_compare)
