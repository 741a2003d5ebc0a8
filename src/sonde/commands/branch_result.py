"""Prints what branches show."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segments
from rich.table import Table

from sonde.decision.decide import decide
from sonde.decision.facts import Facts
from sonde.decision.law import Range
from sonde.evidence.answer import Row, advice, at_half, batch_rows, headline, scale_rows
from sonde.evidence.branches import Branches
from sonde.evidence.notices import notices
from sonde.record_values import as_json
from sonde.stats.intervals import unresolved
from sonde.version import __version__
from sonde.wording import count

_GAP = 3
"""Blanks between columns."""


def print_result(found: Branches, console: Console) -> None:
    """Print the critical batch size, each batch beside the reference, noise scales, and what was noticed.

    Args:
        found: branches, of which some may have failed.
        console: where to print.
    """
    console.print()
    for sentence in _words(found).values():
        console.print(sentence)
    console.print(f"\n{count(found.units)} {found.unit} from the checkpoint, {found.rule}, by {found.loss}")
    print_table(batch_rows(found), console, right=(0, 1, 2, 3))
    print_table(scale_rows(found), console, right=(1, 2))
    for sentence in notices(found):
        console.print(f"\n{sentence}")


def _words(found: Branches) -> dict[str, str]:
    """What the branches show, in sentences, and what to do with the reference's batch from there on."""
    words = {"critical": headline(found), "advice": advice(found), "at_half": at_half(found)}
    law = found.law_critical
    if law.low is not None and law.high is not None and not found.unverified:
        critical = Range(law.ratio, law.low, law.high)
        words["decision"] = decide(Facts(found.unit, found.reference, unresolved(""), branched=critical)).sentence
    return {name: sentence for name, sentence in words.items() if sentence}


def result_of_all(found: Branches) -> dict[str, Any]:
    """What `print_result` prints, with all numbers: `branches.json`, and what follows from it."""
    return found.as_json() | {
        "critical": found.critical,
        "law_critical": found.law_critical,
        "ratios": found.ratios,
        "words": _words(found),
        "notices": notices(found),
    }


def print_json(found: Mapping[str, Any]) -> None:
    """Print one object on one line, with the version of sonde. JSON has no infinity and no NaN: they become null."""
    sys.stdout.write(json.dumps({"sonde": __version__, **as_json(found)}, ensure_ascii=False) + "\n")


def print_table(rows: Iterable[Row], console: Console, *, right: Collection[int] = (), n_keys: int = 1) -> None:
    """Print a blank line and a table without lines. No number in it is ever cut.

    Columns that the terminal has no room for follow below, in a table with the same first columns. Text that is wider
    than the terminal continues on the next line. In a file, lines are as long as they need to be.

    Args:
        rows: the first is the head.
        console: where to print.
        right: columns of numbers, from 0.
        n_keys: first columns, which name a row.
    """
    head, *others = rows
    columns = zip(head, *others, strict=True)
    widths = [_GAP + max(cell_len(line) for cell in column for line in cell.split("\n")) for column in columns]
    room, at = console.width if console.is_terminal else sum(widths), n_keys
    while at < len(head):
        used = itertools.accumulate(widths[at:], initial=sum(widths[:n_keys]) - _GAP)
        end = at + max(sum(width <= room for width in used) - 1, 1)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        for k in (shown := [*range(n_keys), *range(at, end)]):
            table.add_column(head[k], justify="right" if k in right else "left", no_wrap=k < n_keys, overflow="fold")
        for row in others:
            table.add_row(*(row[k] for k in shown))
        console.print()
        console.print(Segments(console.render(table, console.options.update(width=room))), crop=False)
        at = end
