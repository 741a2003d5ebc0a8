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

import torch
from torch import nn


def callback(module: nn.Module) -> None:
    """Called before each call of a module, while any are watched. Module-level, as code in torch reaches no objects."""


def unwatched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`nn.Module.__call__` with its own code."""
    raise AssertionError("replaced in `watch`")


def _watched(self: Any, *args: Any, **kwargs: Any) -> Any:
    # Its names are those of torch's file, so what it needs is imported here.
    import torch.compiler

    from sonde.commands.run_script import first_forward

    if not torch.compiler.is_compiling():
        first_forward.callback(self)
    return first_forward.unwatched(self, *args, **kwargs)


def watch(before_call: Callable[[nn.Module], None]) -> Callable[[], None]:
    """Call a function before each call of a module. There is one such function at a time.

    Args:
        before_call: gets the module. It must not raise.

    Returns:
        A function that ends it.

    Raises:
        RuntimeError: when another tool has replaced `nn.Module.__call__` by something of another kind.
    """
    global unwatched, callback
    call: Any = nn.Module.__call__
    if not isinstance(call, types.FunctionType) or call.__closure__ is not None:
        raise RuntimeError("nn.Module.__call__ has been replaced by another tool")
    code = call.__code__
    # torch's compiler looks at every call that is made inside a compiled model, and must not look at ours.
    callback = torch.compiler.disable(before_call)
    unwatched = types.FunctionType(code, call.__globals__, call.__name__, call.__defaults__)
    own = _watched.__code__
    # In a traceback, the call on the last line of this code shows the last line of torch's, which makes the same call.
    first_line = own.co_firstlineno + _last_line(code) - _last_line(own)
    call.__code__ = own.replace(co_filename=code.co_filename, co_name=code.co_name, co_firstlineno=first_line)

    def end() -> None:
        call.__code__ = code

    return end


def _last_line(code: types.CodeType) -> int:
    return max(line for _, _, line in code.co_lines() if line is not None)
