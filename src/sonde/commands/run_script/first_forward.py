"""Notices the first calls of modules, before they run, by a change to `nn.Module.__call__` that lasts until then.

A global forward hook would do the same, but `torch.compile` warns about such hooks and compiles what they do. A
replaced `nn.Module.__call__` would stay behind in every compiled module, and torch's compiler compares its identity.
So the function stays, and its code is exchanged for a while. The compiler leaves this code alone, since it names the
same file as the code that it stands for.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import nn

_callback: Callable[[nn.Module], None] | None = None
"""Module-level, since code that stands in for other code reaches no object of ours."""


def unwatched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`nn.Module.__call__` with its own code."""
    raise AssertionError("replaced in `watch`")


def before(module: nn.Module) -> None:
    """Called before each call of a module."""
    if _callback is not None:
        _callback(module)


def _watched(self: Any, *args: Any, **kwargs: Any) -> Any:
    # Its names are those of torch's file, so what it needs is imported here.
    import torch

    from sonde.commands.run_script import first_forward

    if not torch.compiler.is_compiling():
        first_forward.before(self)
    return first_forward.unwatched(self, *args, **kwargs)


def watch(callback: Callable[[nn.Module], None]) -> Callable[[], None]:
    """Call a function before each call of a module. There is one such function at a time.

    Args:
        callback: gets the module. It must not raise.

    Returns:
        A function that ends it; a second call of it does nothing.

    Raises:
        RuntimeError: when another tool has replaced `nn.Module.__call__` by something of another kind.
    """
    global unwatched, _callback
    call: Any = nn.Module.__call__
    if not isinstance(call, types.FunctionType) or call.__closure__ is not None:
        raise RuntimeError("nn.Module.__call__ has been replaced by another tool")
    code, _callback = call.__code__, callback
    unwatched = types.FunctionType(code, call.__globals__, call.__name__, call.__defaults__)
    call.__code__ = _watched.__code__.replace(co_filename=code.co_filename, co_name=code.co_name)

    def end() -> None:
        global _callback
        if _callback is callback:
            _callback, call.__code__ = None, code

    return end
