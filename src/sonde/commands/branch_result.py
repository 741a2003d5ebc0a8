"""Prints what branches show."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from sonde.evidence.answer import Row, advice, at_half, batch_rows, headline, scale_rows
from sonde.evidence.branches import Branches
from sonde.evidence.notices import notices
from sonde.wording import count


def print_result(found: Branches, console: Console) -> None:
    """Print the critical batch size, each batch beside the reference, noise scales, and what was noticed.

    Args:
        found: branches, of which some may have failed.
        console: where to print.
    """
    console.print()
    for sentence in (headline(found), advice(found), at_half(found)):
        if sentence:
            console.print(sentence)
    console.print(f"\n{count(found.units)} {found.unit} from the checkpoint, {found.rule}, by {found.loss}")
    console.print(plain_table(batch_rows(found), right=(0, 1, 2, 3)))
    console.print()
    console.print(plain_table(scale_rows(found), right=(1, 2)))
    for sentence in notices(found):
        console.print(f"\n{sentence}")


def plain_table(rows: Iterator[Row], right: tuple[int, ...] = ()) -> Table:
    """A table without lines.

    Args:
        rows: the first is the head.
        right: columns of numbers, from 0.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for k, title in enumerate(next(rows)):
        table.add_column(title, justify="right" if k in right else "left")
    for row in rows:
        table.add_row(*row)
    return table
