"""One window solved: tr Σ and |G|² of the total and of each group, and how much its pieces differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from sonde.batch_size.stats.group_estimates import GroupEstimates
from sonde.batch_size.stats.noise_scale import WindowEstimate, estimate_window
from sonde.batch_size.stats.window_row import WindowRow


@dataclass(frozen=True)
class SolvedWindow:
    """Unbiased estimates from one window, in units of the rank-averaged sum of its pieces.

    Attributes:
        total: of the whole model: the sum of the groups, except in a metric in which squares of groups do not add up.
        per_group: of each parameter group, [groups].
        within_between: tr Σ of the witness's elements within ranks (as `trace_cov`) and between ranks (as `grad_sq`);
            None unless there are two ranks and two micro-batches on one of them.
        norm: of the gradient as the rank average, before any clip.
        effective_units: effective number of units in the window (Kish), 1/v.
        u: Σ a_k/n_k, the mean of 1/n_k over the pieces; 1 where each example is a piece.
        witness_squares: Σw · Σ |h_k|²/w_k of the witness's elements.
        witness_differences: how much larger that is than |Σ h_k|²: 0 but for rounding where all pieces are the same.
    """

    total: WindowEstimate
    per_group: Sequence[WindowEstimate]
    within_between: WindowEstimate | None
    norm: float
    effective_units: float
    u: float
    witness_squares: float
    witness_differences: float

    @property
    def sq_norm(self) -> float:
        """|F|² of the gradient that was solved: |G|² + v tr Σ."""
        return self.norm**2


def solve_window(
    row: WindowRow, *, scale: float, n_ranks: int, apart: Mapping[str, float | None] = MappingProxyType({})
) -> SolvedWindow:
    """Solve a window that can be used.

    Args:
        row: what it measured.
        scale: κ, the gradient that the optimizer sees over the sum of its pieces.
        n_ranks: data-parallel ranks.
        apart: κ of each class apart, by name; None if no piece reached it.
    """
    # Everything is brought to the units of the rank-averaged sum of the pieces: S by its definition, B by κ. Otherwise
    # a clip that came first would weigh windows, since its coefficient differs from window to window.
    unit_scale = 1.0 / n_ranks
    to_unit = (unit_scale / scale) ** 2
    measured = row.examples or row
    estimates = measured.estimates(scale=unit_scale, to_unit=to_unit)
    sq_norm_big = row.big
    for name, others in row.apart.items():
        # Their pieces are others, and so may their κ be: solved apart, then added.
        own_scale = apart[name]
        relative = 1.0 if own_scale is None else own_scale / scale
        estimates = estimates + others.estimates(scale=unit_scale * relative, to_unit=to_unit)
        sq_norm_big += others.big
    total, pieces = WindowEstimate(*estimates.sum(1).tolist()), measured.pieces()
    if row.whole is not None:
        small, sq_norm_big = row.whole
        total = estimate_window(row.pieces(small), sq_norm_big * to_unit, scale=unit_scale)
    # The witness's sums are in fp64, so that equal pieces show as a difference of rounding only. (In fp32 their window
    # was dropped.) They are of pieces, and a single one has no other to differ from.
    witness_squares = row.weight * row.witness_small if row.n_pieces > 1 else 0.0
    witness_differences = witness_squares - float(row.witness_sum @ row.witness_sum) if row.n_pieces > 1 else 0.0
    return SolvedWindow(
        total=total,
        per_group=GroupEstimates(estimates),
        within_between=_within_between(row, n_ranks),
        norm=math.sqrt(sq_norm_big * to_unit),
        effective_units=1.0 / pieces.v,
        u=pieces.u,
        witness_squares=witness_squares,
        witness_differences=witness_differences,
    )


def _within_between(row: WindowRow, n_ranks: int) -> WindowEstimate | None:
    """tr Σ of the witness's elements, within and between ranks; None unless there are two of each.

    The ranks' sums are pieces of their own, with u' = Σ_r (W_r/W)/n_r and S' = Σ_r (W_r/W)|g_r|². So S − S' shows the
    noise within ranks, and S' − B the noise between them.
    """
    pieces = row.pieces()
    u, v, u_ranks = pieces.u, pieces.v, row.rank_sq_weight_over_units / row.weight
    if n_ranks < 2 or row.n_pieces <= n_ranks or not u > u_ranks > v:
        return None
    big = float(row.witness_sum @ row.witness_sum)
    small, ranks = row.weight * row.witness_small, row.weight * row.witness_ranks
    return WindowEstimate(trace_cov=(small - ranks) / (u - u_ranks), grad_sq=(ranks - big) / (u_ranks - v))
