"""Names of several runs that differ, as a list of them needs, however narrow the terminal is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from sonde.log.sinks import RECORDS_NAME
from sonde.runs.run import Run
from sonde.wording import shorten


def names_apart(runs: Sequence[Run]) -> list[str]:
    """A name for each run. Where two have one name, each gets the shortest part of its path that tells it apart.

    That part takes the place of a name that comes from the folder, and stands before a name that the user gave.

    Args:
        runs: all that are shown together.
    """
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    parts = _parts_apart([_place(run.path) for run in runs])
    return [f"{part}: {run.name}" if run.header.run else part for part, run in zip(parts, runs, strict=True)]


def _place(log: Path) -> tuple[str, ...]:
    log = log.resolve()
    return (log.parent if log.name == RECORDS_NAME else log).parts


def _parts_apart(places: Sequence[tuple[str, ...]]) -> list[str]:
    """What is left of paths without the folders at both ends that all of them share. One folder is always left."""
    n_first = _n_shared(places)
    rests = [place[n_first:] for place in places]
    n_last = _n_shared([rest[::-1] for rest in rests])
    return ["/".join(rest[: len(rest) - n_last]) for rest in rests]


def _n_shared(places: Sequence[Sequence[str]]) -> int:
    """Folders, or characters, that all begin with; one of each is not counted."""
    n = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*places, strict=False)))
    return min([n, *(len(place) - 1 for place in places)])


def shorten_apart(names: Sequence[str], longest: int) -> list[str]:
    """Names that fit, and that differ where the whole names do: the beginning that all share is left out first.

    Args:
        names: of all runs that are shown together.
        longest: characters of a name. Names that cannot be told apart in so few stay as long as they are.

    Example:
        >>> shorten_apart(["sweep-of-rates-1e-3", "sweep-of-rates-3e-3"], 9)
        ['swee…1e-3', 'swee…3e-3']
    """
    n_shared = _n_shared(names)
    for texts in (names, [f"…{name[n_shared:]}" for name in names]):
        short = [shorten(text, longest) for text in texts]
        if len(set(short)) == len(set(names)):
            return short
    return list(names)
