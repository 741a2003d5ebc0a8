"""The scale witness: a few hundred gradient elements, kept piece by piece, that show what became of the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_FIXED_PER_KIND = 4
_MOVING_PER_KIND = 4
_ELEMENTS_PER_PARAMETER = 32


class Witness:
    """Which elements of which parameters stand for the whole gradient in a window, and how to read them.

    Half of the parameters are matrices and half vectors, spread over the depth of the model: some communication hooks
    touch only one kind. From each a strided block of at most 32 elements is read, never the whole gradient. Half of
    them stay, so that there is always something to compare; the other half, and the block's place in each, move on
    with every window, so that whatever changes a part of the gradient in every window is met before long.

    Args:
        parameters: in the model's order.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._shapes = [tuple(p.shape) for p in parameters]
        vectors = [i for i, p in enumerate(parameters) if p.dim() < 2 and p.numel()]
        matrices = [i for i, p in enumerate(parameters) if p.dim() >= 2 and p.numel()]
        self._kinds = [_split(kind) for kind in (vectors, matrices)]
        n_read = sum(min(len(kind), _FIXED_PER_KIND + _MOVING_PER_KIND) for kind in (vectors, matrices))
        self.size = n_read * _ELEMENTS_PER_PARAMETER
        """Length of what `join` returns."""
        self._window = -1
        self.move()

    def move(self) -> None:
        """Choose the elements of the next window: the same on every rank, if all end the same windows."""
        self._window += 1
        window = self._window
        chosen: list[int] = []
        for fixed, moving in self._kinds:
            n_rounds = math.ceil(len(moving) / _MOVING_PER_KIND)
            chosen += fixed + (moving[window % n_rounds :: n_rounds] if moving else [])
        self.indices = sorted(chosen)
        self._slices = {i: _strided_block(self._shapes[i], window) for i in self.indices}
        self.sizes = {i: _n_picked(self._shapes[i], self._slices[i]) for i in self.indices}

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

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """What was read of each parameter as one vector, as long in every window, zeros last: [size]."""
        n_missing = self.size - sum(self.sizes.values())
        return torch.cat([*parts, parts[0].new_zeros(n_missing)])


def _split(items: list[int]) -> tuple[list[int], list[int]]:
    """A few items, evenly spaced, the ends included; and the others."""
    most = _FIXED_PER_KIND
    if len(items) <= most:
        return items, []
    fixed = [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]
    return fixed, [i for i in items if i not in fixed]


def _strided_block(shape: tuple[int, ...], window: int) -> tuple[slice, ...]:
    """Slices that pick at most `_ELEMENTS_PER_PARAMETER` elements spread over the whole shape, others each window."""
    slices, budget = [], _ELEMENTS_PER_PARAMETER
    for left, size in zip(range(len(shape) - 1, -1, -1), shape, strict=True):
        # Share what is left evenly over the dims still to come: its (left + 1)-th root for this one.
        take = min(size, max(int(budget ** (1 / (left + 1)) + 1e-9), 1))
        step = -(-size // take)
        window, start = divmod(window, step)
        slices.append(slice(start, None, step))
        budget //= -(-size // step)
    return tuple(slices)


def _n_picked(shape: tuple[int, ...], slices: tuple[slice, ...]) -> int:
    return math.prod(len(range(*s.indices(size))) for s, size in zip(slices, shape, strict=True))
