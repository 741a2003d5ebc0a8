"""Lines of readings as `JsonlSink` writes them, read into arrays many lines at once.

A reading's line begins with its numbers, and most lines hold nothing else (see `sonde.runs.columns`):

    {"kind":"reading","window":20,"time":1790000106.2,"values":[193.1,null]}

So the numbers of many lines are one text with commas, which the JSON parser reads at once. Lines that look different in
any way are parsed one by one, which says what is wrong with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sonde.runs.json_values import LARGEST_EXACT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

READING_START = b'{"kind":"reading","window":'

_TIME, _VALUES, _GROUPS = b',"time":', b',"values":[', b',"groups":['
_OF_NUMBERS = b"0123456789+-.e,nul"
"""All bytes of numbers, nulls and the commas between them."""
_READ_ELSEWHERE = {"kind", "window", "time", "values", "groups"}


@dataclass(frozen=True)
class ReadingRows:
    """The content of some lines.

    Attributes:
        windows: optimizer steps.
        times: in seconds since 1970.
        values: finite numbers, NaN for null; [lines, columns].
        more: what a line holds beside numbers and groups, by its index.
        groups: the groups of a line as JSON, by its index. Only the last ones of a log are shown, so they are not
            parsed here.
    """

    windows: list[int]
    times: list[float]
    values: Floats
    more: dict[int, dict[str, Any]]
    groups: dict[int, bytes]


def read_rows(lines: Sequence[bytes], n_columns: int) -> ReadingRows | None:
    """Read lines that begin with `READING_START`.

    Args:
        lines: whole lines without their line breaks.
        n_columns: how many values each has; at least one.

    Returns:
        None if a line is not as `JsonlSink` writes it.
    """
    import numpy as np  # comes with bokeh, which draws the figures; reading a log in full needs neither

    places, _, rests = zip(*[line.partition(_VALUES) for line in lines], strict=True)
    values, _, ends = zip(*[rest.partition(b"]") for rest in rests], strict=True)
    if {value.count(b",") for value in values} != {n_columns - 1}:
        return None
    more, groups = dict[int, dict[str, Any]](), dict[int, bytes]()
    try:
        for i, end in enumerate(ends):
            if end != b"}":
                more[i], written = _beside_numbers(end)
                if written is not None:
                    groups[i] = written
        if groups:
            json.loads(groups[max(groups)])  # a crash may have torn the last line within its groups
        windows, times = _windows_and_times(places)
        numbers: Floats = np.array(_numbers(b",".join(values)), dtype=np.float64).reshape(len(lines), n_columns)
    except (ValueError, OverflowError):  # a whole number too large for 64 bits overflows
        return None
    if (numbers == math.inf).any() or (numbers == -math.inf).any():
        return None
    return ReadingRows(windows, times, numbers, more, groups)


def _beside_numbers(end: bytes) -> tuple[dict[str, Any], bytes | None]:
    """What follows the values of a line, and its groups as JSON.

    Raises:
        ValueError: if this is not as `JsonlSink` writes it.
    """
    first, found, groups = end.partition(_GROUPS)
    if found:
        if not groups.endswith(b"]}") or b"{" in groups:
            raise ValueError
        first, end_of_groups = first + b"}", b"[" + groups[:-1]
    record: dict[str, Any] = {}
    if first != b"}":
        if not first.startswith(b","):
            raise ValueError
        record = json.loads(b"{" + first[1:])
    if _READ_ELSEWHERE & record.keys():
        raise ValueError
    return record, end_of_groups if found else None


def _windows_and_times(places: Sequence[bytes]) -> tuple[list[int], list[float]]:
    text = b"".join(places)
    if text.count(_TIME) != len(places):
        raise ValueError
    numbers = _numbers(text.replace(READING_START, b",").replace(_TIME, b",")[1:])
    windows, times = numbers[::2], numbers[1::2]
    if len(windows) != len(places) or not all(type(window) is int for window in windows):
        raise ValueError
    if not 0 <= min(windows) <= max(windows) < LARGEST_EXACT or not all(0 <= time < 250e9 for time in times):
        raise ValueError
    return windows, [float(time) for time in times]


def _numbers(text: bytes) -> list[Any]:
    """Numbers and nulls between commas; NaN for null. The JSON parser alone knows what is a number.

    Raises:
        ValueError: if there is anything else.
    """
    if text.translate(None, _OF_NUMBERS):
        raise ValueError
    numbers: list[Any] = json.loads(b"[" + text.replace(b"null", b"NaN") + b"]")
    return numbers
