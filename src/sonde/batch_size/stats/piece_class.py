"""A class of pieces: parameters that the same pieces feed have the same weights, units and κ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.batch_size.stats.noise_scale import PieceSums, check_pieces, solve
from sonde.batch_size.stats.scale_witness import ScaleReading, read_scale


@dataclass(frozen=True)
class PieceClass:
    """Sums over all pieces of all ranks, of the parameters of one class: the model's, experts', or covered ones.

    Attributes:
        sq_norm_over_weight: Σ |h_k|²/w_k per parameter group; float64, [groups].
        sq_norm_big: |F|² per parameter group; float64, [groups].
        weight: Σ w_k.
        weight_over_units: Σ w_k/n_k.
        sq_weight_over_units: Σ w_k²/n_k.
        n_pieces: pieces.
    """

    sq_norm_over_weight: Tensor
    sq_norm_big: Tensor
    weight: float
    weight_over_units: float
    sq_weight_over_units: float
    n_pieces: int

    @property
    def small(self) -> float:
        """S = Σw · Σ |h_k|²/w_k, of all groups."""
        return self.weight * float(self.sq_norm_over_weight.sum())

    @property
    def big(self) -> float:
        """|F|² of all groups."""
        return float(self.sq_norm_big.sum())

    def pieces(self, sq_norm_over_weight: float = 0.0) -> PieceSums:
        """The sums that the noise scale is solved from, for one Σ |h_k|²/w_k."""
        return PieceSums(
            sq_norm_over_weight, self.weight, self.weight_over_units, self.sq_weight_over_units, self.n_pieces
        )

    @property
    def one_has_all(self) -> bool:
        """Whether one piece has all the weight, so that no other can be compared with it."""
        pieces = self.pieces()
        return not pieces.u - pieces.v > 1e-9 * pieces.u

    def estimates(self, *, scale: float, to_unit: float) -> Tensor:
        """tr Σ and |G|² of each group; [2, groups].

        Args:
            scale: brings Σ h_k to the units of the estimates.
            to_unit: brings |F|² to these units.

        Raises:
            ValueError: with fewer than 2 pieces, since noise cannot then be told from signal.
        """
        check_pieces(self.pieces())
        return torch.stack(solve(self.pieces(), self.sq_norm_over_weight, self.sq_norm_big * to_unit, scale))


@dataclass(frozen=True)
class WitnessedPieces(PieceClass):
    """Pieces of which some elements were kept.

    Attributes:
        witness_sum: H = Σ h_k, 0 for elements of other classes; float64, [witness].
        witness_squares: Σ h_k² of each of these elements; [witness].
        witness_final: F, likewise; [witness].
    """

    witness_sum: Tensor
    witness_squares: Tensor
    witness_final: Tensor

    def read_scale(self, sizes: Mapping[int, int], *, tolerance: float, floor: float) -> ScaleReading:
        """How the gradient that the optimizer sees relates to the sum of the pieces.

        Args:
            sizes: how many elements each parameter has in the witness, in order, by index.
            tolerance: the residual that rounding alone explains.
            floor: elements up to this size may have been lost to underflow.
        """
        return read_scale(
            self.witness_final,
            self.witness_sum,
            tolerance=tolerance,
            squares=self.witness_squares,
            sizes=sizes,
            floor=floor,
        )
