"""Hooks on modules that stay behind when the module is copied or pickled, and out of graphs that torch makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch


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
