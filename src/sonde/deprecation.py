"""Older spellings that still work for one release, with a warning that shows the present one."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from inspect import Parameter, signature
from typing import Any, TypeVar

from sonde.call_site import stack_level

T = TypeVar("T")


def with_deprecated(call: Callable[..., Any], options: T | None, kind: type[T], given: Mapping[str, Any]) -> T:
    """The options of a call. Its older spelling gave them one by one, as keywords.

    Args:
        call: the function or class that is called.
        options: as the call gives them now; None for the defaults.
        kind: the dataclass.
        given: keywords of the older spelling.

    Raises:
        ValueError: for options of another kind.
        TypeError: for a keyword that is no option, naming the nearest.
    """
    if options is not None and not isinstance(options, kind):
        raise ValueError(
            f"{call.__name__} takes its options as one object, got {options!r:.60}: write sonde.{kind.__name__}(…)"
        )
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    refuse_unknown(call, [name for name in given if name not in known], known)
    if given:
        words = ", ".join(f"{name}={value!r:.60}" for name, value in given.items())
        warn_deprecated(f"{call.__name__}(…, {words})", f"{call.__name__}(…, sonde.{kind.__name__}({words}))")
    return kind(**given) if options is None else replace(options, **given)  # type: ignore[type-var]


def refuse_unknown(call: Callable[..., Any], unknown: Iterable[str], options: Iterable[str] = ()) -> None:
    """Refuse keywords that a call does not know.

    Args:
        call: the function or class that is called.
        unknown: keywords that nothing has taken.
        options: names that it knows beside those of its signature.

    Raises:
        TypeError: for the first of them, naming the nearest that is known.
    """
    named = [p.name for p in signature(call).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    names = [name for name in named if name != "self"]
    known = list(dict.fromkeys([*names, *options]))
    for name in unknown:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"it takes {', '.join(known)}"
        raise TypeError(f"{call.__name__}() has no argument {name!r}: {hint}")


def warn_deprecated(old: str, new: str) -> None:
    """Warn, at the line of the user that called sonde, about a spelling that goes with the next release."""
    message = f"{old} is deprecated and will be removed in the next release: write {new}"
    warnings.warn(message, DeprecationWarning, stacklevel=stack_level())
