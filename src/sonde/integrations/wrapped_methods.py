"""Methods of a trainer that an integration replaces on the object itself, and restores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self

_MARK = "is_wrapped_by_sonde"
"""Attribute of a wrapper."""


class WrappedMethods:
    """Methods of one object, each replaced by a wrapper until `restore`, or the end of a `with` block.

    Args:
        owner: the object, or a module. An object's class stays as it is, and so do other objects.
        **wrappers: by the method's name; called with the method as it was, then with the caller's own arguments.
    """

    def __init__(self, owner: object, **wrappers: Callable[..., Any]) -> None:
        self._owner = owner
        self._own = {name: vars(owner)[name] for name in wrappers if name in vars(owner)}  # wrapped before, say
        self._wrapped = {name: _wrapped(getattr(owner, name), wrapper) for name, wrapper in wrappers.items()}
        for name, wrapped in self._wrapped.items():
            setattr(owner, name, wrapped)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Put the methods back. One that was wrapped again since keeps its newer wrapper."""
        for name, wrapped in self._wrapped.items():
            if vars(self._owner).get(name) is not wrapped:
                continue
            if name in self._own:
                setattr(self._owner, name, self._own[name])
            else:
                delattr(self._owner, name)
        self._wrapped = {}


def is_wrapped(owner: object, name: str) -> bool:
    """Whether `WrappedMethods` has replaced this method of the object, and nobody has replaced it since."""
    return hasattr(vars(owner).get(name), _MARK)


def _wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(call, _MARK, True)
    return call
