"""Hooks on modules that stay behind when the module is copied or pickled, and out of graphs that torch makes."""

from __future__ import annotations

import contextlib
import copyreg
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class ModuleHook:
    """A hook on a module, known by this type: see `put_on`."""


def put_on(register: Callable[..., RemovableHandle], hook: Any, **options: bool) -> RemovableHandle:
    """Put a hook on a module. A copy or a pickle of the module is without it.

    A pickle can thus be loaded where sonde is not installed, and by `torch.load`, which asks of each object in a whole
    model whether it may be loaded.

    Args:
        register: the module's method, such as `model.register_forward_hook`.
        hook: to put on.
        **options: of that method.
    """
    # Copies and pickles ask here, by type, what an object is made of; a module has no say in what it is made of.
    copyreg.pickle(OrderedDict, _without_ours)
    handle = register(hook, **options)
    # A module also keeps the numbers of hooks that take keywords, and a hook of the user's may have the same number
    # where the module is loaded.
    for table in (reference() for reference in handle.extra_dict_ref):
        if table is not None and handle.id in table:
            table[handle.id] = hook
    return handle


def _without_ours(table: OrderedDict[Any, Any]) -> tuple[Any, ...]:
    """What a copy or a pickle of any `OrderedDict` is made of: the same as ever, but for hooks of sonde."""
    made, given, state, items, pairs = cast("tuple[Any, ...]", table.__reduce__())
    return made, given, state, items, (pair for pair in pairs if not isinstance(pair[1], ModuleHook))


def is_in_graph() -> bool:
    """Whether torch compiles or traces the forward that goes on: whatever a hook does would become part of it."""
    return torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def is_compiled(layer: nn.Module) -> bool:
    """Whether torch.compile has replaced a module's calls. Hooks inside would become part of what it compiles."""
    return type(layer).__name__ == "OptimizedModule" or getattr(layer, "_compiled_call_impl", None) is not None


def takes_fast_path(module: nn.Module) -> bool:
    """Whether torch runs a module in evaluation by a kernel that gives other bits, unless a hook is on it or in it."""
    if not isinstance(module, nn.TransformerEncoderLayer):
        return False
    return bool(getattr(getattr(module, "self_attn", None), "batch_first", False))


def why_no_hook(model: nn.Module) -> str:
    """Why no hook may stay on a model, in words; empty where it may."""
    if isinstance(model, torch.jit.ScriptModule):
        return "one of torch.jit takes no hooks"
    return "a hook on an nn.TransformerEncoderLayer changes what it returns in evaluation" * takes_fast_path(model)


@contextlib.contextmanager
def lifted(model: nn.Module) -> Iterator[None]:
    """Take such hooks off a model and its parts for a while: `torch.jit.script` would compile them."""
    tables = [table for m in model.modules() for table in (m._forward_hooks, m._forward_pre_hooks)]
    before = [dict(table) for table in tables]
    for table in tables:
        for number in [n for n, hook in table.items() if isinstance(hook, ModuleHook)]:
            del table[number]
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)
