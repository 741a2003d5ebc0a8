"""The most memory that tensors made inside a block of code held at any time."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Watches every operator: the storages that it makes, until nothing holds them any more.

    Attributes:
        peak: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {StorageWeakRef(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = function(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and (reference := StorageWeakRef(t.untyped_storage())) not in given:
                self._alive[reference] = t.untyped_storage().nbytes()
        self._alive = {reference: n for reference, n in self._alive.items() if not reference.expired()}
        self.peak = max(self.peak, sum(self._alive.values()))
        return result
