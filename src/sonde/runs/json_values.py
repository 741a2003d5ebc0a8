"""Values of a record; a value of another kind than the schema says is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast, get_args

from sonde.record_values import SETUP_KINDS
from sonde.stats.intervals import Status

LARGEST_EXACT = 2**53
"""Larger whole numbers are not all exact as floats."""

_STATUSES = get_args(Status)


def as_mapping(value: object) -> Mapping[str, Any]:
    """An object.

    Raises:
        TypeError: when the value is of another kind. The functions below raise the same.
    """
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.40} where an object is expected")
    return value


def as_list(value: object) -> list[Any]:
    """An array."""
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.40} where an array is expected")
    return value


def as_count(value: object) -> int:
    """A whole number from 0 up that is exact as a float too, as a figure draws it."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < LARGEST_EXACT:
        raise TypeError(f"{value!r:.40} where a count is expected")
    return value


def as_number(value: object) -> float | None:
    """A finite number, or None for null."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"{value!r:.40} where a finite number or null is expected")
    return float(value)


def as_time(value: object) -> float:
    """Seconds since 1970, before the year 9999."""
    seconds = as_number(value)
    if seconds is None or not 0 <= seconds < 250e9:
        raise TypeError(f"{value!r:.40} where a time is expected")
    return seconds


def as_numbers(value: object) -> dict[str, float | None]:
    """An object of finite numbers and nulls."""
    return {name: as_number(each) for name, each in as_mapping(value).items()}


def as_text(value: object) -> str:
    """A text."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} where a text is expected")
    return value


def as_setup(value: object) -> Mapping[str, Any]:
    """How a probe measured. A report computes with some of it, and shows the rest as it is."""
    setup = as_mapping(value)
    for name, kind in SETUP_KINDS.items():
        if setup.get(name) is not None:
            _check(_AS_KIND[kind], setup[name], f"for {name!r} in its set-up")
    return setup


def as_descriptions(value: object) -> Mapping[str, Mapping[str, str]]:
    """The unit and the meaning of each metric."""
    described = as_mapping(value)
    for name, metric in described.items():
        for key in ("unit", "meaning"):
            _check(as_text, as_mapping(metric).get(key), f"for the {key} of the metric {name!r:.60}")
    return described


def as_pieces(value: object) -> Mapping[str, Any]:
    """How a window was cut into pieces."""
    pieces = as_mapping(value)
    if pieces.get("per_window") is not None:
        _check(as_count, pieces["per_window"], "for the pieces of a window")
    return pieces


def _check(as_kind: Callable[[object], object], value: object, what_for: str) -> None:
    try:
        as_kind(value)
    except TypeError as error:
        raise TypeError(f"{error}, {what_for}") from None


_AS_KIND: dict[type, Callable[[object], object]] = {int: as_count, float: as_number, list: as_list}


def as_status(status: object) -> Status:
    """How far a noise scale is known."""
    if status not in _STATUSES:
        raise TypeError(f"the status {status!r:.40}, which is none of {', '.join(_STATUSES)}")
    return cast(Status, status)
