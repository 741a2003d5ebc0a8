"""Window rows with a few gradient elements, made from each piece's gradient by the definitions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sonde.batch_size.stats.window_row import WindowRow


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
        sq_norm_over_weight=squares.tolist(),
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
        sq_norm_big=(kappa * summed).square().tolist(),
        witness_final=kappa * summed,
    )
