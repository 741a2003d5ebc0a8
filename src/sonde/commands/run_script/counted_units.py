"""What `--units-from` says, as the argument `units_per_piece` of `sonde.attach`."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from sonde.batch_size.forward_units import UnitsPerPiece
from sonde.parallel.unwrap import unwrap_model

FIRST_DIM_OPTION = "first-dim"
_EXPECTED = "pass first-dim, a number, NAME:DIM or package.module:function"


def check_units_from(text: str) -> None:
    """Refuse what is none of the four forms.

    Raises:
        ValueError: with the four forms.
    """
    if text != FIRST_DIM_OPTION and _number(text) is None and not re.fullmatch(r"[\w.]+:\w+", text):
        raise ValueError(f"--units-from takes what shows the units of a micro-batch, got {text!r}: {_EXPECTED}")


def units_of(text: str, model: nn.Module) -> UnitsPerPiece:
    """The argument of `sonde.attach`.

    Args:
        text: of the option.
        model: that the script calls.

    Raises:
        ValueError: when the text is of no known form, or names a function that is not there.
    """
    check_units_from(text)
    if text == FIRST_DIM_OPTION:
        return "first dim"
    if (number := _number(text)) is not None:
        return number
    name, _, last = text.partition(":")
    return _size_of(name, int(last), model) if last.isdigit() else _function(name, last)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _size_of(name: str, dim: int, model: nn.Module) -> Callable[..., int]:
    """A function that finds an argument of the model by its name, and returns the size of one of its dims."""
    signature = inspect.signature(unwrap_model(model).forward)

    def size(*args: Any, **kwargs: Any) -> int:
        arguments = kwargs if name in kwargs else signature.bind_partial(*args, **kwargs).arguments
        if not isinstance(value := arguments.get(name), Tensor):
            raise ValueError(f"the model was called without a tensor {name!r}: check --units-from {name}:{dim}")
        return value.shape[dim]

    return size


def _function(module: str, name: str) -> Callable[..., Any]:
    try:
        return cast("Callable[..., Any]", getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--units-from {module}:{name} cannot be found ({error}): {_EXPECTED}") from error
