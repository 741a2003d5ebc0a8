"""Was the gradient only scaled? Its scale κ, the part that κ does not explain, and the kind of change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True)
class ScaleReading:
    """How the final gradient relates to the sum of the pieces' gradients, on the witness's elements.

    Attributes:
        scale: κ = ⟨F, H⟩/⟨H, H⟩, and 1 where rounding in fp32 explains the rest; None when either is 0.
        residual: |F − κH| relative to the size of F, and of the pieces that were added up to it; of all elements or of
            one parameter's, whichever is larger; None when F or H is 0.
        kind: "scaled" within the tolerance; "clipped by value" when the largest elements all have one size and the
            others are scaled; "zero"; otherwise "changed".
        changed: parameters that were changed, by index.
        sound: parameters that were compared and not changed.
        absent: parameters that had no gradient to compare.
    """

    scale: float | None
    residual: float | None
    kind: Literal["scaled", "clipped by value", "zero", "changed"]
    changed: frozenset[int] = frozenset()
    sound: frozenset[int] = frozenset()
    absent: frozenset[int] = frozenset()


_ADDITIONS_IN_TOLERANCE = 16
_MOST_ROUNDING = 0.05
"""Largest residual ever put down to rounding. Beyond it, a sum in 16 bits has stopped growing and is wrong."""
_ONE_ROUNDING = 2.0**-23
"""Relative rounding of an addition in fp32. A κ nearer to 1 is that of a gradient that nothing has scaled."""
_NOT_DENORMAL = 1e-30
"""Elements below this size have lost digits to underflow, and are not compared."""


def rounding_of_sums(tolerance: float, n_additions: float) -> float:
    """The residual that rounding explains after many additions, if all of them round to the same side.

    Args:
        tolerance: the residual that rounding explains up to 16 additions.
        n_additions: gradients that were added up, one after another, in the gradient's own dtype.
    """
    return min(tolerance * max(n_additions / _ADDITIONS_IN_TOLERANCE, 1.0), max(_MOST_ROUNDING, tolerance))


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

    Returns:
        A `ScaleReading`.
    """
    power, final_power = float(summed @ summed), float(final @ final)
    if power == 0.0 or final_power == 0.0:
        return ScaleReading(None, None, "zero")
    scale = float(final @ summed) / power
    # |G|² is a small difference of squares that κ scales: 1e-8 there is 1e-5 of it.
    scale = 1.0 if abs(scale - 1.0) < _ONE_ROUNDING else scale
    sizes = sizes if sizes is not None else {0: len(final)}
    parts = _Parts(final, summed, summed.square() if squares is None else squares, sizes, floor / tolerance)
    residual, residuals = parts.residuals(scale)
    absent = frozenset(sizes) - residuals.keys()
    worst = max(residual, *residuals.values(), 0.0)
    changed = _beyond(residuals, sizes, tolerance)
    if residual <= tolerance and not changed:
        return ScaleReading(scale, worst, "scaled", sound=frozenset(residuals), absent=absent)
    # Changed elements have moved κ too. To find them, use the κ that most parameters have.
    _, by_usual_scale = parts.residuals(parts.usual_scale())
    changed = _beyond(by_usual_scale, sizes, tolerance)
    kind: Literal["clipped by value", "changed"] = "clipped by value" if parts.is_clipped(tolerance) else "changed"
    return ScaleReading(scale, worst, kind, changed, frozenset(residuals) - changed, absent)


def _beyond(residuals: Mapping[int, float], sizes: Mapping[int, int], tolerance: float) -> frozenset[int]:
    """Parameters that rounding does not explain. With few elements rounding averages out less, so more is allowed."""
    return frozenset(i for i, r in residuals.items() if not r <= tolerance * (1.0 + 4.0 / math.sqrt(sizes[i])))


class _Parts:
    """Elements of F and H by parameter."""

    def __init__(
        self, final: Tensor, summed: Tensor, squares: Tensor, sizes: Mapping[int, int], least_size: float
    ) -> None:
        self._final, self._summed, self._squares, self._least_square = final, summed, squares, least_size**2
        self._indices, self._sizes = list(sizes), torch.tensor([*sizes.values()], device="cpu")
        self._owners = torch.arange(len(sizes), device="cpu").repeat_interleave(self._sizes)

    def _by_parameter(self, elements: Tensor) -> Tensor:
        """Sums over the elements of each parameter; [2, parameters]."""
        n = len(self._owners)
        return elements.new_zeros(2, len(self._indices)).index_add_(1, self._owners, elements[:, :n])

    def _left_over(self, scale: float) -> Tensor:
        """(F − κH)² of each element, and the square of the size that rounding is relative to: F, κH or the pieces."""
        added = scale**2 * torch.maximum(self._summed.square(), self._squares)
        size = torch.maximum(self._final.square(), added) + self._least_square
        return torch.stack([(self._final - scale * self._summed).square(), size])

    def residuals(self, scale: float) -> tuple[float, dict[int, float]]:
        """|F − κH| over the size of F, of all elements together, and of each parameter that has a gradient.

        A parameter's is NaN where its gradient is not finite.
        """
        both = self._left_over(scale)
        whole, size_of_whole = both.sum(1).tolist()
        floors = (self._sizes * self._least_square).tolist()
        by_parameter = zip(self._indices, *self._by_parameter(both).tolist(), floors, strict=True)
        return math.sqrt(whole / max(size_of_whole, 1e-300)), {
            i: math.sqrt(a / b) for i, a, b, floor in by_parameter if not b - floor <= _NOT_DENORMAL**2
        }

    def usual_scale(self) -> float:
        """The median of the parameters' own κ: a few changed parameters with large gradients do not move it."""
        products = self._by_parameter(torch.stack([self._final, self._summed]) * self._summed)
        ratios = sorted(fh / power for fh, power in products.T.tolist() if power > 0.0)
        return ratios[len(ratios) // 2] if ratios else 0.0

    def is_clipped(self, tolerance: float) -> bool:
        """Whether clipping by value explains F: the largest elements all have one size, and the others are scaled."""
        # Clipping by value leaves many elements of exactly the largest size.
        value = float(self._final.abs().max())
        cut = self._final.abs() >= value * (1 - 1e-6)
        rest = ~cut
        power = float(self._summed[rest].square().sum())
        if int(cut.sum()) < 2 or power == 0.0:
            return False
        # κ from the elements that are not cut tells how large the cut ones were before.
        scale = float(self._final[rest] @ self._summed[rest]) / power
        uncut = (scale * self._summed).abs()
        # Every cut element must have been at least that large, and at least one must have been larger.
        if not bool((uncut[cut] > value * (1 - tolerance)).all()) or not bool((uncut > value * (1 + tolerance)).any()):
            return False
        # The elements that are not cut must be a multiple of H.
        left, whole = self._left_over(scale)[:, rest].sum(1).tolist()
        return math.sqrt(left / max(whole, 1e-300)) <= tolerance
