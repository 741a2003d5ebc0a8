"""The scale witness: a few hundred gradient elements, kept piece by piece, that show what became of the gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_PARAMETERS_PER_KIND = 8
_ELEMENTS_PER_PARAMETER = 32


class Witness:
    """Which elements of which parameters stand for the whole gradient, and how to read them.

    Half of the parameters are matrices and half vectors, spread over the depth of the model: some communication hooks
    touch only one kind. From each a strided block of at most 32 elements is read, never the whole gradient.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """Choose among `parameters`, given in the model's order."""
        vectors = [i for i, p in enumerate(parameters) if p.dim() < 2 and p.numel()]
        matrices = [i for i, p in enumerate(parameters) if p.dim() >= 2 and p.numel()]
        self.indices = sorted(_spread(vectors, _PARAMETERS_PER_KIND) + _spread(matrices, _PARAMETERS_PER_KIND))
        self._slices = {i: _strided_block(tuple(parameters[i].shape)) for i in self.indices}
        self.sizes = {i: parameters[i][self._slices[i]].numel() for i in self.indices}
        self.size = sum(self.sizes.values())

    def __contains__(self, index: int) -> bool:
        return index in self._slices

    def read(self, index: int, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of the chosen elements of the gradient of parameter `index`: [sizes[index]]."""
        if grad.is_sparse:
            grad = grad.coalesce()
            rows = range(*self._slices[index][0].indices(grad.shape[0]))
            picked = grad.index_select(0, torch.tensor(rows, device=grad.device)).to_dense()
            return picked[(slice(None), *self._slices[index][1:])].reshape(-1).to(dtype, copy=True)
        return grad[self._slices[index]].reshape(-1).to(dtype, copy=True)


def _spread(items: list[int], most: int) -> list[int]:
    """At most `most` of the items, evenly spaced, the ends included."""
    if len(items) <= most:
        return items
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def _strided_block(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Slices that pick at most `_ELEMENTS_PER_PARAMETER` elements spread over the whole shape."""
    slices, budget = [], _ELEMENTS_PER_PARAMETER
    for left, size in zip(range(len(shape) - 1, -1, -1), shape, strict=True):
        # Share what is left evenly over the dims still to come: its (left + 1)-th root for this one.
        take = min(size, max(int(budget ** (1 / (left + 1)) + 1e-9), 1))
        step = -(-size // take)
        slices.append(slice(0, None, step))
        budget //= -(-size // step)
    return tuple(slices)
