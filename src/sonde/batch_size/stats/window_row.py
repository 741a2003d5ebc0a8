"""The numbers that one window measured, their scale κ, whether they can be used, and what they are solved to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sonde.batch_size.stats.comparisons import Numbers, ProjectedWindow
from sonde.batch_size.stats.noise_scale import Pieces, WindowEstimate


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


_ROUNDING_OF_SQUARES = 1e-2
"""Relative rounding allowed in |F|²: squares are in fp32, and gradients may have been added up in 16 bits."""
_LEAST_IN_FP32 = 1e-3
"""Smallest part of the pieces' squares that is their noise, where sums are in fp32: 10,000 parameters lose 1e-5."""
_MIN, _MAX = 1e-100, 1e100
"""Range in which weights, units and squares can be multiplied without overflow or underflow in float64."""

WITHOUT_EXAMPLES = "Accumulate gradients over 2 or more micro-batches, or train on 2 or more data-parallel ranks"
"""What to do about a window of one piece whose examples are not read."""
NO_BACKWARD = (
    "no backward added to the gradients of measured parameters since the last window. Either the same window was ended "
    "twice (call probe.step() or probe.clip_grad_norm_() once per optimizer step), or its backwards ran outside 'with "
    "probe.piece():' after others were declared, or gradients are set by hand, as those of torch.autograd.grad (call "
    "loss.backward()), or other parameters are trained now, such as another adapter (attach to each)"
)


@dataclass(frozen=True)
class Drop:
    """Why a window was left out: a short name, and a message with the cause and what to do."""

    kind: str
    reason: str


# What was measured.


@dataclass(frozen=True)
class ClassSums(Pieces):
    """Sums over all pieces of all ranks, of parameters that the same pieces feed: they have one κ.

    Attributes:
        sq_norm_over_weight: Σ |h_k|²/w_k per parameter group; float64, [groups].
        sq_norm_big: |F|² per parameter group; float64, [groups].
    """

    sq_norm_over_weight: Tensor
    sq_norm_big: Tensor

    @property
    def small(self) -> float:
        """S = Σw · Σ |h_k|²/w_k, of all groups. At least |Σ h_k|², by Cauchy–Schwarz."""
        return self.weight * float(self.sq_norm_over_weight.sum())

    @property
    def big(self) -> float:
        """|F|² of all groups."""
        return float(self.sq_norm_big.sum())

    def estimates(self, *, scale: float, to_unit: float) -> Tensor:
        """tr Σ and |G|² of each group; [2, groups].

        Args:
            scale: brings Σ h_k to the units of the estimates.
            to_unit: brings |F|² to these units.
        """
        return torch.stack(self.solve(self.sq_norm_over_weight, self.sq_norm_big * to_unit, scale=scale))


@dataclass(frozen=True)
class WitnessedSums(ClassSums):
    """Sums over pieces of which some elements were kept.

    Attributes:
        witness_sum: H = Σ h_k, 0 for elements of other classes; float64, [witness].
        witness_squares: Σ h_k² of each of these elements; [witness].
        witness_final: F, likewise; [witness].
    """

    witness_sum: Tensor
    witness_squares: Tensor
    witness_final: Tensor


@dataclass(frozen=True, kw_only=True)
class SumsApart(WitnessedSums):
    """Those of a class of parameters that other pieces feed than the rest, or that have a κ of their own, as experts.

    Attributes:
        likely_cause: what may have changed its gradient, if it is no multiple of the sum of its pieces.
    """

    likely_cause: str


@dataclass(frozen=True)
class ExampleSums(ClassSums):
    """Sums over all examples of a window: each is a piece of one unit. Squares are of the covered parameters alone.

    Attributes:
        of_pieces: Σ |h_k|²/w_k of the window's pieces, likewise of the covered parameters; [groups].
        n_covered: covered parameters.
        projected: random projections of Σ h_b, [projections].
        sq_projected: Σ_b |p_b|²/w_b of each example's own projections p_b.
        scores: whether examples in certain places of their batches are more alike than others, or opposed.
    """

    of_pieces: Tensor
    n_covered: int
    projected: Tensor
    sq_projected: float
    scores: Numbers = field(default_factory=dict)

    def projected_window(self) -> ProjectedWindow:
        """The window's mean gradient and what its examples say of the signal in it, both in projections."""
        mean = self.projected / self.weight
        _, grad_sq = self.solve(self.sq_projected, float(mean @ mean), scale=1 / self.weight)
        return ProjectedWindow(mean, grad_sq, self.v * self.sq_projected / self.weight)

    def excess_of_pieces(self, pieces: Pieces, *, scale: float) -> Numbers:
        """(p − e)/(p + e), with tr Σ p from the window's pieces and e from its examples, which have one expectation.

        It is at most 1 in size, so that no window outweighs the others.

        Args:
            pieces: of the window.
            scale: κ of the window.

        Returns:
            Nothing where pieces cannot be compared, or there is no noise.
        """
        if pieces.n_pieces < 2 or pieces.one_has_all:
            return {}
        big = self.big / scale**2
        p, _ = pieces.solve(float(self.of_pieces.sum()), big)
        e, _ = self.solve(float(self.sq_norm_over_weight.sum()), big)
        return {"excess": ((p - e) / (p + e), 1.0)} if p > 0 and e > 0 else {}


@dataclass(frozen=True)
class WindowRow(WitnessedSums):
    """Everything one window measured in one metric. Its own sums are those of the parameters in no class apart.

    Attributes:
        n_units: units as counted, not effective.
        problems: why its pieces cannot be used; empty for a sound window.
        explanations: the likely causes if its gradient turns out to be changed.
        witness_small: Σ |h_k|²/w_k over the witness's elements only.
        witness_ranks: Σ_r |R_r|²/W_r over these elements; R_r and W_r are the sums of h_k and w_k within rank r.
        rank_sq_weight_over_units: Σ_r (Σ_{k in r} w_k²/n_k)/W_r.
        witness_sizes: how many elements the witness has of each parameter it reads, by index; zeros follow the last.
        scores: what was compared of its pieces.
        same_ranks: pairs of ranks with the same gradient; None if ranks were not compared.
        further_units: its size in each further unit.
        n_ranks_declaring: ranks that take only declared pieces by now.
        stepped_alone: whether an optimizer stepped on a rank, and no rank had a forward or a piece.
        examples: the window's single examples; None if it is to be solved from its pieces.
        apart: the sums of each class apart, by its name.
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
    scores: Numbers = field(default_factory=dict)
    same_ranks: frozenset[tuple[int, int]] | None = None
    further_units: Sequence[float] = ()
    n_ranks_declaring: int = 0
    stepped_alone: bool = False
    examples: ExampleSums | None = None
    apart: Mapping[str, SumsApart] = field(default_factory=dict)
    whole: tuple[float, float] | None = None
    in_fp32: bool = False


# Whether it can be used.


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
    drop = _pieces_unusable(row) or _gradient_unusable(row, scale, "the gradient", least_sq_norm, likely_cause)
    if drop is not None and drop.kind == "changed" and row.explanations:
        return row.explanations[0]
    measured, kappa = row.examples or row, scale.scale or 1.0
    # Rounding hides the noise of pieces, or of examples, where too small a part of S is left in S − B.
    if drop is None and row.in_fp32 and measured.small - measured.big / kappa**2 < _LEAST_IN_FP32 * measured.small:
        return Drop(
            "precision",
            "pieces differ by too little for sums in fp32, and this device has no fp64: do they hold the same data? "
            "If not, batches are far larger than B_simple",
        )
    for name, pieces in row.apart.items():
        drop = drop or _class_unusable(name, pieces, apart[name])
    return drop


def _pieces_unusable(row: WindowRow) -> Drop | None:
    if row.problems:
        return row.problems[0]
    if row.n_pieces == 0 and row.stepped_alone:
        return Drop("step_alone", "an optimizer stepped without a backward, as where it makes its state")
    if row.n_pieces == 0:
        return Drop("no_backward", NO_BACKWARD)
    pieces, each = (row, "piece") if row.examples is None else (row.examples, "example")
    if pieces.n_pieces < 2:
        message = f"the window held a single {each}, which cannot separate noise from signal. {WITHOUT_EXAMPLES}"
        return Drop(f"single_{each}", message)
    if not all(_MIN < x < _MAX for x in (row.weight, row.weight_over_units, row.sq_weight_over_units)):
        return Drop("weights", "weights or units are too large or too small to add up: scale all of them alike")
    if pieces.one_has_all:
        return Drop(
            "weights", f"one {each} has all the weight of its window, so no other {each} can be compared with it"
        )
    return None


def _class_unusable(name: str, pieces: SumsApart, scale: ScaleReading) -> Drop | None:
    if pieces.n_pieces < 2:
        return Drop(
            f"single_piece_of_{name}",
            f"the {name} had a single piece in the window, since one backward of all ranks feeds them all: accumulate "
            f"gradients over 2 or more micro-batches, or spread the {name} over fewer ranks",
        )
    if pieces.one_has_all:
        return Drop("weights", f"one piece of the {name} has all the weight of its window")
    drop = _gradient_unusable(pieces, scale, f"the {name}' gradient", 0.0, pieces.likely_cause)
    return drop if drop is None or drop.kind != "no_gradient" else None  # no unit may have reached them


def _gradient_unusable(
    pieces: WitnessedSums, scale: ScaleReading, gradient: str, least_sq_norm: float, likely_cause: str
) -> Drop | None:
    big, small = pieces.big, pieces.small
    has_overflowed = math.isinf(big) and math.isfinite(small) and bool(pieces.witness_final.isfinite().all())
    if (not math.isfinite(big) and not has_overflowed) or math.isnan(small):
        return Drop("not_finite", f"{gradient} at the end of the window was not finite")
    if max(big, small) > _MAX:
        return Drop("out_of_range", f"squares of {gradient} leave the range of fp32: scale the loss")
    # The witness keeps elements, not squares: it still shows a gradient whose squares have all become 0.
    squares_are_lost = scale.scale is not None and not (big and small)
    if squares_are_lost or 0 < min(big, small) < least_sq_norm:
        return Drop(
            "vanishing",
            f"{gradient} is so small that its squares vanish in fp32: multiply the loss by a constant, or stop if "
            "nothing is left to learn",
        )
    if not (big or small):
        return Drop("no_gradient", "no piece had a gradient, as where every advantage is 0 or every target is masked")
    if scale.scale is None and big and not pieces.witness_sum.any():
        return Drop("not_seen", f"the few hundred elements of {gradient} that are compared were all 0 in this window")
    if scale.scale is None:
        return Drop(
            "zero",
            f"{gradient} was 0 at the end of the window: was it zeroed, taken by a hook in backward, or clipped to 0, "
            "before probe.step()?",
        )
    # More than the sum of the pieces can be: a change is in elements that are not compared.
    if not scale.is_sound or big / scale.scale**2 > small * (1 + _ROUNDING_OF_SQUARES):
        return Drop(
            "changed",
            f"{gradient} is not a multiple of the sum of its pieces: {likely_cause}. If it was clipped by value before "
            "probe.step(): clip by norm, or clip after probe.step()",
        )
    return None


# What it is solved to.


@dataclass(frozen=True)
class SolvedWindow:
    """Unbiased estimates from one window, in units of the rank-averaged sum of its pieces.

    Attributes:
        estimates: tr Σ and |G|² of the whole model and, after it, of each parameter group; float64, [2, 1 + groups].
            The whole is the sum of the groups, except in a metric in which squares of groups do not add up.
        norm: of the gradient as the rank average, before any clip.
        effective_units: effective number of units in the window (Kish), 1/v.
        u: Σ a_k/n_k, the mean of 1/n_k over the pieces; 1 where each example is a piece.
        compared: how much its pieces and ranks differ, for `Dependence`.
    """

    estimates: Tensor
    norm: float
    effective_units: float
    u: float
    compared: Numbers = field(default_factory=dict)

    @property
    def total(self) -> WindowEstimate:
        """tr Σ and |G|² of the whole model."""
        return WindowEstimate(*self.estimates[:, 0].tolist())

    @property
    def per_group(self) -> Sequence[WindowEstimate]:
        """tr Σ and |G|² of each group."""
        return tuple(WindowEstimate(*pair) for pair in self.estimates[:, 1:].T.tolist())


def solve_window(row: WindowRow, *, scale: float, n_ranks: int, apart: Mapping[str, ScaleReading]) -> SolvedWindow:
    """Solve a window that can be used.

    Args:
        row: what it measured.
        scale: κ, the gradient that the optimizer sees over the sum of its pieces.
        n_ranks: data-parallel ranks.
        apart: κ of each class apart, by name; unknown if no piece reached it.
    """
    # Everything is brought to the units of the rank-averaged sum of the pieces: S by its definition, B by κ. Otherwise
    # a clip that came first would weigh windows, since its coefficient differs from window to window.
    unit_scale = 1.0 / n_ranks
    to_unit = (unit_scale / scale) ** 2
    measured = row.examples or row
    groups = measured.estimates(scale=unit_scale, to_unit=to_unit)
    sq_norm_big = row.big
    for name, pieces in row.apart.items():
        # Their counts and their κ may be other ones: solved apart, then added.
        relative = (apart[name].scale or scale) / scale
        groups = groups + pieces.estimates(scale=unit_scale * relative, to_unit=to_unit)
        sq_norm_big += pieces.big
    total = groups.sum(1)
    if row.whole is not None:
        small, sq_norm_big = row.whole
        total = groups.new_tensor(row.solve(small, sq_norm_big * to_unit, scale=unit_scale))
    return SolvedWindow(
        estimates=torch.cat([total[:, None], groups], 1),
        norm=math.sqrt(sq_norm_big * to_unit),
        effective_units=1.0 / measured.v,
        u=measured.u,
        compared=_compared(row, n_ranks) | _signal_to_noise(*total.tolist(), u=measured.u, v=measured.v),
    )


def _signal_to_noise(trace_cov: float, grad_sq: float, *, u: float, v: float) -> Numbers:
    """|G|² over the window's noise as S shows it. |F|² depends on |G|²'s own error, and would move the mean below 0."""
    small = grad_sq + u * trace_cov
    return {"signal": (grad_sq * u / (small * v), 1.0)} if small > 0 else {}


def _compared(row: WindowRow, n_ranks: int) -> Numbers:
    """How much pieces and ranks differ, on the witness's elements.

    Differences are Σw · Σ |h_k|²/w_k − |Σ h_k|², and beside them the first term: 0 but for rounding where all pieces
    are the same. (Sums in fp64 show it. In fp32 their window was dropped.) A single piece has no other to differ from.

    The consistency is tr Σ within ranks, and between ranks; known where there are two ranks and two micro-batches on
    one of them. The ranks' sums are pieces of their own, with u' = Σ_r (W_r/W)/n_r and S' = Σ_r (W_r/W)|g_r|². So
    S − S' shows the noise within ranks, and S' − B the noise between them.
    """
    if row.n_pieces < 2:
        return {"differences": (0.0, 0.0)}
    big, small, ranks = float(row.witness_sum @ row.witness_sum), row.weight * row.witness_small, row.witness_ranks
    compared = {"differences": (small - big, small)}
    u, v, u_ranks = row.u, row.v, row.rank_sq_weight_over_units / row.weight
    if n_ranks > 1 and row.n_pieces > n_ranks and u > u_ranks > v:
        ranks = row.weight * ranks
        compared["consistency"] = (small - ranks) / (u - u_ranks), (ranks - big) / (u_ranks - v)
    return compared
