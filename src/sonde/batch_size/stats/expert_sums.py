"""The numbers that one window measured of experts, which several ranks feed together.

A backward sends the tokens of E ranks to each expert. So the pieces of experts are fewer and larger: with r over the E
ranks, piece k has the weight w_k = Σ_r w_rk and n_k = w_k²/Σ_r(w_rk²/n_rk) effective units. Then Σ w_k²/n_k, and with
it v, are those of all other parameters; u is smaller. A unit none of whose tokens reach an expert adds nothing to that
expert's gradient. The expert's gradients scatter the more: uneven routing shows in tr Σ.
"""

from __future__ import annotations

import math
from dataclasses import replace

from sonde.batch_size.stats.piece_class import WitnessedPieces
from sonde.batch_size.stats.scale_witness import ScaleReading

_KINDS = ("scaled", "zero", "clipped by value", "changed")
"""What may have become of a gradient, the worst last."""
_ROUNDING_OF_SQUARES = 1e-2


def why_experts_unusable(experts: WitnessedPieces, scale: ScaleReading) -> tuple[str, str] | None:
    """Why the window cannot be used for experts: a short name, and a message; None when it can."""
    if experts.n_pieces < 2:
        return (
            "single_expert_piece",
            "the experts had a single piece in the window, since one backward of all ranks feeds them all: "
            "accumulate gradients over 2 or more micro-batches, or spread the experts over fewer ranks",
        )
    if experts.one_has_all:
        return ("weights", "one piece of the experts has all the weight of its window")
    small, big = experts.small, experts.big
    if not math.isfinite(small) or not math.isfinite(big):
        return ("not_finite", "the experts' gradient was not finite")
    if scale.kind == "zero":
        if not (small or big):
            return None  # no token reached a trained expert
        return ("not_seen", "the elements of experts' gradients that are compared were all 0 in this window")
    if scale.kind != "scaled":
        return (
            "changed",
            "the experts' gradient is not a multiple of the sum of their pieces: did something change it, or do "
            "experts get tokens from other ranks than those over which they are spread?",
        )
    assert scale.scale is not None
    if big / scale.scale**2 > small * (1 + _ROUNDING_OF_SQUARES):
        return ("changed", "the experts' gradient is larger than the sum of their pieces can be")
    return None


def joint_scale(own: ScaleReading, experts: ScaleReading) -> ScaleReading:
    """One reading of a model's parameters and of its experts, whose κ may differ. κ is that of the other parameters."""
    if experts.kind == "zero":
        return own
    residuals = [r.residual for r in (own, experts) if r.residual is not None]
    return replace(
        own,
        residual=max(residuals, default=None),
        kind=max(own.kind, experts.kind, key=_KINDS.index),
        changed=own.changed | experts.changed,
        sound=own.sound | experts.sound,
        absent=own.absent & experts.absent,
    )
