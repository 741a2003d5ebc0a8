"""Values of a record, checked where they enter a log: a record that cannot be written would be lost unnoticed."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

SCHEMA = 4
"""Raised when the records change. A log of another schema is refused."""

SETTINGS: dict[str, type] = {
    **dict.fromkeys(("ranks", "parameters", "batch_norms", "log_every"), int),
    "level": float,
    **dict.fromkeys(("groups", "further_units", "optimizer_settings"), list),
}
"""What a report computes with in a probe's set-up, and of which kind it must be. It shows the rest as it is."""

_PYTHON_KINDS: dict[type, tuple[type, ...]] = {int: (int,), float: (int, float), list: (list, tuple)}


MOST_READINGS = 2000
"""Readings that the windows of a run would have at their last spacing. Where there would be more, it doubles."""


def spacing(every: int, window: int) -> int:
    """Windows between two readings at a window of the run.

    It depends on the window alone, so ranks agree, and a run that is resumed goes on as one that was not interrupted.

    Args:
        every: as the user gave it.
        window: its number, from 1.
    """
    while window > MOST_READINGS * every:
        every *= 2
    return every


def check_setup(setup: Mapping[str, object]) -> None:
    """Refuse a set-up that a report could not show.

    Args:
        setup: what a probe found, for people.

    Raises:
        ValueError: for a name in `SETTINGS` with a value of another kind; None is of every kind.
    """
    for name, kind in SETTINGS.items():
        value = setup.get(name)
        if not (value is None or _is_of(_PYTHON_KINDS[kind], value)):
            raise ValueError(
                f"{name!r} in a set-up must be of the kind {kind.__name__}, which reports compute with, got "
                f"{value!r:.60}: give it another name"
            )


def _is_of(kinds: tuple[type, ...], value: object) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def whole_number(what: str, value: object, remedy: str = "") -> int:
    """A whole number from 1 up, also of numpy's or torch's types.

    Args:
        what: "every must be a whole number of windows", for the message.
        value: the number.
        remedy: what follows the value in the message.

    Raises:
        ValueError: for anything else.
    """
    number = 0
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(value)  # type: ignore[arg-type]
    if number < 1:
        raise ValueError(f"{what} from 1 up, got {value!r:.60}{remedy}")
    return number


def step_number(name: str, value: object) -> int:
    """The number of an optimizer step, also of numpy's or torch's types.

    Args:
        name: of the argument, for the message.
        value: the number.

    Raises:
        ValueError: for anything but a whole number from 0 up.
    """
    number = _out_of_tensor(value)
    if isinstance(number, bool) or not isinstance(number, Integral) or not 0 <= int(number) < 2**53:
        raise ValueError(
            f"{name} must be the number of an optimizer step, got {value!r:.60}: pass a whole number from 0 up, below "
            "2**53"
        )
    return int(number)


def metric_values(metrics: Mapping[str, object]) -> dict[str, float | None]:
    """Metrics as records hold them.

    Args:
        metrics: numbers by name, also of numpy's or torch's types; None where a number is not known.

    Raises:
        ValueError: for a value of another kind.
    """
    return {name: _metric_value(name, value) for name, value in metrics.items()}


def _metric_value(name: str, value: object) -> float | None:
    if value is None:
        return None
    number = _out_of_tensor(value)
    if isinstance(number, bool) or not isinstance(number, Real):
        raise ValueError(
            f"the metric {name!r} must be a number or None, got {value!r:.60}: pass a number, or leave it out"
        )
    try:
        return json_number(float(number))
    except OverflowError:
        raise ValueError(
            f"the metric {name!r} is larger than a 64-bit number can be: pass None, or its logarithm"
        ) from None


def _out_of_tensor(value: Any) -> object:
    """The number in a tensor of one element. A tensor is known by its method: reports are read without torch too."""
    return value.item() if hasattr(value, "numel") and value.numel() == 1 else value


def known(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The metrics whose numbers are known."""
    return {name: value for name, value in metrics.items() if value is not None}


def as_json(value: Any) -> Any:
    """A value as records hold it: a dataclass by the names of its fields, a number that is not finite as None."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: as_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return json_number(value) if isinstance(value, float) else value


def json_number(value: float | None) -> float | None:
    """A number as records hold it: JSON has no NaN and no infinity, so these become None."""
    return value if value is not None and math.isfinite(value) else None
