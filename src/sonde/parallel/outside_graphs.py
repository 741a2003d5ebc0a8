"""Functions that a compiled step calls between its graphs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """The function, never traced by torch.compile: around a call of it, the graph breaks.

    `torch.compiler.disable` alone would do. It imports the compiler, which takes longer than to import torch.
    """
    untraced: list[Callable[P, T]] = []

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not untraced:
            untraced.append(torch.compiler.disable(function))
        return untraced[0](*args, **kwargs)

    return called
