"""tr Σ and |G|² of each parameter group of one window, as one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from sonde.batch_size.stats.blocks import on_host
from sonde.batch_size.stats.noise_scale import WindowEstimate


class GroupEstimates(Sequence[WindowEstimate]):
    """The estimates of one window's parameter groups, kept as a table since there may be thousands.

    Args:
        table: tr Σ and |G|² of each group, float64; [2, groups].
    """

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __len__(self) -> int:
        return self.table.shape[1]

    def __iter__(self) -> Iterator[WindowEstimate]:
        return (WindowEstimate(*pair) for pair in zip(*self.table.tolist(), strict=True))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


def estimates_table(estimates: Sequence[WindowEstimate]) -> Tensor:
    """tr Σ and |G|² of each of several groups, float64; [2, groups]."""
    if isinstance(estimates, GroupEstimates):
        return estimates.table
    pairs = [[estimate.trace_cov for estimate in estimates], [estimate.grad_sq for estimate in estimates]]
    return on_host(pairs)
