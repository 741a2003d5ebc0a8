"""`sonde compare A B …`: several runs side by side, in the terminal and on one page. It needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, Positional, arg

from sonde.commands.as_json import decided, run_as_json
from sonde.commands.branch_result import print_json, print_table
from sonde.runs.compare.side_by_side import AXES, By, Comparison, read_runs
from sonde.runs.compare.words import beside_rows, decision, lowest, reached_rows, run_rows, setting_rows, summary
from sonde.runs.report.page import write_page


@dataclass(frozen=True)
class CompareOptions:
    """Compare up to 20 runs: losses at equal units, steps and time, noise scales, costs, and settings that differ.

    Attributes:
        runs: Folders of the runs, or their records.jsonl. The others are compared with the first.
        by: What brings the runs together.
        out: File to write the page to.
        any_model: Also compare runs of different models.
        json: Print JSON, and write no page.
    """

    runs: Positional[tuple[Path, ...]]
    by: By = "units"
    out: Annotated[Path, arg(metavar="FILE")] = Path("compare.html")
    any_model: Annotated[bool, FlagCreatePairsOff] = False
    json: Annotated[bool, FlagCreatePairsOff] = False


def run_compare(options: CompareOptions) -> int:
    """Print how runs differ, write the page, and print where it lies.

    Args:
        options: of the command line.

    Returns:
        The exit status.
    """
    found = read_runs(options.runs, by=options.by, any_model=options.any_model)
    if options.json:
        print_json(_as_json(found))
        return 0
    console = Console(highlight=False, markup=False, soft_wrap=True)
    shown = summary(found)
    for sentence in filter(None, (shown.action, shown.headline, shown.detail)):
        console.print(sentence)
    for line in shown.commands:
        console.print(f"Next: {line}")
    for rows, n_keys in ((run_rows, 1), (beside_rows, 2), (reached_rows, 1), (setting_rows, 1)):
        if (table := [*rows(found)])[1:]:
            print_table(table, console, n_keys=n_keys)
    for notice in found.notices:
        console.print(f"\n{notice}.")
    try:
        console.print(f"\npage  {write_page(options.out, lambda: _page(found))}")
    except ImportError as error:
        console.print(f"\npage  {error}, then run the command again")
    return 0


def _page(found: Comparison) -> str:
    from sonde.runs.compare.page import comparison_page  # it needs Bokeh

    return comparison_page(found)


def _as_json(found: Comparison) -> dict[str, Any]:
    """Each run, and what the tables say of them. What cannot be compared is None."""
    first, *others = found.runs
    pairs = [(name, run) for name in found.values for run in others]
    reached = {run.letter: found.to_common_loss(run) for run in found.runs}
    return {
        "runs": [{"letter": run.letter, **run_as_json(run, run.run)} for run in found.runs],
        **decided(lambda: decision(found)),
        "by": found.by,
        "lowest": {by: best and best[0].letter for by in AXES for best in [lowest(found, by)]},
        "differences": [
            {"run": run.letter, "minus": first.letter, "name": name}
            | {by: found.beside(run, first, name, by) for by in AXES}
            for name, run in pairs
        ],
        "common_loss": found.loss and {"name": found.loss, "value": found.common_loss, "reached": reached},
        "notices": found.notices,
    }


COMMAND = (CompareOptions, run_compare)
