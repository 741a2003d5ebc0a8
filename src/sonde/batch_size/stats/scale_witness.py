"""Was the gradient only scaled? Its scale κ, and the part that κ does not explain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RoundingTolerance:
    """How far rounding alone may move the sum of a window's gradients, and the likely cause if it moved further.

    Attributes:
        tolerance: the relative residual that rounding alone explains in sums of at most 16 pieces.
        floor: elements up to this size may be lost to underflow.
        likely_cause: what may have changed a gradient beyond that, likeliest first.
    """

    tolerance: float
    floor: float
    likely_cause: str

    def of_sums(self, n_additions: float) -> float:
        """The residual that rounding explains after many additions, if all of them round to the same side.

        Args:
            n_additions: gradients that were added up, one after another, in the gradient's own dtype.
        """
        most = max(_MOST_ROUNDING, self.tolerance)
        return min(self.tolerance * max(n_additions / _ADDITIONS_IN_TOLERANCE, 1.0), most)


@dataclass(frozen=True)
class ScaleReading:
    """How the final gradient relates to the sum of the pieces' gradients, on the witness's elements.

    Attributes:
        scale: κ = ⟨F, H⟩/⟨H, H⟩, and 1 where rounding in fp32 explains the rest; None when F or H is 0.
        residual: |F − κH| relative to the size of F, and of the pieces that were added up to it; of all elements or of
            one parameter's, whichever is larger; None when F or H is 0.
        is_sound: whether rounding explains the residual.
    """

    scale: float | None
    residual: float | None
    is_sound: bool


_ADDITIONS_IN_TOLERANCE = 16
_MOST_ROUNDING = 0.05
"""Largest residual ever put down to rounding. Beyond it, a sum in 16 bits has stopped growing and is wrong."""
_ONE_ROUNDING = 2.0**-23
"""Relative rounding of an addition in fp32. A κ nearer to 1 is that of a gradient that nothing has scaled."""
_NOT_DENORMAL = 1e-30
"""Elements below this size have lost digits to underflow, and are not compared."""


def read_scale(
    final: Tensor,
    summed: Tensor,
    *,
    tolerance: float,
    squares: Tensor | None = None,
    sizes: Mapping[int, int] | None = None,
    floor: float = 0.0,
) -> ScaleReading:
    """Compare the optimizer's gradient F with the sum H of the pieces' gradients.

    Args:
        final: elements of F, float64 on the CPU; [witness].
        summed: the same elements of H, summed over pieces and ranks; [witness].
        tolerance: the residual that rounding alone explains.
        squares: Σ h_k² of each element: where pieces nearly cancel, rounding is relative to their sizes; [witness].
        sizes: how many elements each parameter has, in order, by index. Parameters are judged one by one, so that a
            change counts even where the gradient is small. By default all elements are one parameter's.
        floor: elements up to this size may have been lost to underflow.
    """
    power, final_power = float(summed @ summed), float(final @ final)
    if power == 0.0 or final_power == 0.0:
        return ScaleReading(None, None, is_sound=False)
    scale = float(final @ summed) / power
    # |G|² is a small difference of squares that κ scales: 1e-8 there is 1e-5 of it.
    scale = 1.0 if abs(scale - 1.0) < _ONE_ROUNDING else scale
    # (F − κH)² of each element, and the square of the size that rounding is relative to: F, κH or the pieces.
    least_square = (floor / tolerance) ** 2
    added = scale**2 * torch.maximum(summed.square(), summed.square() if squares is None else squares)
    both = torch.stack([(final - scale * summed).square(), torch.maximum(final.square(), added) + least_square])
    left, size = both.sum(1).tolist()
    residual = worst = math.sqrt(left / max(size, 1e-300))
    is_sound = residual <= tolerance
    n_elements = torch.tensor([*({0: len(final)} if sizes is None else sizes).values()], device="cpu")
    owners = torch.arange(len(n_elements), device="cpu").repeat_interleave(n_elements)
    of_parameters = both.new_zeros(2, len(n_elements)).index_add_(1, owners, both[:, : len(owners)])
    for n, left, size in zip(n_elements.tolist(), *of_parameters.tolist(), strict=True):
        if size - n * least_square <= _NOT_DENORMAL**2:  # no gradient to compare
            continue
        residual = math.sqrt(left / size)
        worst = max(worst, residual)
        # With few elements rounding averages out less, so more is allowed. What is not finite is not sound.
        is_sound &= residual <= tolerance * (1.0 + 4.0 / math.sqrt(n))
    return ScaleReading(scale, worst, is_sound)
