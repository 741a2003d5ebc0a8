"""Gradients that lie alike over ranks: what they have in common, which they are, and those that are there now."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sonde.parallel.placements import Layout


@dataclass(frozen=True)
class Key:
    """What gradients have in common that are read by the same kernels and summed over the same ranks.

    Attributes:
        ranks: that hold the other shards of what this rank holds, itself included; empty where it holds all.
        n_shards: distinct shards that the gradient is cut into.
        n_replicas: ranks among those summed that hold the same values, where that was declared.
        part: which part of the model they belong to.
        device: where they are.
        dtype: of their elements.
        is_partial: whether they are still to be summed over some ranks.
    """

    ranks: tuple[int, ...]
    n_shards: int
    n_replicas: int | None
    part: int
    device: torch.device
    dtype: torch.dtype
    is_partial: bool

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts groups, the sharded first, so that their sums run while others are read."""
        rest = (self.n_shards, self.n_replicas or 0, self.part, str(self.device), str(self.dtype), self.is_partial)
        return (not self.ranks, self.ranks, *rest)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters whose gradients lie alike.

    Attributes:
        key: how.
        layout: of one of them; that of the others has the same ranks.
        indices: which they are, in the plan's order.
    """

    key: Key
    layout: Layout
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Collected:
    """The gradients of one group that are there now.

    Attributes:
        group: whose.
        indices: of the parameters that have one.
        gradients: as they are in `.grad`.
        locals: this rank's parts of them.
    """

    group: ParameterGroup
    indices: list[int] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    locals: list[Tensor] = field(default_factory=list)
