"""One check of `sonde doctor`: a row of its table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

REPORT_IT = "if the rows above are ok, report it with this table"


@dataclass(frozen=True)
class Check:
    """What a check has found.

    Attributes:
        name: of what was checked.
        state: "not there" is what this machine lacks and the rest of sonde does without.
        found: in words.
        advice: what to do; empty where nothing is to be done.
    """

    name: str
    state: Literal["ok", "warning", "fails", "not there"]
    found: str
    advice: str = ""


def checked(name: str, check: Callable[[], Check]) -> Check:
    """The result of a check. Whatever it raises is its result too.

    Args:
        name: of the row, if the check raises.
        check: returns the row.
    """
    try:
        return check()
    except Exception as error:
        text = next(iter(str(error).splitlines()), "")
        found, _, advice = text.rpartition(": ")  # sonde's own errors end with what to do
        if found and isinstance(error, ValueError):
            return Check(name, "fails", found, advice)
        return Check(name, "fails", f"{type(error).__name__}: {text}", REPORT_IT)
