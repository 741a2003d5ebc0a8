"""Every way to damage one entry of a saved state's contents."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

BAD: tuple[Any, ...] = (
    None, True, "1", "", [], {}, [1.0], -1, -0.5, 0, 1, 0.5, 1e300, 10**400, math.nan, math.inf,
)  # fmt: skip
"""What an entry is exchanged for; JSON can hold all of these."""
_REMOVED, _DOUBLED = object(), object()
_ENTRIES_OF_A_LIST = 2
"""Of longer lists, whose entries are alike, so many are damaged."""


def damaged(contents: dict[str, Any], bad_values: Sequence[Any] = BAD) -> Iterator[tuple[str, Any]]:
    """Each entry, however deep, exchanged for each bad value, removed, or with a stranger beside it.

    Yields:
        The path of the entry, and the contents with the damage.
    """
    for path in _places(contents):
        for bad in (*bad_values, _REMOVED, _DOUBLED):
            changed = place = copy.deepcopy(contents)
            for name in path[:-1]:
                place = place[name]
            last = path[-1]
            if bad is _REMOVED:
                del place[last]
            elif bad is _DOUBLED and isinstance(place, dict):
                place[f"{last}s"] = place[last]
            elif bad is _DOUBLED:
                place.insert(last, place[last])
            elif type(place[last]) is type(bad) and place[last] == bad:
                continue
            else:
                place[last] = bad
            yield "/".join("#" if isinstance(name, int) else name for name in path), changed


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else list(enumerate(value))[:_ENTRIES_OF_A_LIST]
    for name, entry in inner:
        yield (*path, name)
        if isinstance(entry, (dict, list)):
            yield from _places(entry, (*path, name))
