"""Tables of the report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of plain text; a user's words among them are not escaped yet.

    Attributes:
        caption: what is listed.
        columns: their heads. The first is text, the others are numbers.
        rows: as many texts each.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
