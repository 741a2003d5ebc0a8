"""Options of the demo from a YAML file."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import yaml

from sonde.demos.byte_lm.options import DemoOptions, Device


def read_options(path: Path) -> DemoOptions:
    """The options that a YAML file gives, and the defaults of the others.

    Args:
        path: a mapping of option names, with `_` or `-`, to values.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when it is not such a mapping, or names an option that does not exist or a value of another kind.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no config file at {path}: give a YAML file with options such as 'steps: 100'")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return DemoOptions()
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must map options to values, got a {type(content).__name__}: write lines such as 'steps: 100'"
        )
    known = [field.name for field in fields(DemoOptions) if field.name != "config"]
    given = {_known_name(path, key, known): value for key, value in content.items()}
    return replace(DemoOptions(), **{name: _value(path, name, value) for name, value in given.items()})


def _known_name(path: Path, key: object, known: list[str]) -> str:
    name = str(key).replace("-", "_")
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        meant = f"did you mean {nearest[0]!r}?" if nearest else f"the options are {', '.join(known)}"
        raise ValueError(f"{path} holds an unknown option {str(key)!r}: {meant}")
    return name


def _value(path: Path, name: str, value: object) -> Any:
    expected, convert = _KINDS.get(name, ("a whole number", _whole_number))
    try:
        return convert(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} in {path} must be {expected}, got {value!r}: change that line") from error


def _whole_number(value: Any) -> int:
    if type(value) is not int:  # True is an int to isinstance
        raise TypeError
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)  # from text too: YAML 1.1 reads 1e-3 as text


def _device(value: Any) -> str:
    if value not in get_args(Device):
        raise ValueError
    return str(value)


_KINDS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "learning_rate": ("a number", _number),
    "horizon": ("a number", _number),
    "device": (f"one of {', '.join(get_args(Device))}", _device),
    "out": ("a path", Path),
}
"""What each option takes, and its value from YAML's; every other option takes a whole number."""
