"""A gradient folded into few numbers, so that two gradients can be compared that never exist at the same time.

A group of parameters with at most as many elements as it has buckets is kept as it is. The gradient of a larger group
is cut into rows x_r of the sketch's length m, and folded:

    s = Σ_r σ_r shift(c ∘ x_r, k_r)          σ_r = ± 1, c_j = ± 1, k_r from 0 to m − 1, all of them random

Elements that share a bucket come from different rows, and the signs of two rows are independent. So the mean over signs
of ⟨s(a), s(b)⟩ is ⟨a, b⟩ exactly. Its standard error is about |a||b| √(2/m): c and k keep rows that are alike, such as
those of a matrix of low rank, from adding up in step. Every sketch is linear, as long as the signs are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sonde.parallel.devices import has_float64, to_device, widened

_FEWEST_BUCKETS = 2**11
"""Buckets of a sketch, however small the staging area is."""
_BYTES_PER_BUCKET = 40
"""Memory for each bucket of fp32: two sketches, two sets of signs, a folded group, and a row with its copies."""


class GradientSketch:
    """Folds the gradients of a model's parameter groups into one vector, in which each group has its own part.

    Args:
        parameters: the measured ones.
        group_index: the group of each of them, [parameters].
        n_groups: number of groups.
        staging_bytes: bound of the memory; at least 64 KiB are used.
        device: of the sketch.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        group_index: Sequence[int],
        *,
        n_groups: int,
        staging_bytes: int,
        device: torch.device,
    ) -> None:
        self._device = device
        is_wide = any(p.dtype == torch.float64 for p in parameters) and has_float64(device)
        self._dtype = torch.float64 if is_wide else torch.float32
        n_buckets = max(staging_bytes // (_BYTES_PER_BUCKET * (1 + is_wide)), _FEWEST_BUCKETS)
        self._row = _power_of_two(n_buckets)
        self._numels = [p.numel() for p in parameters]
        self._members: list[list[int]] = [[] for _ in range(n_groups)]
        for i, group in enumerate(group_index):
            self._members[group].append(i)
        self._group_numels = [sum(self._numels[i] for i in members) for members in self._members]
        self.sizes = bucket_counts(self._group_numels, n_buckets)
        """Buckets of each group, [groups]."""
        self._signs: tuple[int, Tensor, Tensor] | None = None

    @property
    def is_exact(self) -> bool:
        """Whether every group is kept as it is."""
        return self.sizes == self._group_numels

    @property
    def error(self) -> float:
        """Standard error of |s(a)|² over |a|², about: √Σ 2p²/m with each group's part p of the elements."""
        parts = zip(self.sizes, self._group_numels, strict=True)
        whole = sum(self._group_numels)
        return math.sqrt(sum(2 / size * (numel / whole) ** 2 for size, numel in parts if size < numel))

    def of(self, grads: Sequence[Tensor | None], key: int) -> Tensor:
        """The sketch of a gradient.

        Args:
            grads: dense, of any dtypes and layouts; None for a parameter without one; [parameters].
            key: chooses the random signs and shifts. Only sketches of one key can be compared.

        Returns:
            [buckets]
        """
        # A generator of its own: the user's random state is untouched.
        generator = torch.Generator(device="cpu").manual_seed(_mixed(key))
        sketch = torch.zeros(sum(self.sizes), dtype=self._dtype, device=self._device)
        if not self.is_exact and (self._signs is None or self._signs[0] != key):
            self._signs = None  # the old ones make room first
            self._signs = (key, self._random_signs(generator), self._random_signs(generator))
        shuffles = torch.Generator(device="cpu").manual_seed(_mixed(~key))
        for members, numel, segment in zip(self._members, self._group_numels, sketch.split(self.sizes), strict=True):
            if numel <= len(segment):
                self._copy(grads, members, segment)
            else:
                self._fold(self._rows(grads, members), numel, segment, shuffles)
        return sketch

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """⟨a, b⟩ of two sketches in each group, [groups]."""
        # In full precision: the difference of two gradients may be far smaller than the gradients.
        parts = zip(a.split(self.sizes), b.split(self.sizes), strict=True)
        return torch.stack([(widened(x) * widened(y)).sum() for x, y in parts])

    def _random_signs(self, generator: torch.Generator) -> Tensor:
        signs = torch.randint(2, (self._row,), generator=generator, dtype=torch.int8, device="cpu").mul_(2).sub_(1)
        return to_device(signs, self._device).to(self._dtype)

    def _copy(self, grads: Sequence[Tensor | None], members: Sequence[int], segment: Tensor) -> None:
        for i, part in zip(members, segment.split([self._numels[i] for i in members]), strict=True):
            if (grad := grads[i]) is not None:
                part.view(grad.shape).copy_(to_device(grad, self._device))

    def _fold(self, rows: Iterator[Tensor], numel: int, segment: Tensor, shuffles: torch.Generator) -> None:
        assert self._signs is not None
        _, columns, last_signs = self._signs
        n_rows = -(-numel // self._row)
        row_length = min(self._row, 1 << (numel - 1).bit_length())  # a small group takes a short row
        signs = (torch.randint(2, (n_rows,), generator=shuffles, device="cpu") * 2 - 1).tolist()
        shifts = torch.randint(row_length, (n_rows,), generator=shuffles, device="cpu").tolist()
        folded = torch.zeros_like(columns[:row_length])
        for row, sign, shift in zip(rows, signs, shifts, strict=True):
            # A cyclic shift by two slices: the elements that move to the end, and those that go on at the beginning.
            first = min(len(row), row_length - shift)
            for into, part in ((shift, slice(0, first)), (0, slice(first, len(row)))):
                n = part.stop - part.start
                if n:
                    folded[into : into + n].addcmul_(columns[part], row[part], value=sign)
            del row  # before the next one is made
        # Where the group has fewer buckets than a row, the row is folded once more, with a sign for each element.
        torch.sum((folded * last_signs[:row_length]).view(-1, len(segment)), 0, out=segment)

    def _rows(self, grads: Sequence[Tensor | None], members: Sequence[int]) -> Iterator[Tensor]:
        """The elements of a group one after another, cut into rows; the last one may be shorter."""
        parts: list[Tensor] = []
        n = 0
        for i in members:
            for block in self._blocks(grads[i], self._numels[i]):
                while len(block):
                    part, block = block[: self._row - n], block[self._row - n :]
                    parts.append(part)
                    n += len(part)
                    if n == self._row:
                        yield self._joined(parts)
                        parts, n = [], 0
        if parts:
            yield self._joined(parts)

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        parts = [to_device(part, self._device).to(self._dtype) for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _blocks(self, grad: Tensor | None, numel: int) -> Iterator[Tensor]:
        """The elements of one gradient in their logical order, as vectors; copies are at most as long as a row."""
        if grad is None:
            yield torch.zeros((), dtype=self._dtype, device=self._device).expand(numel)
        elif grad.is_contiguous():
            yield grad.view(-1)
        elif grad.numel() <= self._row:
            yield grad.reshape(-1)
        elif grad.dim() == 1:
            yield from grad.split(self._row)
        else:
            n_at_once = max(self._row // grad[0].numel(), 1)
            for part in grad.split(n_at_once):
                yield from self._blocks(part if len(part) > 1 else part[0], part.numel())


def bucket_counts(numels: Sequence[int], n_buckets: int) -> list[int]:
    """How many buckets each group has: all of its elements if they are few, else an equal share, a power of two.

    Args:
        numels: elements of each group, [groups].
        n_buckets: to share out; each group has at least one.
    """
    counts = [0] * len(numels)
    smallest_first = sorted(range(len(numels)), key=numels.__getitem__)
    for n_before, i in enumerate(smallest_first):
        share = max(n_buckets // (len(numels) - n_before), 1)
        counts[i] = numels[i] if numels[i] <= share else _power_of_two(share)
        n_buckets -= counts[i]
    return counts


def _power_of_two(n: int) -> int:
    """The largest power of two up to n ≥ 1."""
    return int(1 << (n.bit_length() - 1))


def _mixed(key: int) -> int:
    """A seed of 32 bits that differs in many of them from the seeds of other keys."""
    return (key * 0x9E3779B1 + 0x7F4A7C15) % 2**32
