"""Older spellings that still work for one release, with a warning that shows the present one."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from sonde.call_site import stack_level

T = TypeVar("T")


def with_deprecated(call: str, options: T | None, kind: type[T], given: Mapping[str, Any]) -> T:
    """The options of a call. Its older spelling gave them one by one, as keywords.

    Args:
        call: name of the function, for messages.
        options: as the call gives them now; None for the defaults.
        kind: the dataclass.
        given: keywords of the older spelling.

    Raises:
        TypeError: for a keyword that is no option, naming the nearest.
    """
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    refuse_unknown(call, [name for name in given if name not in known], known)
    if given:
        words = ", ".join(f"{name}={value!r:.60}" for name, value in given.items())
        warn_deprecated(f"{call}(…, {words})", f"{call}(…, sonde.{kind.__name__}({words}))")
    return replace(kind() if options is None else options, **given)  # type: ignore[type-var]


def refuse_unknown(call: str, unknown: Iterable[str], known: Sequence[str]) -> None:
    """Refuse keywords that a call does not know.

    Raises:
        TypeError: for the first of them, naming the nearest that is known.
    """
    for name in unknown:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"it takes {', '.join(known)}"
        raise TypeError(f"{call}() has no argument {name!r}: {hint}")


def warn_deprecated(old: str, new: str) -> None:
    """Warn, where the user called sonde, that a spelling will go with the next release."""
    warnings.warn(f"{old} will go with the next release: write {new}", DeprecationWarning, stacklevel=stack_level())
