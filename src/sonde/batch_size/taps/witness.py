"""The scale witness: a few hundred gradient elements, kept piece by piece, that show what became of the gradient."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sonde.parallel.devices import to_device, widened
from sonde.parallel.placements import shard_of

_VECTORS, _MATRICES = 4, 2
"""Vectors and matrices that are read in every window. As many again change from window to window.

Matrices are fewer: their gradients are too large to wait for a shared kernel, so each costs a read of its own.
"""

_ELEMENTS_PER_PARAMETER = 32


class Witness:
    """Which elements of which parameters stand for the whole gradient in a window, and how to read them.

    The parameters are matrices and vectors, spread over the depth of the model, since some communication hooks change
    only one kind. A strided block of at most 32 elements is read from each, never the whole gradient. Half of the
    parameters are read in every window, so that there is always something to compare. The other half, and the place of
    the block in each, move on with every window. So a change to one part of the gradient in every window is soon seen.

    Args:
        shapes: of all parameters, in the model's order.
        first: where this rank's parameters begin in that list; the methods count them from 0.
        n: how many are this rank's; None for all from `first` on.
        apart: parameters that are scaled by a factor of their own, by index; some of them are read in every window.
    """

    def __init__(
        self, shapes: Sequence[Sequence[int]], first: int = 0, n: int | None = None, apart: Collection[int] = ()
    ) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        self._first, self._n = first, len(shapes) - first if n is None else n
        self.apart = frozenset(apart)
        """As passed."""
        usual = [(i, len(shape)) for i, shape in enumerate(self._shapes) if 0 not in shape and i not in self.apart]
        vectors, matrices = [i for i, n_dims in usual if n_dims < 2], [i for i, n_dims in usual if n_dims >= 2]
        special = sorted(i for i in self.apart if 0 not in self._shapes[i])
        self._kinds = [(*_split(vectors, _VECTORS), _VECTORS), (*_split(matrices, _MATRICES), _MATRICES)]
        self._kinds += [(*_split(special, _MATRICES), _MATRICES)] if special else []
        n_read = sum(min(len(fixed) + len(moving), 2 * n) for fixed, moving, n in self._kinds)
        self.size = n_read * _ELEMENTS_PER_PARAMETER
        """Length of what `join` returns."""
        self._offsets: dict[int, tuple[Any, tuple[int, ...]]] = {}
        self._window = -1
        self.move()

    def move(self) -> None:
        """Choose the elements of the next window: the same on every rank, if all ranks end the same windows."""
        self._window += 1
        window = self._window
        chosen: list[int] = []
        for fixed, moving, n in self._kinds:
            # Each round takes every n_rounds-th of the moving parameters, so that they are spread over the depth.
            n_rounds = math.ceil(len(moving) / n)
            chosen += fixed + (moving[window % n_rounds :: n_rounds] if moving else [])
        slices = {i: _strided_block(self._shapes[i], window) for i in sorted(chosen)}
        shapes_read = {i: _sliced_shape(self._shapes[i], slices[i]) for i in slices}
        self.sizes = {i: math.prod(shape) for i, shape in shapes_read.items()}
        """Elements that are read of each parameter of the model, by its index there."""
        # This rank's parameters, counted from 0.
        own = [i for i in slices if 0 <= i - self._first < self._n]
        self._slices = {i - self._first: slices[i] for i in own}
        self._shapes_read = {i - self._first: shapes_read[i] for i in own}
        self.indices = list(self._slices)
        self._places: dict[tuple[int, tuple[int, ...]], tuple[list[int], int]] = {}

    @property
    def fixed(self) -> list[int]:
        """Parameters of this rank that are read in every window, spread over the depth of the model."""
        stay = sorted(index - self._first for fixed, _, _ in self._kinds for index in fixed)
        return [index for index in stay if 0 <= index < self._n]

    def __contains__(self, index: int) -> bool:
        return index in self._slices

    def read(self, index: int, grad: Tensor) -> Tensor:
        """The chosen elements of the gradient of parameter `index`, sizes[index] in all; a view if it is dense."""
        if grad.is_sparse:
            slices = self._slices[index]
            grad = grad.coalesce()
            rows = range(*slices[0].indices(grad.shape[0]))
            picked = grad.index_select(0, torch.tensor(rows, device=grad.device)).to_dense()
            return picked[(slice(None), *slices[1:])]
        # grad[slices] as a single view: inside a backward, each operator costs.
        if grad.shape != self._shapes[index + self._first]:  # `.data` was replaced since attach
            return grad.new_zeros(self._shapes_read[index])
        strides = grad.stride()
        if (index, strides) not in self._places:  # the same for all pieces of a window
            by_dim = [*zip(self._slices[index], strides, strict=True)]
            steps, start = [s.step * stride for s, stride in by_dim], sum(s.start * stride for s, stride in by_dim)
            self._places[index, strides] = steps, start
        steps, start = self._places[index, strides]
        return grad.as_strided(self._shapes_read[index], steps, grad.storage_offset() + start)

    def read_shard(self, index: int, local: Tensor, spec: Any) -> Tensor:
        """As `read`, of a gradient of which this rank holds a shard: 0 in place of elements on other ranks.

        Args:
            index: of the parameter.
            local: this rank's shard.
            spec: how the gradient is placed, as a DTensor's; None if the shard is all of it.
        """
        if spec is None:
            return self.read(index, local)
        block = local.new_zeros(self._shapes_read[index])
        if spec.shape != self._shapes[index + self._first]:  # the parameter was replaced since attach
            return block
        into, out_of = [], []
        for chosen, n_local, offset in zip(self._slices[index], local.shape, self._offset(index, spec), strict=True):
            n_before = max(-((chosen.start - offset) // chosen.step), 0)  # chosen elements that come before the shard
            start = chosen.start + n_before * chosen.step - offset
            into.append(slice(n_before, n_before + len(range(start, n_local, chosen.step))))
            out_of.append(slice(start, None, chosen.step))
        block[tuple(into)] = local[tuple(out_of)]
        return block

    def _offset(self, index: int, spec: Any) -> tuple[int, ...]:
        """Where this rank's shard begins in the whole gradient, along each dim. Worked out once for each placement."""
        if self._offsets.get(index, (None,))[0] is not spec:
            self._offsets[index] = spec, shard_of(spec)[1]
        return self._offsets[index][1]

    def join(self, elements: Mapping[int, Tensor], device: torch.device) -> Tensor:
        """The elements read of each parameter, by index, as one vector: [size], the same length in every window.

        Parameters that were not read count as 0. Zeros fill the rest of the vector.
        """
        zeros = torch.zeros(self.size, dtype=torch.float32, device=device)
        parts = [
            elements[own].reshape(-1) if (own := i - self._first) in elements else zeros[:n]
            for i, n in self.sizes.items()
        ]
        on_device = [part if part.device == device else to_device(part, device) for part in parts]
        return widened(torch.cat([*on_device, zeros[sum(self.sizes.values()) :]]))


def _split(items: list[int], most: int) -> tuple[list[int], list[int]]:
    """At most `most` items, evenly spaced with both ends among them; and the other items."""
    if len(items) <= most:
        return items, []
    fixed = [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]
    return fixed, [i for i in items if i not in fixed]


def _strided_block(shape: tuple[int, ...], window: int) -> tuple[slice, ...]:
    """Slices that pick at most `_ELEMENTS_PER_PARAMETER` elements spread over the whole shape, others each window."""
    slices, budget = [], _ELEMENTS_PER_PARAMETER
    for left, size in zip(range(len(shape) - 1, -1, -1), shape, strict=True):
        # The budget is shared evenly over this dim and the `left` later dims: its (left + 1)-th root for this dim.
        take = min(size, max(int(budget ** (1 / (left + 1)) + 1e-9), 1))
        step = -(-size // take)
        # The window's number, counted in mixed radix over the steps, gives every block its turn.
        window, start = divmod(window, step)
        slices.append(slice(start, None, step))
        budget //= -(-size // step)
    return tuple(slices)


def _sliced_shape(shape: tuple[int, ...], slices: tuple[slice, ...]) -> list[int]:
    return [len(range(*s.indices(size))) for s, size in zip(slices, shape, strict=True)]
