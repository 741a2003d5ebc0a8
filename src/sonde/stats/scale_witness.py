"""Was the gradient only scaled? κ, the residual, and what else has been done to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class ScaleReading:
    """How the final gradient relates to the sum of the pieces' gradients, on the witness's elements.

    Attributes:
        scale: κ = ⟨F, H⟩/⟨H, H⟩; None when either is 0.
        residual: |F − κH|/|F|, the part that scaling does not explain, of all together or of one parameter with enough
            elements, whichever is larger; None when either is 0.
        kind: "scaled" within the tolerance; "clipped by value" when the rest is a multiple and the largest are all cut
            at one value; "zero"; otherwise "changed".
    """

    scale: float | None
    residual: float | None
    kind: Literal["scaled", "clipped by value", "zero", "changed"]


_ADDITIONS_IN_TOLERANCE = 16
_ENOUGH_ELEMENTS = 16
_NOT_DENORMAL = 1e-30


def _relative(left: Tensor, whole: Tensor) -> float:
    """|left|/|whole|; 0 where too few elements, or too small ones, would make rounding look like a change."""
    norm = float(whole.norm())
    return float(left.norm()) / norm if len(whole) >= _ENOUGH_ELEMENTS and norm > _NOT_DENORMAL else 0.0


def rounding_of_sums(tolerance: float, n_additions: float) -> float:
    """The residual that rounding explains after many additions: it grows as their root, as a random walk does.

    Args:
        tolerance: what it is up to 16 additions.
        n_additions: gradients that were added up, one after the other, in the gradient's own dtype.
    """
    return tolerance * math.sqrt(max(n_additions / _ADDITIONS_IN_TOLERANCE, 1.0))


def read_scale(final: Tensor, summed: Tensor, *, tolerance: float, sizes: Sequence[int] = ()) -> ScaleReading:
    """Compare the optimizer's gradient F with the sum H of the pieces' gradients.

    Args:
        final: elements of F, float64 on the CPU; [witness].
        summed: the same elements of H, summed over pieces and ranks; [witness].
        tolerance: the residual that rounding alone explains.
        sizes: how many elements each parameter has, in order: a change to one whose gradient is small beside the
            others' counts as much.

    Returns:
        A `ScaleReading`.
    """
    power, final_power = float(summed @ summed), float(final @ final)
    if power == 0.0 or final_power == 0.0:
        return ScaleReading(None, None, "zero")
    scale = float(final @ summed) / power
    left_over = final - scale * summed
    residual = float(left_over.norm()) / final_power**0.5
    of_parameters = zip(left_over[: sum(sizes)].split(list(sizes)), final[: sum(sizes)].split(list(sizes)), strict=True)
    residual = max(residual, *(_relative(left, whole) for left, whole in of_parameters), 0.0)
    if residual <= tolerance:
        return ScaleReading(scale, residual, "scaled")
    cut = final.abs() >= final.abs().max() * (1 - 1e-6)
    rest = ~cut
    if int(cut.sum()) >= 2 and bool(rest.any()) and (rest_power := float(summed[rest] @ summed[rest])) > 0.0:
        of_rest = float(final[rest] @ summed[rest]) / rest_power
        left = float((final[rest] - of_rest * summed[rest]).norm()) / max(float(final[rest].norm()), 1e-300)
        if left <= tolerance:
            return ScaleReading(scale, residual, "clipped by value")
    return ScaleReading(scale, residual, "changed")
