"""Sums over ranks of numbers that are kept as pairs of fp32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sonde.parallel.float_pairs import FloatPairs, finite_or_zero


def spread_for_sum(pairs: FloatPairs, n_ranks: int) -> Tensor:
    """Both halves as one plain tensor that ranks can sum, [2, …]; the pairs have its memory.

    A sum of fp32 numbers is exact if the bits that it may reach fit. So the upper halves keep fewer bits here, by as
    many as the sum can grow and 8 for ranks whose numbers are of different size; the lower halves take the others. If
    the ranks' numbers are within 256 times of each other, the sum loses about n_ranks · 2⁻³⁹ of itself. Further apart,
    it loses at most 2⁻²⁴, as fp32 does.

    Args:
        pairs: this rank's numbers.
        n_ranks: ranks of the sum; 1 for a maximum over ranks, which compares upper halves alone.
    """
    if n_ranks > 1:
        upper = _upper_bits(pairs.hi, _growth_bits(n_ranks) + 8)
        lower = finite_or_zero((pairs.hi - upper) + pairs.lo)
    else:
        upper, lower = pairs.hi, torch.zeros_like(pairs.lo)
    if pairs.both is None:
        pairs.both = torch.empty(2, *pairs.shape, dtype=torch.float32, device=pairs.device)
    both = pairs.both
    both[0].copy_(upper)
    both[1].copy_(lower)
    pairs.hi, pairs.lo = both[0], both[1]
    return both


def exact_bits(n_ranks: int) -> int:
    """Bits of whole numbers, as large on one rank as on another, whose sum over ranks is exact in pairs."""
    return 24 - 8 - _growth_bits(n_ranks) + 24 - _growth_bits(n_ranks)


def _growth_bits(n_ranks: int) -> int:
    return math.ceil(math.log2(n_ranks))


def _upper_bits(x: Tensor, n_dropped: int) -> Tensor:
    scaled = x * (2.0**n_dropped + 1)
    upper = scaled - (scaled - x)
    return torch.where(torch.isfinite(upper), upper, x)  # near the largest fp32 number, the product overflows
