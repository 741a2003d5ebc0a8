"""What is loaded is checked first: a damaged or foreign state is refused by name, before any of it is taken."""

from __future__ import annotations

import sys
from collections.abc import Mapping


def check_keys(what: str, got: object, expected: set[str]) -> None:
    """Refuse what is not a mapping with exactly the expected keys.

    Raises:
        ValueError: naming what is unknown and what is missing.
    """
    if not isinstance(got, Mapping):
        raise ValueError(f"{what} must be a mapping, got {got!r:.60}: is it damaged?")
    unknown, missing = sorted(set(got) - expected), sorted(expected - set(got))
    if unknown or missing:
        raise ValueError(f"{what}: unknown keys {unknown}, missing keys {missing}: was it written by another version?")


def check_number(what: str, got: Mapping[str, object], name: str, *, low: float | None = None) -> None:
    """Refuse an entry that is not a finite number of at least `low`.

    Raises:
        ValueError: naming it.
    """
    value = got[name]
    if not _is_finite(value) or (low is not None and value < low):  # type: ignore[operator]
        bound = "" if low is None else f" of at least {low:g}"
        raise ValueError(f"{what}: {name!r} must be a finite number{bound}, got {value!r:.60}: is it damaged?")


def check_count(what: str, got: Mapping[str, object], name: str) -> None:
    """Refuse an entry that is not a whole number from 0 up, of 64 bits.

    Raises:
        ValueError: naming it.
    """
    value = got[name]
    if not isinstance(value, int) or not _is_finite(value) or not 0 <= value < 2**63:
        raise ValueError(f"{what}: {name!r} must be a whole number from 0 up, got {value!r:.60}: is it damaged?")


def _is_finite(value: object) -> bool:
    # JSON may hold a whole number that is too large for a float, so the number is compared and not converted.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
