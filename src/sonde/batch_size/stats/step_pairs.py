"""Two consecutive steps as the two pieces of one virtual window: a biased fallback where nothing else shows noise.

The gradients G₁ and G₂ of two consecutive windows, of n₁ and n₂ effective units, are taken for two pieces of equal
weight. The equations of `noise_scale.py` then give

    tr Σ ≈ |G₂ − G₁|²/(1/n₁ + 1/n₂)          |G|² ≈ ⟨G₁, G₂⟩

The step in between moves the weights, which biases both. `docs/batch-size.md` derives by how much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.batch_size.stats.noise_scale import PieceSums

IN_WORDS = "biased: read from consecutive steps, so the true B_simple is probably smaller"
"""What every reading of such pairs says."""
IN_SHORT = "biased, probably smaller"
"""The same beside a number in a figure or a tile."""
ALERT = f"the noise scale is {IN_WORDS}. Accumulate gradients over 2 or more micro-batches to avoid the bias"
"""The alert about such readings."""


def window_noun(n: float, *, in_pairs: bool) -> str:
    """What n measured windows are called: where consecutive steps are compared, every count is of pairs.

    Example:
        >>> window_noun(1, in_pairs=False), window_noun(20, in_pairs=True)
        ('window', 'pairs of windows')
    """
    if in_pairs:
        return "pair of windows" if n == 1 else "pairs of windows"
    return "window" if n == 1 else "windows"


@dataclass(frozen=True)
class StepProducts:
    """What is known of one window's gradient F beyond its norm: products of sketches, for each parameter group.

    Attributes:
        own: |s|² of the sketch s of F, [groups]. Its mean over signs is |F|².
        with_first: ⟨s₁, s⟩ with the sketch of the window before, [groups]; None in the first window of a pair.
    """

    own: Sequence[float]
    with_first: Sequence[float] | None = None


@dataclass(frozen=True)
class Step:
    """One window of a pair.

    Attributes:
        sq_norm: |F|² per parameter group, [groups].
        products: of its sketch.
        scale: κ, of F over the sum h of the window's pieces.
        effective_units: its effective number of units.
        weight: w, of its piece in the loss.
    """

    sq_norm: Sequence[float]
    products: StepProducts
    scale: float
    effective_units: float
    weight: float = 1.0


@dataclass(frozen=True)
class StepPair:
    """The sums of the virtual window whose two pieces are two consecutive windows, in the units of `estimate_groups`.

    Attributes:
        sq_norm_over_weight: |G₁|² + |G₂|² per parameter group, [groups].
        sq_norm_big: |G₁ + G₂|²/4 per parameter group, [groups].
        weight_over_units: 1/n₁ + 1/n₂.
    """

    sq_norm_over_weight: Sequence[float]
    sq_norm_big: Sequence[float]
    weight_over_units: float

    SCALE = 0.5
    """The virtual window's gradient over the sum of its two pieces: it is their mean."""

    def pieces(self, sq_norm_over_weight: float) -> PieceSums:
        """The sums that the noise scale is solved from, for one group's |G₁|² + |G₂|². Both pieces have the weight 1.

        With equal weights, the estimate of |G|² is the product alone: no norm enters it, and so no noise of a norm.
        """
        return PieceSums(sq_norm_over_weight, 2.0, self.weight_over_units, self.weight_over_units, 2)


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=5e-3)


def common_scales(first: Step, second: Step) -> tuple[float, float] | None:
    """What to divide each F by, so that both are of one size; None if the data do not show it.

    A clip or a loss scale multiplies F by κ and leaves h alone, so F/κ = h has one size in both windows, if their
    weights are equal. Where weights differ and losses are sums that are divided by the weight afterwards, κ goes as
    1/w, and F/(κw) = h/w has one size. Where weights differ and κ does not, losses may be means, of which h has one
    size, or sums, of which h/w has: that cannot be seen.
    """
    if _same(first.weight, second.weight):
        return first.scale, second.scale
    scales = first.scale * first.weight, second.scale * second.weight
    return scales if _same(*scales) else None


def join_steps(first: Step, second: Step) -> StepPair | None:
    """Take two consecutive windows for the two pieces of one.

    |G₂ − G₁|² is read as |s₂ − s₁|²: the sketch is linear. So tr Σ is never negative, and its error is a part of tr Σ
    itself, however little noise there is.

    Args:
        first: the earlier window.
        second: the later one, with `with_first`.

    Returns:
        None where the sizes of the two gradients cannot be compared.
    """
    assert second.products.with_first is not None
    if (scales := common_scales(first, second)) is None:
        return None
    one, two = scales
    norms = _table(first.sq_norm) / one**2 + _table(second.sq_norm) / two**2
    difference = (
        _table(first.products.own) / one**2
        + _table(second.products.own) / two**2
        - 2 * _table(second.products.with_first) / (one * two)
    ).clamp(min=0.0)  # |s₂ − s₁|² itself is not negative: only rounding can be
    return StepPair(
        sq_norm_over_weight=norms.tolist(),
        sq_norm_big=((2 * norms - difference) / 4).tolist(),  # |G₁ + G₂|² = 2 (|G₁|² + |G₂|²) − |G₂ − G₁|²
        weight_over_units=1 / first.effective_units + 1 / second.effective_units,
    )


def _table(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.float64, device="cpu")
