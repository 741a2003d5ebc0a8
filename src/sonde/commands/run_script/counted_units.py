"""What `--units-from` says, as the argument `units_per_piece` of `sonde.attach`."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn

from sonde.batch_size.forward_units import FIRST_DIM, CountsOfForward, UnitsPerPiece
from sonde.parallel.unwrap import unwrap_model

FIRST_DIM_OPTION = "first-dim"
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
    if text != FIRST_DIM_OPTION and _number(text) is None and not re.fullmatch(r"[\w.]+:\w+", text):
        raise ValueError(f"--units-from takes what shows the units of a micro-batch, got {text!r}: {_EXPECTED}")


def units_of(text: str, weights_from: str, model: nn.Module) -> UnitsPerPiece:
    """The argument of `sonde.attach`.

    Args:
        text: of `--units-from`.
        weights_from: of `--weights-from`.
        model: that the script calls.

    Raises:
        ValueError: when the text is of no known form, or names a function that is not there.
    """
    units = _units_of(text, model)
    if weights_from == "units":
        return _weighed_by_units(units)
    if weights_from == "labels":
        return _weighed(units, model, always=True)
    is_of_transformers = any(kind.__module__.startswith("transformers.") for kind in type(unwrap_model(model)).__mro__)
    return _weighed(units, model, always=False) if weights_from == "auto" and is_of_transformers else units


def units_in_batch(text: str) -> Callable[[Mapping[str, Any]], Any] | None:
    """`--units-from` for a trainer, whose batches are dictionaries: a function of a batch; None for first-dim.

    Args:
        text: of the option.

    Raises:
        ValueError: when the text is of no known form, or names a function that is not there.
    """
    check_units_from(text)
    if text == FIRST_DIM_OPTION:  # the trainer's own batches show more than rows: packed documents, pairs
        return None
    if (number := _number(text)) is not None:
        return lambda batch: number
    name, _, last = text.partition(":")
    if last.isdigit():
        return lambda batch: batch[name].shape[int(last)]
    function = _function(name, last)
    return lambda batch: function(**batch)


def _units_of(text: str, model: nn.Module) -> UnitsPerPiece:
    check_units_from(text)
    if text == FIRST_DIM_OPTION:
        return "first dim"
    if (number := _number(text)) is not None:
        return number
    name, _, last = text.partition(":")
    if not last.isdigit():
        return _function(name, last)
    argument = _argument(name, model, f"--units-from {text}")
    return lambda *args, **kwargs: argument(args, kwargs).shape[int(last)]


def _weighed_by_units(units: UnitsPerPiece) -> Callable[..., CountsOfForward]:
    """Units, by which micro-batches weigh: for a loss that is added up over them, and divided by those of the step."""

    def counts(*args: Any, **kwargs: Any) -> CountsOfForward:
        return CountsOfForward(units(*args, **kwargs) if callable(units) else units, None)

    return counts


def _weighed(units: UnitsPerPiece, model: nn.Module, *, always: bool) -> Callable[..., CountsOfForward]:
    """Units with weights: the labels that are not -100, after the shift by which each predicts the next.

    Args:
        units: as without weights.
        model: that the script calls.
        always: whether all micro-batches are weighed. Otherwise those alone whose loss the model divides by the tokens
            of the whole step, as models of transformers do when they are called with their number.
    """
    labels = _argument("labels", model, "--weights-from labels")

    def counts(*args: Any, **kwargs: Any) -> CountsOfForward:
        own = units(*args, **kwargs) if callable(units) else units
        if not always and kwargs.get("num_items_in_batch") is None:
            return CountsOfForward(own)
        tokens = labels(args, kwargs)[..., 1:].ne(-100).flatten(1).sum(1)
        return CountsOfForward(own, tokens.sum(), tokens.clamp(min=_LEAST) if own == FIRST_DIM else None)

    return counts


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _argument(name: str, model: nn.Module, option: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Tensor]:
    """A function that finds a tensor by its name in the arguments of the model's forward."""
    signature = inspect.signature(unwrap_model(model).forward)

    def find(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        given = kwargs if name in kwargs else signature.bind_partial(*args, **kwargs).arguments
        if not isinstance(value := given.get(name), Tensor):
            raise ValueError(f"the model is called without a tensor {name!r}, which {option} needs")
        return value

    return find


def _function(module: str, name: str) -> Callable[..., Any]:
    try:
        return cast("Callable[..., Any]", getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--units-from {module}:{name} cannot be found ({error}): {_EXPECTED}") from error
