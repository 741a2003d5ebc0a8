"""Graphs that exist only in tests: they record the work of a CPU, and do it again in the same memory when replayed.

As a CUDA graph does, a replay runs no Python of the user's and no hook, and writes its results to where they lay when
it was recorded. `torch.cuda.make_graphed_callables` runs on them as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedGraph:
    """Calls of operators, with the tensors that they took and returned."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Any, Any, list[Tensor | None]]] = []

    def record(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note one call. What it returned in the memory of its arguments is written by the call itself."""
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        made = [None if t.untyped_storage().data_ptr() in given else t for t in _tensors(result)]
        self._calls.append((function, args, kwargs, made))

    @torch.no_grad()
    def replay(self) -> None:
        """Do all of it again."""
        for function, args, kwargs, made in self._calls:
            for old, new in zip(made, _tensors(function(*args, **kwargs)), strict=True):
                if old is not None:
                    old.copy_(new)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class Recorder(TorchDispatchMode):
    """While it is entered, what the CPU does is recorded."""

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._graph.record(function, args, kwargs or {}, result)
        return result


@contextlib.contextmanager
def cuda_graphs_on_cpu() -> Iterator[None]:
    """Inside, `torch.cuda`'s functions for graphs record what the CPU does."""
    none = contextlib.nullcontext
    stand_ins: dict[str, Any] = {
        "CUDAGraph": RecordedGraph,
        "graph": lambda graph, **_: Recorder(graph),
        "synchronize": lambda: None,
        "Stream": lambda *_: None,
        "stream": lambda _: none(),
    }
    with contextlib.ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        stack.enter_context(mock.patch.object(torch.cuda.graphs, "graph_pool_handle", return_value=(0, 0)))
        yield
