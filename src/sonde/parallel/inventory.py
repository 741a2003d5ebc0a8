"""A model's parameters by name, as they are now."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence

from torch import nn


class Inventory:
    """A model's parameters by name, looked up again only if modules or parameters were added, removed or replaced."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._named: dict[str, nn.Parameter] = {}
        self._seen: list[nn.Module] = []
        self._held_then: tuple[list[int], list[object]] = ([], [])

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters that the model has now; the same dictionary until they change."""
        if not self._seen or not self._is_unchanged():
            self._named = dict(self._model.named_parameters())
            self._seen = list(self._model.modules())
            sizes, held = _held(self._seen)
            self._held_then = sizes, list(held)
        return self._named

    def _is_unchanged(self) -> bool:
        sizes, held = _held(self._seen)
        return sizes == self._held_then[0] and all(map(operator.is_, held, self._held_then[1]))


def _held(modules: Sequence[nn.Module]) -> tuple[list[int], Iterator[object]]:
    """How many parameters and children each module holds, and these: without Python code for each of them."""
    dictionaries = [m._parameters for m in modules] + [m._modules for m in modules]
    return list(map(len, dictionaries)), itertools.chain.from_iterable(map(_VALUES, dictionaries))


_VALUES = operator.methodcaller("values")
