"""Dataclasses of options, filled from a mapping or a YAML file."""

from __future__ import annotations

import contextlib
import difflib
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

T = TypeVar("T")


def read_yaml(path: Path, example: str) -> dict[str, Any]:
    """The mapping that a YAML file holds; an empty file holds an empty one.

    Args:
        path: the file.
        example: a line of such a file, for messages.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when it is not YAML, or not a mapping.
    """
    import yaml  # here, since most users of sonde never need it

    if not path.is_file():
        raise FileNotFoundError(f"no config file at {path}: give a YAML file with options such as {example!r}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must map options to values, got a {type(content).__name__}: write lines such as {example!r}"
        )
    return content


def options_from(kind: type[T], given: Mapping[Any, Any], where: object, *, without: tuple[str, ...] = ()) -> T:
    """A dataclass with the given values, and its defaults for the others.

    Args:
        kind: the dataclass. A field can be given if it is a number, text, path, switch or choice, or None. A list can
            be given where the field takes one kind of these or a sequence of it.
        given: values by option name, with `_` or `-`.
        where: the place where they were found, for messages.
        without: fields that cannot be given here.

    Raises:
        ValueError: for an option that does not exist, naming the nearest one, for one that takes functions or objects,
            or a value of another kind.
    """
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    known = [name for name in names if name not in without and _plain_kinds(hints[name])]
    for key in given:
        if (name := str(key).replace("-", "_")) in set(names).difference(known, without):
            raise ValueError(
                f"{where} holds {name!r}, whose values are functions or objects of Python: leave it out there, and "
                f"pass {name}= in code"
            )
    values = {known_name(key, known, where): value for key, value in given.items()}
    return kind(**{name: _value(name, hints[name], value, where) for name, value in values.items()})


def known_name(key: object, known: list[str], where: object) -> str:
    """The option that a key names.

    Raises:
        ValueError: when there is none, naming the nearest.
    """
    name = str(key).replace("-", "_")
    if name not in known:
        nearest = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        meant = f"did you mean {nearest[0]!r}?" if nearest else f"the options are {', '.join(known)}"
        raise ValueError(f"{where} holds an unknown option {str(key)!r}: {meant}")
    return name


def _value(name: str, hint: Any, value: object, where: object) -> object:
    if value is None and type(None) in get_args(hint):
        return None
    takes_several = any(get_origin(kind) is Sequence for kind in get_args(hint))
    kinds = _plain_kinds(hint)
    for kind in kinds:
        with contextlib.suppress(TypeError, ValueError):
            if takes_several and isinstance(value, list):
                return tuple(_converted(kind, each) for each in value)
            return _converted(kind, value)
    expected = " or ".join(map(_in_words, kinds))
    raise ValueError(f"{name} in {where} must be {expected}, got {value!r}: change that line")


def _in_words(kind: Any) -> str:
    if is_dataclass(kind):
        return f"a mapping of {', '.join(field.name for field in fields(kind))}"
    return f"one of {', '.join(map(str, get_args(kind)))}" if get_origin(kind) is Literal else _CALLED[kind]


def _plain_kinds(hint: Any) -> list[Any]:
    """The kinds of value among those of a type hint that a file can hold: no functions, no objects of torch."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return [kind for kind in kinds if get_origin(kind) is Literal or kind in _CALLED or is_dataclass(kind)]


def _converted(hint: Any, value: Any) -> object:
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError
        return value
    if hint is float and not isinstance(value, bool):
        return float(value)  # from text too: YAML 1.1 reads 1e-3 as text
    if hint is Path:
        return Path(value)
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise TypeError
        return options_from(hint, value, hint.__name__)  # type: ignore[arg-type, union-attr]
    if hint is torch.dtype:
        if not isinstance(dtype := getattr(torch, str(value).removeprefix("torch."), None), torch.dtype):
            raise ValueError
        return dtype
    if type(value) is not hint:  # True is an int to isinstance
        raise TypeError
    return value


_CALLED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    torch.dtype: "a dtype such as float32",
}
