"""What may happen to a gradient between backward and the optimizer without anyone having changed it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expectation:
    """How far the sum of a window's gradients may be off by rounding, and what to blame for more.

    Attributes:
        tolerance: the relative residual that rounding alone explains in sums of 16 pieces or fewer.
        floor: elements up to this size may be lost to underflow.
        blame: what may have changed a gradient, likeliest first.
    """

    tolerance: float
    floor: float
    blame: str
