"""The units that pieces are counted in: the independent sample first, and others that only say the same batch again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import Tensor

T = TypeVar("T", float, "float | Tensor", "float | Sequence[float]")

_FURTHER_NAME = re.compile(r"(?!(low|high|average)(_|$))[A-Za-z0-9_]+")
"""The name of a further unit becomes the end of names of metrics, where gns/b_simple_low has another meaning."""


def unit_names(unit: object) -> tuple[str, ...]:
    """The names of the units: the independent sample, then further ones.

    Args:
        unit: one name, or several.

    Raises:
        ValueError: when one of them is empty or no text, occurs twice, or could not be a part of a metric's name; when
            the independent sample is a token.
    """
    names = (unit,) if isinstance(unit, str) else tuple(unit) if isinstance(unit, Sequence) else ()
    if not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise ValueError(
            f"unit must name the independent sample, got {unit!r}: use 'sequences', 'images' or 'prompts', or several, "
            "the independent sample first: ('sequences', 'tokens')"
        )
    if names[0].strip().lower() in ("token", "tokens"):
        raise ValueError(
            f"unit must name the independent sample, got {names[0]!r}, and the tokens of one sequence depend on each "
            "other: name the sequences, 'sequences', or count pieces in both, unit=('sequences', 'tokens') with "
            "piece(units={'sequences': 8, 'tokens': 4096})"
        )
    if wrong := next((name for name in names[1:] if not _FURTHER_NAME.fullmatch(name)), None):
        raise ValueError(
            f"a further unit's name may hold letters, digits and '_', and be neither 'low', 'high' nor 'average', got "
            f"{wrong!r}: rename it"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"each unit must have a name of its own, got {unit!r}")
    return names


def counted_in(names: Sequence[str], units: T | Mapping[str, T] | None) -> tuple[T | None, tuple[T, ...]]:
    """A piece's count in the first unit, None if it is not given, and in each of the further ones.

    Args:
        names: of all units, the first one first.
        units: a number, or one for each name. With several units, the first may be left out, as `unit_weights` has it.

    Raises:
        ValueError: when units are missing or unknown.
    """
    first, *further = names
    if not isinstance(units, Mapping):
        if not further:
            return units, ()
        raise ValueError(f"units must be counted in each of {', '.join(names)}, got {units!r:.60}: {_example(names)}")
    if set(units) - set(names) or not set(further) <= set(units):
        raise ValueError(
            f"units must be counted in {', '.join(names)}, got {', '.join(map(str, units))}: {_example(names)}"
        )
    return units.get(first), tuple(units[name] for name in further)


def _example(names: Sequence[str]) -> str:
    counts = ", ".join(f"{name!r}: …" for name in names)
    return f"pass {{{counts}}}"
