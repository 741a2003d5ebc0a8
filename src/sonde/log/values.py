"""Reads dataclasses from the JSON of a record, each field by its type. A value of another kind is a TypeError."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, Literal, NewType, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
Moment = NewType("Moment", float)
"""Seconds since 1970."""
_LARGEST_EXACT = 2**53
"""Larger whole numbers are not all exact as floats."""
_YEAR_9999 = 250e9


def filled(kind: type[T], record: Mapping[str, Any], **given: Any) -> T:
    """A dataclass from the values of a record by the names of its fields.

    Args:
        kind: of dataclass. What a field with a default has may be missing.
        record: the values.
        **given: fields that are not in the record.

    Raises:
        KeyError: when a value is missing.
        TypeError: when a value is of another kind.
    """
    of: Any = kind
    for name, read, is_needed in _fields(of):
        if name not in given and (is_needed or name in record):
            given[name] = read(record[name])
    return kind(**given)


@functools.cache
def _fields(kind: Any) -> list[tuple[str, Callable[[Any], Any], bool]]:
    hints = get_type_hints(kind)
    return [
        (each.name, read_as(hints[each.name]), each.default is MISSING and each.default_factory is MISSING)
        for each in fields(kind)
    ]


@functools.cache
def read_as(kind: Any) -> Callable[[Any], Any]:
    """What reads a value of a type: of a plain one, of a dataclass, or of a mapping, a tuple or a choice of these."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin is None:
        return _row(kind) if issubclass(kind, tuple) else lambda value: filled(kind, mapping(value))
    if origin is Literal:
        return lambda value: _one_of(value, args)
    read_each = read_as(args[1] if origin is Mapping else args[0])
    if origin is UnionType:
        return lambda value: None if value is None else read_each(value)
    if origin is tuple:
        return lambda value: tuple(map(read_each, _of(list, value, "an array")))
    # Each line brings the same names: interned, they are held once.
    return lambda value: {sys.intern(name): read_each(each) for name, each in mapping(value).items()}


def _row(kind: Any) -> Callable[[Any], Any]:
    """A named tuple: an array with the values of its fields, in order."""
    reads = [read_as(hint) for hint in get_type_hints(kind).values()]

    def row(value: Any) -> Any:
        if len(_of(list, value, "an array")) != len(reads):
            raise TypeError(f"{value!r:.40} where an array of {len(reads)} is expected")
        return kind(*(read(each) for read, each in zip(reads, value, strict=True)))

    return row


def _of(kind: type[T], value: object, expected: str) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r:.40} where {expected} is expected")
    return value


def _one_of(value: object, choices: tuple[Any, ...]) -> Any:
    if value not in choices:
        raise TypeError(f"{value!r:.40} where one of {', '.join(choices)} is expected")
    return value


def mapping(value: object) -> dict[str, Any]:
    """A JSON object."""
    return _of(dict, value, "an object")


def count(value: object) -> int:
    """A whole number from 0 up that is exact as a float too, as a figure draws it."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST_EXACT:
        raise TypeError(f"{value!r:.40} where a count is expected")
    return value


def number(value: object) -> float | None:
    """A finite number; None where it is not known."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"{value!r:.40} where a finite number or null is expected")
    return float(value)


def _moment(value: object) -> float:
    seconds = number(value)
    if seconds is None or not 0 <= seconds < _YEAR_9999:
        raise TypeError(f"{value!r:.40} where a time is expected")
    return seconds


_PLAIN: dict[Any, Callable[[Any], Any]] = {
    Any: lambda value: value,
    bool: lambda value: _of(bool, value, "true or false"),
    int: count,
    str: lambda value: _of(str, value, "a text"),
    int | str: lambda value: _of(str, value, "a text"),  # of a prompt that has a number where it is measured
    float | None: number,
    float: lambda value: math.nan if value is None else number(value),  # JSON has no NaN
    Moment: _moment,
}
