"""The numbers of one window whose examples' own gradients were squared: every example is a piece of one unit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from torch import Tensor

from sonde.batch_size.stats.comparisons import OrderScores
from sonde.batch_size.stats.noise_scale import PieceSums, estimate_window
from sonde.batch_size.stats.piece_class import PieceClass

ENOUGH_COVERED = 0.995
"""Part of |F|² from which on no alert is raised. At most 0.5 % of |F|² = |G|² (1 + B_simple/B) are left out then. Where
B_simple is 20 batches, this moves B_simple by a tenth at most, and ± 20 % counts as well known."""


def in_percent(part: float) -> str:
    """A part of |F|² in words; 99.96 % are never called all of it.

    Example:
        >>> in_percent(0.9996), in_percent(0.5)
        ('99.9 %', '50 %')
    """
    return f"{math.floor(1000 * part) / 10:g} %"


@dataclass(frozen=True)
class ExampleSums(PieceClass):
    """Sums over all examples of a window: each is a piece of one unit. Squares are of the covered parameters alone.

    Attributes:
        of_pieces: Σ |h_k|²/w_k of the window's pieces, likewise of the covered parameters; [groups].
        n_covered: covered parameters.
        order: whether examples in certain places of their batches are more alike than others.
    """

    of_pieces: Tensor
    n_covered: int
    order: OrderScores = field(default_factory=OrderScores)

    def excess_of_pieces(self, pieces: PieceSums, *, scale: float) -> float | None:
        """(p − e)/(p + e), with tr Σ p from the window's pieces and e from its examples, which have one expectation.

        Args:
            pieces: of the window, over all parameters.
            scale: κ of the window.

        Returns:
            None where pieces cannot be compared, or there is no noise.
        """
        if pieces.n_pieces < 2 or not pieces.u > pieces.v:
            return None
        big = self.big / scale**2
        p = estimate_window(replace(pieces, sq_norm_over_weight=float(self.of_pieces.sum())), big).trace_cov
        e = estimate_window(self.pieces(float(self.sq_norm_over_weight.sum())), big).trace_cov
        return (p - e) / (p + e) if p > 0 and e > 0 else None


@dataclass(frozen=True)
class Coverage:
    """Which part of a model the noise scale speaks of, where it is read from single examples.

    Attributes:
        n_parameters: parameter tensors that are covered.
        n_all: measured parameter tensors.
        part: of |F|², the squared gradient of the window, that is theirs; an average over windows.
        ratio: B_simple of the covered parameters over that of all, from the pieces of windows with two or more; None
            where no window has two, or the two |G|² are not positive.
    """

    n_parameters: int
    n_all: int
    part: float
    ratio: float | None

    def __str__(self) -> str:
        ratio = f", {self.ratio:.3g} times that of all" if self.ratio is not None else ""
        return f"of {self.n_parameters} of {self.n_all} parameters, with {in_percent(self.part)} of |F|²{ratio}"


class CoveredPart:
    """Averages what the covered parameters are of the whole model.

    Args:
        n_all: measured parameter tensors.
    """

    def __init__(self, n_all: int) -> None:
        self._n_all = n_all
        self._n_parameters: int | None = None
        self._parts, self._windows, self._sums = 0.0, 0, [0.0] * 4

    def update(self, sums: ExampleSums, pieces: PieceSums, sq_norm_big: float, *, scale: float) -> None:
        """Add a window.

        Args:
            sums: of its examples.
            pieces: of its pieces, over all parameters; windows of a single piece say nothing of the ratio.
            sq_norm_big: |F|² of all parameters.
            scale: κ of the window.
        """
        if sums.n_covered != self._n_parameters:  # of other parameters: begin again
            self._n_parameters, self._parts, self._windows, self._sums = sums.n_covered, 0.0, 0, [0.0] * 4
        covered_big = sums.big
        if sq_norm_big > 0:
            self._parts += covered_big / sq_norm_big
            self._windows += 1
        if pieces.n_pieces < 2 or not pieces.u > pieces.v:
            return
        whole = estimate_window(pieces, sq_norm_big / scale**2)
        part = estimate_window(replace(pieces, sq_norm_over_weight=float(sums.of_pieces.sum())), covered_big / scale**2)
        for i, value in enumerate((part.trace_cov, part.grad_sq, whole.trace_cov, whole.grad_sq)):
            self._sums[i] += value

    @property
    def coverage(self) -> Coverage | None:
        """The averages so far; None if all parameters are covered, or none is."""
        if self._n_parameters in (None, self._n_all) or not self._windows:
            return None
        part_noise, part_signal, noise, signal = self._sums
        is_known = min(part_signal, signal, noise) > 0
        return Coverage(
            n_parameters=self._n_parameters or 0,
            n_all=self._n_all,
            part=self._parts / self._windows,
            ratio=part_noise / part_signal / (noise / signal) if is_known else None,
        )
