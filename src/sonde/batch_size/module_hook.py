"""Hooks on modules that stay behind when the module is copied or pickled, and out of graphs that torch makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class ModuleHook:
    """A hook on a module. A copy or a pickle of the module has one in its place that does nothing.

    A pickle can thus be loaded where sonde is not installed.
    """

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        # Of all that Python's own library has, this takes any arguments and returns None.
        return getattr, (contextlib.nullcontext(), "__exit__")


def is_traced() -> bool:
    """Whether `torch.jit.trace` follows the forward that goes on."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def is_in_graph() -> bool:
    """Whether torch compiles or traces the forward that goes on: whatever a hook does would become part of it."""
    return torch.compiler.is_compiling() or is_traced()


@contextlib.contextmanager
def lifted(model: nn.Module) -> Iterator[None]:
    """Take such hooks off a model and its parts for a while: `torch.jit.script` would compile them."""
    tables = [table for m in model.modules() for table in (m._forward_hooks, m._forward_pre_hooks)]
    kept = [dict(table) for table in tables]
    for table in tables:
        for key in [key for key, hook in table.items() if _is_ours(hook)]:
            del table[key]
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.clear()
            table.update(hooks)


def _is_ours(hook: object) -> bool:
    """Whether it is such a hook, or what a copy has in its place."""
    return isinstance(hook, ModuleHook) or getattr(hook, "__func__", None) is contextlib.nullcontext.__exit__
