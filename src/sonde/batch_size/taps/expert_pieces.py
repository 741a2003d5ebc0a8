"""The pieces of experts in one window, on the device; see `stats/expert_sums.py`.

The weight of a piece is known only once the ranks that fed it are summed. So the squares of each piece wait until the
window ends, and one small all-reduce over these ranks gives the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.batch_size.stats.expert_sums import ExpertSums
from sonde.batch_size.stats.window_row import WindowRow
from sonde.batch_size.taps.further_sums import FurtherRow
from sonde.batch_size.taps.tap import ExpertsOfWindow, GradientSummary, Number
from sonde.batch_size.taps.window_sums import PieceCounts, as_vector
from sonde.batch_size.taps.witness import Witness
from sonde.parallel.devices import widened, zero_sums
from sonde.parallel.expert_ranks import ExpertRanks

_MOST_PIECES = 256
"""Pieces of a rank and window, at most. All ranks reduce a vector of one length, whatever their pieces."""


class ExpertPieces:
    """Adds up the pieces of experts in one window on this rank.

    Args:
        experts: which parameters are experts', and the ranks that feed them.
        group_index: the parameter group of each parameter, [parameters].
        n_groups: number of groups.
        witness: elements that are compared.
        counts_pieces: whether this rank counts the pieces of its data.
        n_further: further metrics, whose squares add up over parameters.
        device: where the sums live.
    """

    def __init__(
        self,
        experts: ExpertRanks,
        group_index: Sequence[int],
        *,
        n_groups: int,
        witness: Witness,
        counts_pieces: bool,
        n_further: int = 0,
        device: torch.device,
    ) -> None:
        self._n_further = n_further
        self._experts, self._witness, self._n_groups, self._device = experts, witness, n_groups, device
        self._counts_pieces = counts_pieces and experts.is_first
        indices = sorted(experts.indices)
        self._indices = torch.tensor(indices, device=device)
        self._group_index = torch.tensor([group_index[i] for i in indices], device=device)
        self._is_own = zero_sums(len(group_index), device=device).fill_(1.0)
        self._is_own[self._indices] = 0.0
        self.forget()

    def forget(self) -> None:
        """Forget the pieces since the last window ended."""
        self._squares: list[Tensor] = []
        self._further: list[Tensor] = []
        self._counts: list[Number] = []
        self._sum = zero_sums(self._witness.size, device=self._device)
        self._sum_of_squares = torch.zeros_like(self._sum)
        self._own_elements: Tensor | None = None

    @property
    def own_elements(self) -> Tensor:
        """1 for the witness's elements of other parameters than experts', 0 for those of experts; [witness]."""
        if self._own_elements is None:  # the witness moves on with every window
            own = [float(i not in self._witness.apart) for i, size in self._witness.sizes.items() for _ in range(size)]
            own += [1.0] * (self._witness.size - len(own))
            self._own_elements = as_vector(own, self._device)
        return self._own_elements

    def take_from(self, gradient: GradientSummary, counts: PieceCounts) -> GradientSummary:
        """Keep the experts' part of a piece's gradient.

        Returns:
            The other part, with 0 for experts.
        """
        self._squares.append(self._per_group(gradient.sq_norms))
        if gradient.further is not None:
            self._further.append(self._per_group(gradient.further.square()))
        self._counts += [counts.weight, counts.weight * counts.weight / counts.effective_units]
        own = gradient.witness * self.own_elements
        of_experts = gradient.witness - own
        self._sum += of_experts
        self._sum_of_squares += of_experts.square()
        # Multiplied by 0, not left out: what is not finite stays so, and drops the window.
        further = None if gradient.further is None else gradient.further * self._is_own
        return GradientSummary(gradient.sq_norms * self._is_own, own, further=further)

    def _per_group(self, squares: Tensor) -> Tensor:
        """The experts' squares, added up per parameter group; [(further metrics,) parameters] → [(…,) groups]."""
        sums = zero_sums(*squares.shape[:-1], self._n_groups, device=self._device)
        return sums.index_add_(-1, self._group_index, squares[..., self._indices])

    def split_further(self, norms: Tensor) -> tuple[Tensor, Tensor]:
        """The final gradient's norms in further metrics, [further metrics, parameters], in two parts.

        Returns:
            The norms with 0 for experts; and the experts' squares per parameter group, [further metrics, groups].
        """
        return norms * self._is_own, self._per_group(norms.square())

    def pack(self) -> tuple[Tensor, Tensor]:
        """The sums of the window as the vector that is summed over ranks; starts the next window.

        All ranks that feed the experts have to call this, also one without pieces.

        Returns:
            The vector; and whether these ranks had different numbers of pieces, or too many, 1 or 0, 0-dim.
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
        small = zero_sums(self._n_groups, device=self._device)
        further = small.new_zeros(self._n_further, self._n_groups)
        if n:
            small = (torch.stack(self._squares[:n]) / weight[:n, None]).sum(0)
        if n and self._further:
            further = (torch.stack(self._further[:n]) / weight[:n, None, None]).sum(0)
        counts = torch.stack([(sq_weight_over_units / weight).sum(), widened((n_feeding > 0).sum())])
        counts *= float(self._counts_pieces)
        vector = torch.cat([small, counts, self._sum, self._sum_of_squares, further.view(-1)])
        self.forget()
        return vector, differs


def with_experts(
    row: WindowRow, further: Sequence[FurtherRow], window: ExpertsOfWindow
) -> tuple[WindowRow, tuple[FurtherRow, ...]]:
    """A window's rows with the experts' numbers, once they are on the host.

    Args:
        row: of the other parameters.
        further: of the other parameters in each further metric.
        window: summed over ranks, on the CPU.
    """
    n_groups, n_witness = len(window.sq_norm_big), len(window.witness_final)
    lengths = [n_groups, 2, n_witness, n_witness, len(further) * n_groups]
    small, counts, summed, squares, further_small = window.vector.split(lengths)
    weight_over_units, n_pieces = counts.tolist()
    experts = ExpertSums(
        sq_norm_over_weight=small.tolist(),
        weight=row.weight,
        weight_over_units=weight_over_units,
        sq_weight_over_units=row.sq_weight_over_units,
        n_pieces=round(n_pieces),
        sq_norm_big=window.sq_norm_big.tolist(),
        witness_sum=summed.double(),
        witness_squares=squares.double(),
        witness_final=window.witness_final.double(),
    )
    of_pieces, of_window = (t.view(len(further), n_groups).tolist() for t in (further_small, window.further_big))
    rows = zip(further, of_pieces, of_window, strict=True)
    return replace(row, experts=experts), tuple(replace(f, experts=(small, big)) for f, small, big in rows)
