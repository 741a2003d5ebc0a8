"""Windows: rows with a few gradient elements, made from each piece's gradient by the definitions; and solved ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sonde.batch_size.stats.tracker import NoiseScaleTracker
from sonde.batch_size.stats.window_row import RoundingTolerance, SolvedWindow, WindowRow


def window_row(ranks: Sequence[Sequence[Sequence[float]]], *, units: float, kappa: float = 1.0) -> WindowRow:
    """A row of pieces of weight 1 whose every element is a parameter group and is read by the witness.

    Args:
        ranks: each rank's pieces, each piece's gradient h_k; [ranks][pieces][elements].
        units: units in each piece.
        kappa: κ of the gradient that the optimizer sees, F = κ Σ h_k.
    """
    pieces = torch.tensor([piece for rank in ranks for piece in rank], dtype=torch.float64)  # [pieces, elements]
    squares, summed = pieces.square().sum(0), pieces.sum(0)
    rank_sums = [torch.tensor(rank, dtype=torch.float64).sum(0) for rank in ranks]
    n_pieces = len(pieces)
    return WindowRow(
        sq_norm_over_weight=squares,
        weight=float(n_pieces),
        weight_over_units=n_pieces / units,
        sq_weight_over_units=n_pieces / units,
        n_pieces=n_pieces,
        n_units=n_pieces * units,
        problems=[],
        explanations=[],
        witness_small=float(squares.sum()),
        witness_ranks=sum(float(s @ s) / len(rank) for s, rank in zip(rank_sums, ranks, strict=True)),
        rank_sq_weight_over_units=sum(len(rank) / units / len(rank) for rank in ranks),
        witness_sizes={0: len(summed)},
        witness_sum=summed,
        witness_squares=squares,
        sq_norm_big=(kappa * summed).square(),
        witness_final=kappa * summed,
    )


def solved(series: Sequence[Sequence[float]], units: float = 32.0, **others: Any) -> SolvedWindow:
    """A window with these tr Σ and |G|²: of the model, and then of each group."""
    estimates = torch.tensor(series, dtype=torch.float64).T
    return SolvedWindow(**{"estimates": estimates, "norm": 1.0, "effective_units": units, "u": 4 / units} | others)


def tracker_of(groups: Sequence[str] = (), **options: Any) -> NoiseScaleTracker:
    """A tracker of one rank, without windows."""
    rounding = RoundingTolerance(1e-4, 0.0, "noise was added")
    return NoiseScaleTracker(unit="rows", groups=groups, n_ranks=1, rounding=rounding, **options)


def take(
    tracker: NoiseScaleTracker, *windows: SolvedWindow, units: float = 8.0, every: int = 1, residual: float = 0.0
) -> None:
    """Average windows of so many units, one in `every`; of gradients that nothing has scaled."""
    for window in windows:
        tracker.n_seen += every
        tracker.see_units(units)
        tracker.dependence.see_change(None, sound={0, 1})
        tracker.add(window, 1.0, residual)


def gaussian_windows(
    b_simple: Sequence[float], *, n_runs: int, seed: int, batch: float = 32.0, n_pieces: int = 4, rank: int = 200
) -> Tensor:
    """tr Σ and |G|² of windows of Gaussian gradients of the same noise scale in all runs; [windows, runs, 2].

    The noise has as many directions as `rank`, all alike, and tr Σ = 1, so |G|² = 1/B. The squares are drawn, not the
    gradients: pieces scatter about their mean like χ² of (n_pieces − 1) · rank, and their mean about G like a normal
    number in its direction and χ² of the others.

    Args:
        b_simple: of each window, in units.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (len(b_simple), n_runs)
    variance = 1 / rank / batch  # of the mean gradient, in each direction

    def chi_square(freedom: int) -> Tensor:
        return torch._standard_gamma(torch.full(shape, freedom / 2, dtype=torch.float64), generator=generator) * 2

    along = (1 / torch.tensor(b_simple, dtype=torch.float64).sqrt())[:, None] + math.sqrt(variance) * torch.randn(
        shape, generator=generator, dtype=torch.float64
    )
    big = along.square() + variance * chi_square(rank - 1)
    apart = variance * chi_square((n_pieces - 1) * rank)  # S − B
    u, v = n_pieces / batch, 1 / batch
    trace_cov = apart / (u - v)
    return torch.stack([trace_cov, big - v * trace_cov], 2)
