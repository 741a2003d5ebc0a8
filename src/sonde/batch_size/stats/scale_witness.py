"""Was the gradient only scaled? κ, the residual, and what else has been done to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class RoundingTolerance:
    """How far the sum of a window's gradients may be off by rounding, and what to blame for more.

    Attributes:
        tolerance: the relative residual that rounding alone explains in sums of 16 pieces or fewer.
        floor: elements up to this size may be lost to underflow.
        blame: what may have changed a gradient, likeliest first.
    """

    tolerance: float
    floor: float
    blame: str


@dataclass(frozen=True)
class ScaleReading:
    """How the final gradient relates to the sum of the pieces' gradients, on the witness's elements.

    Attributes:
        scale: κ = ⟨F, H⟩/⟨H, H⟩; None when either is 0.
        residual: the part of F that is not κH, relative to the size of F and of what was added up to it, of all
            together or of one parameter, whichever is larger; None when either is 0.
        kind: "scaled" within the tolerance; "clipped by value" when the rest is a multiple and the largest are all cut
            at one value; "zero"; otherwise "changed".
        changed: parameters that were changed, by index.
        sound: those compared that were not.
        absent: those that had no gradient to compare.
    """

    scale: float | None
    residual: float | None
    kind: Literal["scaled", "clipped by value", "zero", "changed"]
    changed: frozenset[int] = frozenset()
    sound: frozenset[int] = frozenset()
    absent: frozenset[int] = frozenset()


_ADDITIONS_IN_TOLERANCE = 16
_MOST_ROUNDING = 0.05  # beyond it a sum has stopped adding up, and is no multiple of what it should be
_NOT_DENORMAL = 1e-30


def rounding_of_sums(tolerance: float, n_additions: float) -> float:
    """The residual that rounding explains after many additions, where all of them err to the same side.

    Args:
        tolerance: what it is up to 16 additions.
        n_additions: gradients that were added up, one after the other, in the gradient's own dtype.
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
        squares: Σ h_k² of each element, by which rounding is measured where the pieces nearly cancel; [witness].
        sizes: how many elements each parameter has, in order, by index: a change to one whose gradient is small beside
            the others' counts as much. One parameter in all by default.
        floor: elements up to this size may have been lost to underflow.

    Returns:
        A `ScaleReading`.
    """
    power, final_power = float(summed @ summed), float(final @ final)
    if power == 0.0 or final_power == 0.0:
        return ScaleReading(None, None, "zero")
    scale = float(final @ summed) / power
    sizes = sizes if sizes is not None else {0: len(final)}
    parts = _Parts(final, summed, summed.square() if squares is None else squares, sizes, floor / tolerance)
    residual = parts.residual(scale)
    residuals = parts.residuals(scale)
    absent = frozenset(sizes) - residuals.keys()
    worst = max(residual, *residuals.values(), 0.0)
    changed = _beyond(residuals, sizes, tolerance)
    if residual <= tolerance and not changed:
        return ScaleReading(scale, worst, "scaled", sound=frozenset(residuals), absent=absent)
    # What was changed weighs on κ: to find it, take the κ that most of the gradient has.
    changed = _beyond(parts.residuals(parts.usual_scale()), sizes, tolerance)
    kind: Literal["clipped by value", "changed"] = "clipped by value" if parts.is_clipped(tolerance) else "changed"
    return ScaleReading(scale, worst, kind, changed, frozenset(residuals) - changed, absent)


def _beyond(residuals: Mapping[int, float], sizes: Mapping[int, int], tolerance: float) -> frozenset[int]:
    """Parameters that rounding does not explain: of few elements it explains more, as it averages out less."""
    return frozenset(i for i, r in residuals.items() if not r <= tolerance * (1.0 + 4.0 / math.sqrt(sizes[i])))


class _Parts:
    """Elements of F and H by parameter."""

    def __init__(
        self, final: Tensor, summed: Tensor, squares: Tensor, sizes: Mapping[int, int], least_size: float
    ) -> None:
        self._final, self._summed, self._squares, self._sizes = final, summed, squares, sizes
        self._least_square = least_size**2

    def _left_over(self, scale: float) -> tuple[Tensor, Tensor]:
        """(F − κH)², and the square of what rounding is relative to: F, κH or what was added up to it."""
        left = (self._final - scale * self._summed).square()
        added = scale**2 * torch.maximum(self._summed.square(), self._squares)
        return left, torch.maximum(self._final.square(), added) + self._least_square

    def residual(self, scale: float) -> float:
        """Of all elements together."""
        left, whole = self._left_over(scale)
        return math.sqrt(float(left.sum()) / max(float(whole.sum()), 1e-300))

    def residuals(self, scale: float) -> dict[int, float]:
        """Of each parameter that has a gradient; NaN where that is not finite."""
        left, whole = self._left_over(scale)
        n, sizes = sum(self._sizes.values()), list(self._sizes.values())
        sums = zip(self._sizes.items(), left[:n].split(sizes), whole[:n].split(sizes), strict=True)
        of_parameters = ((i, float(a.sum()), float(b.sum()), size * self._least_square) for (i, size), a, b in sums)
        return {i: math.sqrt(a / b) for i, a, b, floor in of_parameters if not b - floor <= _NOT_DENORMAL**2}

    def usual_scale(self) -> float:
        """The median of the parameters' own κ: what most of them have, however large the others' gradients are."""
        n, sizes = sum(self._sizes.values()), list(self._sizes.values())
        pairs = zip(self._final[:n].split(sizes), self._summed[:n].split(sizes), strict=True)
        ratios = sorted(float(f @ h) / power for f, h in pairs if (power := float(h @ h)) > 0.0)
        return ratios[len(ratios) // 2] if ratios else 0.0

    def is_clipped(self, tolerance: float) -> bool:
        """Whether all that would be larger than a value are cut at it, and the rest is one multiple."""
        value = float(self._final.abs().max())
        cut = self._final.abs() >= value * (1 - 1e-6)
        rest = ~cut
        power = float(self._summed[rest].square().sum())
        if int(cut.sum()) < 2 or power == 0.0:
            return False
        scale = float(self._final[rest] @ self._summed[rest]) / power
        uncut = (scale * self._summed).abs()
        if not bool((uncut[cut] > value * (1 - tolerance)).all()) or not bool((uncut > value * (1 + tolerance)).any()):
            return False
        left, whole = (x[rest].sum() for x in self._left_over(scale))
        return math.sqrt(float(left) / max(float(whole), 1e-300)) <= tolerance
