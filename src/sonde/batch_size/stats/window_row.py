"""The numbers that one window measured, and whether they can be used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sonde.batch_size.stats.comparisons import NeighbourSums, OrderSums, Repeats
from sonde.batch_size.stats.example_sums import ExampleSums
from sonde.batch_size.stats.expert_sums import why_experts_unusable
from sonde.batch_size.stats.piece_class import PieceClass, WitnessedPieces
from sonde.batch_size.stats.scale_witness import ScaleReading

_ROUNDING_OF_SQUARES = 1e-2
"""Relative rounding allowed in |F|²: squares are in fp32, and gradients may have been added up in 16 bits."""

_LEAST_IN_FP32 = 1e-3
"""Smallest part of the pieces' squares that is their noise, where sums are in fp32: 10,000 parameters lose 1e-5."""

_MIN, _MAX = 1e-100, 1e100
"""Range in which weights, units and squares can be multiplied without overflow or underflow in float64."""


CLASSES = {"experts": why_experts_unusable}
"""The classes of parameters that other pieces feed than the rest, and what makes a window unusable for each."""

WITHOUT_EXAMPLES = "Accumulate gradients over 2 or more micro-batches, or train on 2 or more data-parallel ranks"
"""What to do about a window of one piece whose examples are not read."""


@dataclass(frozen=True)
class Drop:
    """Why a window was left out: a short name, and a message with the cause and what to do."""

    kind: str
    reason: str


@dataclass(frozen=True)
class WindowRow(WitnessedPieces):
    """Everything one window measured in one metric. Its own sums are those of all parameters, or of all but experts.

    Attributes:
        n_units: units as counted, not effective.
        problems: why its pieces cannot be used; empty for a sound window.
        explanations: the likely causes if its gradient turns out to be changed.
        witness_small: Σ |h_k|²/w_k over the witness's elements only.
        witness_ranks: Σ_r |R_r|²/W_r over these elements; R_r and W_r are the sums of h_k and w_k within rank r.
        rank_sq_weight_over_units: Σ_r (Σ_{k in r} w_k²/n_k)/W_r.
        witness_sizes: how many elements the witness has of each parameter it reads, by index; zeros follow the last.
        neighbours: neighbouring pieces compared with distant ones.
        order: which of two pieces has the larger gradient.
        repeats: pieces and ranks with the same gradient.
        further_units: its size in each further unit.
        n_ranks_declaring: ranks that take only declared pieces by now.
        ran_forward: whether the model's forward ran on a rank that had no piece.
        stepped_alone: whether an optimizer stepped on a rank that had neither a forward nor a piece.
        examples: the window's single examples; None if it is to be solved from its pieces.
        apart: classes of parameters that other pieces feed, by name: experts. The row's own numbers are of the rest.
        whole: Σ |h_k|²/w_k and |F|² of the whole model, in a metric in which squares of groups do not add up to them;
            None otherwise.
        in_fp32: whether its sums were kept in fp32, on a device without fp64.
    """

    n_units: float
    problems: Sequence[Drop]
    explanations: Sequence[Drop]
    witness_small: float
    witness_ranks: float
    rank_sq_weight_over_units: float
    witness_sizes: Mapping[int, int]
    neighbours: NeighbourSums = field(default_factory=NeighbourSums)
    order: OrderSums = field(default_factory=OrderSums)
    repeats: Repeats = field(default_factory=Repeats)
    further_units: Sequence[float] = ()
    n_ranks_declaring: int = 0
    ran_forward: bool = False
    stepped_alone: bool = False
    examples: ExampleSums | None = None
    apart: Mapping[str, WitnessedPieces] = field(default_factory=dict)
    whole: tuple[float, float] | None = None
    in_fp32: bool = False


def why_unusable(
    row: WindowRow,
    scale: ScaleReading,
    apart: Mapping[str, ScaleReading],
    *,
    least_sq_norm: float,
    likely_cause: str,
) -> Drop | None:
    """Judge a window.

    Args:
        row: the numbers it measured.
        scale: how its gradient relates to the sum of its pieces, on the witness's elements.
        apart: the same for each class apart, by name.
        least_sq_norm: below it, squares of gradients have lost digits to underflow.
        likely_cause: named in the message when the gradient was changed by something unknown.

    Returns:
        Why it cannot be used; None when it can.
    """
    drop = _pieces_unusable(row) or _gradient_unusable(row, scale, least_sq_norm, likely_cause)
    for name, pieces in row.apart.items():
        if drop is None and (why := CLASSES[name](pieces, apart[name])) is not None:
            drop = Drop(*why)
    return drop


def _pieces_unusable(row: WindowRow) -> Drop | None:
    if row.problems:
        return row.problems[0]
    if row.n_pieces == 0 and row.stepped_alone and not row.ran_forward:
        return Drop("step_alone", "an optimizer stepped without a backward, as where it makes its state")
    if row.n_pieces == 0 and row.n_ranks_declaring:
        return Drop(
            "no_backward",
            "no piece was declared since the last window: either the same window was ended twice (call probe.step() or "
            "probe.clip_grad_norm_() once per optimizer step), or its backwards ran outside 'with probe.piece():', "
            "where they do not count once a piece was declared",
        )
    if row.n_pieces == 0:
        return Drop("no_backward", _why_no_backward(row))
    if row.examples is None and row.n_pieces < 2:
        return Drop(
            "single_piece",
            f"the window held a single piece, and a single piece cannot separate noise from signal. {WITHOUT_EXAMPLES}",
        )
    if not all(_MIN < x < _MAX for x in (row.weight, row.weight_over_units, row.sq_weight_over_units)):
        return Drop("weights", "weights or units are too large or too small to add up: scale all of them alike")
    if row.examples is not None and row.examples.n_pieces < 2:
        message = f"the window held a single example, which cannot separate noise from signal. {WITHOUT_EXAMPLES}"
        return Drop("single_example", message)
    pieces, each = (row, "piece") if row.examples is None else (row.examples, "example")
    if pieces.one_has_all:
        return Drop(
            "weights", f"one {each} has all the weight of its window, so no other {each} can be compared with it"
        )
    return None


def _why_no_backward(row: WindowRow) -> str:
    """The likeliest cause of a window without any piece, where no rank declares pieces."""
    if not row.ran_forward:
        return (
            "neither a forward nor a backward of the model was seen in this window: the same window was ended twice. "
            "Call probe.step() or probe.clip_grad_norm_() once per optimizer step"
        )
    if row.big:
        return (
            "measured parameters have gradients that no backward of this window has added: gradients are set by hand, "
            "as those of torch.autograd.grad, which no hook sees. Call loss.backward()"
        )
    return (
        "the model's forward ran, and no backward added to the gradients of measured parameters: other parameters are "
        "trained now, such as another adapter: attach to each"
    )


def _gradient_unusable(row: WindowRow, scale: ScaleReading, least_sq_norm: float, likely_cause: str) -> Drop | None:
    big = row.big
    # |Σ h_k|² ≤ Σ w_k · Σ |h_k|²/w_k (Cauchy–Schwarz).
    largest_possible = row.small
    has_overflowed = math.isinf(big) and math.isfinite(largest_possible) and bool(row.witness_final.isfinite().all())
    if not math.isfinite(big) and not has_overflowed:
        return Drop("not_finite", "the gradient at the end of the window was not finite")
    if max(big, largest_possible) > _MAX:
        return Drop("out_of_range", "squares of the gradient leave the range of fp32: scale the loss")
    # The witness keeps elements, not squares: it still shows a gradient whose squares have all become 0.
    squares_are_lost = scale.kind != "zero" and not (big and largest_possible)
    if squares_are_lost or 0 < min(big, largest_possible) < least_sq_norm:
        return Drop(
            "vanishing",
            "the gradient is so small that its squares vanish in fp32: multiply the loss by a constant, "
            "or stop if nothing is left to learn",
        )
    if scale.kind == "zero" and big and not row.witness_sum.any():
        return Drop("not_seen", "the few hundred gradient elements that are compared were all 0 in this window")
    if not (big or largest_possible):
        return Drop("no_gradient", "no piece had a gradient, as where every advantage is 0 or every target is masked")
    if scale.kind == "zero":
        return Drop(
            "zero",
            "the gradient was 0 at the end of the window: was it zeroed, taken by a hook in backward, or clipped to 0, "
            "before probe.step()?",
        )
    if scale.kind == "clipped by value":
        return Drop(
            "changed", "the gradient was clipped by value before probe.step(): clip by norm, or clip after probe.step()"
        )
    if scale.kind == "changed" and row.explanations:
        return row.explanations[0]
    if scale.kind == "changed":
        return Drop("changed", f"the gradient is not a multiple of the sum of its pieces: {likely_cause}")
    assert scale.scale is not None
    if big / scale.scale**2 > largest_possible * (1 + _ROUNDING_OF_SQUARES):
        return Drop(
            "changed",
            f"the gradient is larger than the sum of its pieces can be, in elements that are not compared: "
            f"{likely_cause}",
        )
    if row.in_fp32 and _is_lost_in_fp32(row.examples or row, scale.scale):
        return Drop(
            "precision",
            "pieces differ by too little for sums in fp32, and this device has no fp64: do they hold the same data? "
            "If not, batches are far larger than B_simple",
        )
    return None


def _is_lost_in_fp32(pieces: PieceClass, scale: float) -> bool:
    """Whether rounding hides the noise of pieces, or of examples: too small a part of S is left in S − B."""
    return pieces.small - pieces.big / scale**2 < _LEAST_IN_FP32 * pieces.small
