"""Do the pieces hold different data? Noise seen within ranks beside noise seen between them."""

from __future__ import annotations

import math

_ROUNDING_OF_SQUARES = 1e-5
_CERTAIN_AFTER, _CERTAIN_FACTOR = 5, 50.0
_LIKELY_AFTER, _LIKELY_FACTOR = 30, 3.0


def same_data(
    windows: int,
    trace_cov: float | None,
    grad_sq: float | None,
    *,
    small_over_unit: float,
    rounding: float,
    consistency: float | None,
) -> str | None:
    """What is wrong with the data, from averages over windows.

    The consistency of sound data scatters by some 10 % after 30 windows of 2 ranks; data that are the same on all ranks
    give infinity, data that are the same in all micro-batches give 0.

    Args:
        windows: windows averaged.
        trace_cov: running tr Σ.
        grad_sq: running |G|².
        small_over_unit: u, the mean of 1/n_k over pieces: the noise of a piece over that of one unit.
        rounding: the part of a gradient that rounding may be, of its sums over pieces.
        consistency: tr Σ within ranks over tr Σ between ranks; None where it cannot be measured.

    Returns:
        The cause and the way out; None when nothing looks wrong.
    """
    if windows < _CERTAIN_AFTER or trace_cov is None or grad_sq is None:
        return None
    # Beside the squared norm of a piece, its noise is what rounding of norms and of sums may be.
    if small_over_unit * trace_cov <= max(_ROUNDING_OF_SQUARES, 0.1 * rounding) * abs(grad_sq):
        return (
            "all pieces have the same gradient: the same data on all ranks and in all micro-batches? "
            "Check the sampler's rank, its seed and set_epoch"
        )
    if consistency is None:
        return None
    factor = _LIKELY_FACTOR if windows >= _LIKELY_AFTER else _CERTAIN_FACTOR
    if consistency > factor:
        less = "infinitely less" if math.isinf(consistency) else f"{consistency:.3g}× less"
        return (
            f"between ranks gradients differ {less} than within them: the same data on all ranks? "
            "Check that the sampler knows the rank"
        )
    if consistency < 1 / factor:
        return (
            f"gradients differ {1 / max(consistency, 1e-12):.3g}× more between ranks than within them: the same data "
            "in several micro-batches of a rank, or ranks that see different kinds of data?"
        )
    return None
