"""What `--units-from` says, as the argument `units_per_piece` of `sonde.attach`."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn

from sonde.batch_size.forward_units import FIRST_DIM, CountsOfForward, UnitsPerPiece
from sonde.parallel.unwrap import unwrap_model

_LEAST = 1e-6
"""Tokens of a row without any: it counts for nothing, and the rows' weights stay positive."""
_EXPECTED = "pass first-dim, a number or package.module:function"


def check_units_from(text: str) -> None:
    """Refuse what is none of the three forms.

    Raises:
        ValueError: with the three forms; for a number that cannot be one of units.
    """
    if (number := _number(text)) is not None and not 0 < number < math.inf:
        raise ValueError(f"--units-from must be a number above 0, got {text}: pass the units of a micro-batch")
    if text != "first-dim" and number is None and not re.fullmatch(r"[\w.]+:\w+", text):
        raise ValueError(f"--units-from takes what shows the units of a micro-batch, got {text!r}: {_EXPECTED}")


def units_of(text: str, model: nn.Module) -> UnitsPerPiece:
    """The argument of `sonde.attach`.

    A model of transformers that is told the tokens of the whole step divides its loss by them, so its micro-batches
    weigh by their own tokens.

    Args:
        text: of `--units-from`.
        model: that the script calls.

    Raises:
        ValueError: when the text names a function that is not there.
    """
    units = _units_of(text)
    if not any(kind.__module__.startswith("transformers.") for kind in type(unwrap_model(model)).__mro__):
        return units

    def counts(*args: Any, **kwargs: Any) -> Any:
        own = units(*args, **kwargs) if callable(units) else units
        if kwargs.get("num_items_in_batch") is None or isinstance(own, CountsOfForward):
            return own
        if "labels" not in kwargs:
            raise ValueError("the model is told the tokens of the step, but no labels by name")
        tokens = kwargs["labels"][..., 1:].ne(-100).flatten(1).sum(1)  # each label is predicted by the token before
        return CountsOfForward(own, tokens.sum(), tokens.clamp(min=_LEAST) if own == FIRST_DIM else None)

    return counts


def units_in_batch(text: str) -> Callable[[Mapping[str, Any]], Any] | None:
    """`--units-from` for a trainer, whose batches are dictionaries: a function of a batch; None for first-dim.

    Args:
        text: of the option.

    Raises:
        ValueError: when the text names a function that is not there.
    """
    if text == "first-dim":  # the trainer's own batches show more than rows: packed documents, pairs
        return None
    units = _units_of(text)
    return (lambda batch: units(**batch)) if callable(units) else (lambda batch: units)


def _units_of(text: str) -> UnitsPerPiece:
    if text == "first-dim":
        return "first dim"
    if (number := _number(text)) is not None:
        return number
    module, _, name = text.partition(":")
    try:
        return cast("Callable[..., Any]", getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--units-from {text} cannot be found ({error}): {_EXPECTED}") from error


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
