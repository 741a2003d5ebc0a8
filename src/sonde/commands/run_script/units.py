"""What `--units-from` and `--weights-from` say, as the argument `units_per_piece` of `sonde.attach`."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from sonde.batch_size.forward_units import FIRST_DIM, CountsOfForward, UnitsPerPiece
from sonde.parallel.unwrap import unwrap_model

_LEAST = 1e-6
"""Tokens of a row without any: it counts for nothing, and the rows' weights stay positive."""
_EXPECTED = "pass first-dim, a number, NAME:DIM or package.module:function"


def check_units_from(text: str) -> None:
    """Refuse what is none of the four forms.

    Raises:
        ValueError: with the four forms; for a number that cannot be one of units.
    """
    if (number := _number(text)) is not None and not 0 < number < math.inf:
        raise ValueError(f"--units-from must be a number above 0, got {text}: pass the units of a micro-batch")
    if text != "first-dim" and number is None and not re.fullmatch(r"[\w.]+:\w+", text):
        raise ValueError(f"--units-from takes what shows the units of a micro-batch, got {text!r}: {_EXPECTED}")


def units_of(text: str, weights_from: str, model: nn.Module) -> UnitsPerPiece:
    """The argument of `sonde.attach`.

    Args:
        text: of `--units-from`.
        weights_from: of `--weights-from`.
        model: that the script calls.

    Raises:
        ValueError: when the text names a function that is not there.
    """
    units = _units_of(text, model)
    is_of_transformers = any(kind.__module__.startswith("transformers.") for kind in type(unwrap_model(model)).__mro__)
    if weights_from == "equal" or (weights_from == "auto" and not is_of_transformers):
        return units

    def counts(*args: Any, **kwargs: Any) -> CountsOfForward:
        own = units(*args, **kwargs) if callable(units) else units
        if weights_from == "units":
            return CountsOfForward(own, weight=None)
        if weights_from == "auto" and kwargs.get("num_items_in_batch") is None:
            return CountsOfForward(own)  # the model divides by the tokens of the step only when it is told their number
        labels = _argument("labels", model, args, kwargs, "--weights-from labels")
        tokens = labels[..., 1:].ne(-100).flatten(1).sum(1)  # each label is predicted by the token before
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
    units = _units_of(text, None)
    return (lambda batch: units(**batch)) if callable(units) else (lambda batch: units)


def _units_of(text: str, model: nn.Module | None) -> UnitsPerPiece:
    if text == "first-dim":
        return "first dim"
    if (number := _number(text)) is not None:
        return number
    name, _, last = text.partition(":")
    if not last.isdigit():
        return _function(name, last)

    def size(*args: Any, **kwargs: Any) -> int:
        return _argument(name, model, args, kwargs, f"--units-from {text}").shape[int(last)]

    return size


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _argument(name: str, model: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any], option: str) -> Tensor:
    """A tensor by its name in the arguments of the model's forward, or in a batch, which an option needs."""
    given = kwargs
    if name not in kwargs and model is not None:
        given = inspect.signature(unwrap_model(model).forward).bind_partial(*args).arguments
    if not isinstance(value := given.get(name), Tensor):
        raise ValueError(f"the model is called without a tensor {name!r}, which {option} needs")
    return value


def _function(module: str, name: str) -> Callable[..., Any]:
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--units-from {module}:{name} cannot be found ({error}): {_EXPECTED}") from error
    return function
