"""How far a step moves the parameters, by some elements of each: no copy of all of them is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sonde.parallel.devices import to_device, widened, zero_sums
from sonde.parallel.placements import local_tensor, spec_of
from sonde.parallel.shares import share_of

_ELEMENTS, _FEWEST = 2**14, 32
"""Elements that are read of all parameters, in proportion to their sizes; and the fewest of each."""


class UpdateSample:
    """Reads elements of the parameters before a step, and again before the next one, when all optimizers have stepped.

    The elements are evenly spaced over what this rank holds, the same in every window, so that steps can be compared.
    Each stands for those up to the next one. A model of at most 16,384 elements is read whole.

    Args:
        parameters: of this rank, whole or cut over ranks.
        first_rank: the lowest of all ranks that hold any of a model that is cut; None if every rank holds all of it.
        device: of the result.
    """

    def __init__(self, parameters: Sequence[Tensor], first_rank: int | None, device: torch.device) -> None:
        self._parameters = [
            p
            for p in parameters
            if local_tensor(p).numel() and (first_rank is None or share_of(spec_of(p)).is_first_copy(first_rank))
        ]
        sizes = [local_tensor(p).numel() for p in self._parameters]
        self._spacings = [math.ceil(size / max(_ELEMENTS * size // sum(sizes), _FEWEST)) for size in sizes]
        n_read = [math.ceil(size / spacing) for size, spacing in zip(sizes, self._spacings, strict=True)]
        stands_for = [size / n for size, n in zip(sizes, n_read, strict=True) for _ in range(n)]
        self._stands_for = to_device(widened(torch.tensor(stands_for, device="cpu")), device)
        self._device = device
        self._before: Tensor | None = None
        self._sq_norm = self._none = zero_sums(device=device)

    @torch.no_grad()
    def _read(self) -> Tensor:
        parts = []
        for parameter, spacing in zip(self._parameters, self._spacings, strict=True):
            local = local_tensor(parameter)
            if local.is_contiguous():  # local.view(-1)[::spacing] as a single view: each operator costs
                part = local.as_strided((math.ceil(local.numel() / spacing),), (spacing,))
            else:  # in the order of its memory, as with channels last: a view too
                order = sorted(range(local.dim()), key=local.stride, reverse=True)
                part = local.permute(order).reshape(-1)[::spacing]
            parts.append(part if part.device == self._device else to_device(part, self._device))
        return torch.cat(parts) if parts else self._stands_for

    def before(self) -> None:
        """Read the elements before a step."""
        self._before = self._read()

    def after(self) -> None:
        """Read them again, if they were read before the last step."""
        before, self._before = self._before, None
        if before is not None and len(now := self._read()) == len(before):
            # Widened first: the squares of small steps vanish in fp32.
            self._sq_norm = ((widened(now) - widened(before)).square() * self._stands_for).sum()

    def take(self) -> Tensor:
        """|Δθ|² of what this rank counts in the last step that was read, 0-dim; 0 without one."""
        sq_norm, self._sq_norm = self._sq_norm, self._none
        return sq_norm
