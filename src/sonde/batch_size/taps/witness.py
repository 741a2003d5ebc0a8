"""The scale witness: a few hundred gradient elements, kept piece by piece, that show what became of the gradient."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sonde.parallel.devices import to_device, zero_sums
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
        apart: the parameters of each class apart, by index; some of each are read in every window.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        first: int = 0,
        n: int | None = None,
        apart: Sequence[frozenset[int]] = (),
    ) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        self._first, self._n = first, len(shapes) - first if n is None else n
        self._apart = frozenset(i for indices in apart for i in indices)
        rest = [(i, len(shape)) for i, shape in enumerate(self._shapes) if 0 not in shape and i not in self._apart]
        vectors, matrices = [i for i, n_dims in rest if n_dims < 2], [i for i, n_dims in rest if n_dims >= 2]
        of_classes = [sorted(i for i in indices if 0 not in self._shapes[i]) for indices in apart]
        self._kinds = [(*_split(vectors, _VECTORS), _VECTORS), (*_split(matrices, _MATRICES), _MATRICES)]
        self._kinds += [(*_split(indices, _MATRICES), _MATRICES) for indices in of_classes if indices]
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
        self.sizes: dict[int, int] = {}
        """Elements that are read of each parameter of the model, by its index there."""
        self._blocks: dict[int, _Block] = {}
        for i in sorted(chosen):
            block = _strided_block(self._shapes[i], window)
            self.sizes[i] = math.prod(block.shape)
            if 0 <= i - self._first < self._n:  # this rank's, counted from 0
                self._blocks[i - self._first] = block
        self.n_read = sum(self.sizes.values())
        """Elements that are read of all of them."""
        self.indices = self._blocks.keys()
        """This rank's parameters that are read."""
        self._rest: Tensor | None = None
        self._places: dict[tuple[int, tuple[int, ...]], tuple[list[int], int]] = {}

    @property
    def fixed(self) -> list[int]:
        """Parameters of this rank that are read in every window, spread over the depth of the model."""
        stay = sorted(index - self._first for fixed, _, _ in self._kinds for index in fixed)
        return [index for index in stay if 0 <= index < self._n]

    def rest(self, device: torch.device) -> Tensor:
        """0 for the elements of parameters in a class apart, 1 for the others and the zeros that fill up; [size]."""
        if self._rest is None:
            self._rest = to_device(1.0 - elements_of(self._apart, self.sizes, self.size), device)
        return self._rest

    def read(self, index: int, grad: Tensor, spec: Any = None) -> Tensor:
        """The chosen elements of the gradient of parameter `index`, sizes[index] in all; a view where it is dense.

        Args:
            index: of the parameter.
            grad: what this rank holds of the gradient.
            spec: how the gradient is placed, as a DTensor's; None if the rank holds all of it. Elements on other ranks
                are 0.
        """
        block = self._blocks[index]
        if (grad.shape if spec is None else spec.shape) != self._shapes[index + self._first]:
            return grad.new_zeros(block.shape)  # the parameter, or its `.data`, was replaced since attach
        if spec is not None:
            return self._read_shard(index, grad, spec)
        if grad.is_sparse:
            grad = grad.coalesce()
            rows = range(*block.slices[0].indices(grad.shape[0]))
            picked = grad.index_select(0, torch.tensor(rows, device=grad.device)).to_dense()
            return picked[(slice(None), *block.slices[1:])]
        # grad[slices] as a single view: inside a backward, each operator costs.
        key = index, grad.stride()
        if (place := self._places.get(key)) is None:  # the same for all pieces of a window
            steps, start = [], 0
            for chosen, stride in zip(block.slices, key[1], strict=True):
                steps.append(chosen.step * stride)
                start += chosen.start * stride
            place = self._places[key] = steps, start
        return grad.as_strided(block.shape, place[0], grad.storage_offset() + place[1])

    def _read_shard(self, index: int, local: Tensor, spec: Any) -> Tensor:
        block = self._blocks[index]
        elements = local.new_zeros(block.shape)
        into, out_of = [], []
        for chosen, n_local, offset in zip(block.slices, local.shape, self._offset(index, spec), strict=True):
            n_before = max(-((chosen.start - offset) // chosen.step), 0)  # chosen elements that come before the shard
            start = chosen.start + n_before * chosen.step - offset
            into.append(slice(n_before, n_before + len(range(start, n_local, chosen.step))))
            out_of.append(slice(start, None, chosen.step))
        elements[tuple(into)] = local[tuple(out_of)]
        return elements

    def _offset(self, index: int, spec: Any) -> tuple[int, ...]:
        """Where this rank's shard begins in the whole gradient, along each dim. Worked out once for each placement."""
        if self._offsets.get(index, (None,))[0] is not spec:
            self._offsets[index] = spec, shard_of(spec)[1]
        return self._offsets[index][1]

    def join(self, elements: Mapping[int, Tensor], device: torch.device) -> Tensor:
        """The elements read of each parameter, by index, as one vector: [size], the same length in every window.

        Parameters that were not read count as 0. Zeros fill the rest of the vector.
        """
        zeros = zero_sums(self.size, device=device)  # joined to it, all elements are in its dtype
        parts = []
        for i, n in self.sizes.items():
            part = elements.get(i - self._first)
            if part is None:
                parts.append(zeros[:n])
            else:
                parts.append(part.reshape(-1) if part.device == device else to_device(part.reshape(-1), device))
        return torch.cat([*parts, zeros[self.n_read :]])


def elements_of(indices: Collection[int], sizes: Mapping[int, int], n: int) -> Tensor:
    """1 for the elements of some parameters, 0 for the rest and for the zeros that fill up; float64 on the CPU, [n].

    Args:
        indices: of the parameters.
        sizes: elements that the witness read of each parameter, in order, by index.
        n: elements of the witness.
    """
    elements = [float(i in indices) for i, size in sizes.items() for _ in range(size)]
    return torch.tensor(elements + [0.0] * (n - len(elements)), dtype=torch.float64, device="cpu")


def _split(items: list[int], most: int) -> tuple[list[int], list[int]]:
    """At most `most` items, evenly spaced with both ends among them; and the other items."""
    if len(items) <= most:
        return items, []
    fixed = [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]
    return fixed, [i for i in items if i not in fixed]


class _Block(NamedTuple):
    """A strided block of a tensor: its slices, each with a start and a step, and its shape."""

    slices: tuple[slice, ...]
    shape: list[int]


def _strided_block(shape: tuple[int, ...], window: int) -> _Block:
    """At most `_ELEMENTS_PER_PARAMETER` elements spread over the whole shape, others in each window."""
    slices, sizes, budget = [], [], _ELEMENTS_PER_PARAMETER
    for left, size in zip(range(len(shape) - 1, -1, -1), shape, strict=True):
        # The budget is shared evenly over this dim and the `left` later dims: its (left + 1)-th root for this dim.
        n_chosen = min(size, max(int(budget ** (1 / (left + 1)) + 1e-9), 1))
        step = -(-size // n_chosen)
        # The window's number, counted in mixed radix over the steps, gives every block its turn.
        window, start = divmod(window, step)
        slices.append(slice(start, None, step))
        sizes.append(len(range(start, size, step)))
        budget //= -(-size // step)
    return _Block(tuple(slices), sizes)
