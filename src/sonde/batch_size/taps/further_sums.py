"""The sums of one window in further metrics: they ride in the window's one collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sonde.batch_size.stats.window_row import Drop, WindowRow
from sonde.batch_size.taps.further_metrics import Adds, FurtherMetrics
from sonde.batch_size.taps.tap import Number, Problem
from sonde.parallel.devices import to_device, zero_sums

_PROBLEMS = (Problem.NO_SECOND_MOMENT,)
"""Problems that one metric may have alone."""


class FurtherSums:
    """Adds up the pieces of one window in further metrics: for each parameter group and, last, for the whole model.

    Args:
        further: the metrics.
        group_index: the parameter group of each parameter, [parameters].
        n_groups: number of groups.
        device: where the sums live.
    """

    def __init__(
        self, further: FurtherMetrics, group_index: Sequence[int], *, n_groups: int, device: torch.device
    ) -> None:
        self._further, self._n_groups, self._device = further, n_groups, device
        self._group_index = to_device(torch.tensor(group_index, device="cpu"), device)
        adds_squares = [[metric.adds == "squares"] for metric in further.metrics]
        self._adds_squares = to_device(torch.tensor(adds_squares, device="cpu"), device)
        self._small = self._zeros()

    def _zeros(self) -> Tensor:
        return zero_sums(len(self._further.metrics), self._n_groups + 1, device=self._device)

    def add(self, norms: Tensor, weight: Number) -> None:
        """Add one piece.

        Args:
            norms: of its gradient per parameter, [metrics, parameters].
            weight: of the piece.
        """
        sums = self.per_group(norms)
        self._small += torch.where(self._adds_squares, sums, sums.square()) / weight

    def per_group(self, norms: Tensor) -> Tensor:
        """Sums over parameters of the norms or of their squares, as each metric adds; [metrics, groups + 1].

        Where norms add up, the sum of a group is its norm, and is squared only after the sum over ranks.
        """
        terms = torch.where(self._adds_squares, norms.square(), norms)
        sums = self._zeros().index_add_(1, self._group_index, terms)
        sums[:, -1] = terms.sum(1)
        return sums

    def pack(self) -> Tensor:
        """The sums and problems as a vector that is summed over ranks; starts the next window."""
        met = self._further.take_problems()
        counts = torch.tensor(
            [[float(p in each) for p in _PROBLEMS] for each in met], dtype=self._small.dtype, device="cpu"
        )
        packed = torch.cat([self._small.view(-1), to_device(counts, self._device).view(-1)])
        self._small.zero_()
        return packed


@dataclass(frozen=True)
class FurtherRow:
    """What one window measured in a further metric. Sums run over all pieces of all ranks.

    Attributes:
        adds: what adds up over parameters.
        sq_norm_over_weight: Σ |h_k|²/w_k per parameter group and, last, of the whole model; [groups + 1].
        sq_norm_big: |F|² likewise; [groups + 1].
        problems: that only this metric has.
        experts: where experts are solved apart, their Σ |h_k|²/w_k and |F|² per parameter group, and the other numbers
            are of the rest; None without experts.
    """

    adds: Adds
    sq_norm_over_weight: Sequence[float]
    sq_norm_big: Sequence[float]
    problems: Sequence[Drop]
    experts: tuple[Sequence[float], Sequence[float]] | None = None

    def in_place_of(self, row: WindowRow) -> WindowRow:
        """The window with these squares in place of its own."""
        (*small, whole_small), (*big, whole_big) = self.sq_norm_over_weight, self.sq_norm_big
        experts = row.experts
        if experts is not None and self.experts is not None:
            of_pieces, of_window = self.experts
            experts = replace(experts, sq_norm_over_weight=of_pieces, sq_norm_big=of_window)
        return replace(
            row,
            sq_norm_over_weight=small,
            sq_norm_big=big,
            whole=(whole_small, whole_big) if self.adds == "norms" else None,
            problems=[*row.problems, *self.problems],
            experts=experts,
        )


def read_further(further: Tensor, big: Tensor, adds: Sequence[Adds]) -> tuple[FurtherRow, ...]:
    """Name the numbers of a window in further metrics once they are on the host.

    Args:
        further: as `FurtherSums.pack` returned it, summed over ranks; on the CPU.
        big: `FurtherSums.per_group` of the final gradient, of all ranks together; flat, on the CPU.
        adds: of each metric.
    """
    n_metrics, n_problems = len(adds), len(_PROBLEMS)
    small, counts = further.double().split([len(further) - n_metrics * n_problems, n_metrics * n_problems])
    rows = zip(
        adds,
        small.view(n_metrics, -1).tolist(),
        big.double().view(n_metrics, -1).tolist(),
        counts.view(n_metrics, -1).tolist(),
        strict=True,
    )
    return tuple(
        FurtherRow(
            kind,
            squares,
            finals if kind == "squares" else [final * final for final in finals],
            [Drop(p.name.lower(), p.message) for p, n in zip(_PROBLEMS, met, strict=True) if n > 0],
        )
        for kind, squares, finals, met in rows
    )
