"""The pieces of experts in one window, on the device; see `stats/window_row.py`.

The weight of a piece is known only once the ranks that fed it are summed. So the squares of each piece wait until the
window ends, and one small all-reduce over these ranks gives the weights.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.batch_size.taps.tap import GradientSummary, Number, Problem
from sonde.batch_size.taps.window_sums import PieceCounts, WindowSums, as_vector
from sonde.batch_size.taps.witness import Witness
from sonde.parallel.devices import widened, zero_sums
from sonde.parallel.expert_ranks import ExpertRanks

_MOST_PIECES = 256
"""Pieces of a rank and window, at most. All ranks reduce a vector of one length, whatever their pieces."""


class ExpertPieces:
    """Adds up the pieces of experts in one window on this rank. Squares add up over parameters in every metric.

    Args:
        experts: which parameters are experts', and the ranks that feed them.
        sums: of the other parameters.
        witness: elements that are compared.
        n_parameters: of this rank.
        n_metrics: in which gradients are measured.
        counts_pieces: whether this rank counts the pieces of its data.
        device: where the sums live.
    """

    def __init__(
        self,
        experts: ExpertRanks,
        sums: WindowSums,
        witness: Witness,
        *,
        n_parameters: int,
        n_metrics: int,
        counts_pieces: bool,
        device: torch.device,
    ) -> None:
        self._experts, self._sums, self._witness, self._device = experts, sums, witness, device
        self._counts_pieces, self._n_metrics = counts_pieces and experts.is_first, n_metrics
        self.indices = experts.indices
        """Which parameters they are."""
        self.is_own = as_vector([float(i not in self.indices) for i in range(n_parameters)], device)
        """1 for other parameters than experts', 0 for those of experts; [parameters]."""
        self.forget()

    def forget(self) -> None:
        """Forget the pieces since the last window ended."""
        self._squares: list[Tensor] = []
        self._counts: list[Number] = []
        self._sum = zero_sums(self._witness.size, device=self._device)
        self._sum_of_squares = torch.zeros_like(self._sum)
        self._own_elements: Tensor | None = None

    @property
    def own_elements(self) -> Tensor:
        """1 for the witness's elements of other parameters than experts', 0 for those of experts; [witness]."""
        if self._own_elements is None:  # the witness moves on with every window
            own = [float(i not in self.indices) for i, size in self._witness.sizes.items() for _ in range(size)]
            own += [1.0] * (self._witness.size - len(own))
            self._own_elements = as_vector(own, self._device)
        return self._own_elements

    def take_from(self, gradient: GradientSummary, counts: PieceCounts) -> GradientSummary:
        """Keep the experts' part of a piece's gradient.

        Returns:
            The other part, with 0 for experts.
        """
        # Multiplied by 0, not left out: what is not finite stays so, and drops the window.
        self._squares.append(self._sums.per_group(gradient.terms * (1.0 - self.is_own)))
        self._counts += [counts.weight, counts.weight * counts.weight / counts.effective_units]
        own = gradient.witness * self.own_elements
        of_experts = gradient.witness - own
        self._sum += of_experts
        self._sum_of_squares += of_experts.square()
        return replace(gradient, terms=gradient.terms * self.is_own, witness=own)

    def take(self) -> tuple[dict[str, Tensor], dict[Problem, Number]]:
        """The sums of the window by name, to be summed over ranks; starts the next window.

        All ranks that feed the experts have to call this, also one without pieces.

        Returns:
            The sums; and counts of problems: whether these ranks had different numbers of pieces, or too many.
        """
        n = min(len(self._squares), _MOST_PIECES)
        table = zero_sums(3, _MOST_PIECES, device=self._device)
        table[0, :n] = 1.0
        if n:
            table[1:, :n] = as_vector(self._counts[: 2 * n], self._device).view(n, 2).T
        dist.all_reduce(table, group=self._experts.group)
        n_feeding, weight, sq_weight_over_units = table
        differs = ((n_feeding > 0) & (n_feeding < self._experts.n_ranks)).any()
        differs = differs + float(len(self._squares) > _MOST_PIECES)
        weight = torch.where(n_feeding > 0, weight, 1.0)
        small = zero_sums(self._n_metrics, self._sums.n_groups + 1, device=self._device)
        if n:
            small = (torch.stack(self._squares[:n]) / weight[:n, None, None]).sum(0)
        counts = torch.stack([(sq_weight_over_units / weight).sum(), widened((n_feeding > 0).sum())])
        counts *= float(self._counts_pieces)
        sums = {"small": small, "counts": counts, "witness": self._sum, "witness_squares": self._sum_of_squares}
        self.forget()
        return sums, {Problem.EXPERTS_DIFFER: differs}
