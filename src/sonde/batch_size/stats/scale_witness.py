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
        changed: parameters for which rounding does not, by index.
    """

    scale: float | None
    residual: float | None
    is_sound: bool
    changed: frozenset[int] = frozenset()


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
    sizes, squares = (
        sizes or {0: len(final)},
        summed.square() if squares is None else torch.maximum(summed.square(), squares),
    )
    n_elements, least_square = torch.tensor([*sizes.values()], device="cpu"), (floor / tolerance) ** 2
    owners = torch.arange(len(sizes), device="cpu").repeat_interleave(n_elements)

    def by_parameter(elements: Tensor) -> list[list[float]]:
        sums = elements.new_zeros(2, len(sizes)).index_add_(1, owners, elements[:, : len(owners)])
        return sums.T.tolist()

    def left_over(kappa: float) -> tuple[float, dict[int, float]]:
        """The residual of all elements together, and of each parameter that has a gradient; NaN if not finite."""
        # (F − κH)² of each element, and the square of the size that rounding is relative to: F, κH or the pieces.
        size = torch.maximum(final.square(), kappa**2 * squares) + least_square
        both = torch.stack([(final - kappa * summed).square(), size])
        left, whole = both.sum(1).tolist()
        of_each = {i: (a, b) for i, (a, b) in zip(sizes, by_parameter(both), strict=True)}
        return math.sqrt(left / max(whole, 1e-300)), {
            i: math.sqrt(a / b) for i, (a, b) in of_each.items() if not b - sizes[i] * least_square <= _NOT_DENORMAL**2
        }

    def beyond(residuals: Mapping[int, float]) -> frozenset[int]:
        """What rounding does not explain. With few elements it averages out less, so more is allowed."""
        return frozenset(i for i, r in residuals.items() if not r <= tolerance * (1.0 + 4.0 / math.sqrt(sizes[i])))

    residual, residuals = left_over(scale)
    worst = max(residual, *residuals.values(), 0.0)
    if residual <= tolerance and not beyond(residuals):
        return ScaleReading(scale, worst, is_sound=True)
    # Changed elements have moved κ too. To find them, use the κ that most parameters have: the median of their own.
    ratios = sorted(fh / hh for fh, hh in by_parameter(torch.stack([final, summed]) * summed) if hh > 0.0)
    _, residuals = left_over(ratios[len(ratios) // 2] if ratios else 0.0)
    return ScaleReading(scale, worst, is_sound=False, changed=beyond(residuals))
