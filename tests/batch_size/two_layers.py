"""A small model under each wrapper, whose ranks need not have as many pieces: shared by tests of what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.batch_size.loops import batch
from tests.ranks import mesh_of

Piece = tuple[Tensor, Tensor]


def small() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))


def cut(setup: str, model: nn.Sequential) -> Any:
    """The model under "DDP", "FSDP2" or "TP" of all ranks; as it is under any other name."""
    if setup == "DDP":
        return DistributedDataParallel(model)
    if setup == "TP":
        parallelize_module(model, mesh_of((dist.get_world_size(),)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if setup == "FSDP2":
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh_of((dist.get_world_size(),)))
        fully_shard(model, mesh=mesh_of((dist.get_world_size(),)))
    return model


def pieces_of(rank: int, window: int, n: int, units: int = 4) -> list[Piece]:
    generator = torch.Generator().manual_seed(1000 * window + 10 * rank)
    return [batch(units, generator) for _ in range(n)]


def filled_up(model: Any, pieces: Sequence[Piece | None], *, reduces_each: bool = False) -> Iterator[Piece]:
    """The pieces in turn. In place of each None, a backward outside pieces runs that adds nothing.

    DDP and FSDP2 reduce in the last backward, or in each.
    """
    for k, piece in enumerate(pieces):
        reduces = reduces_each or k == len(pieces) - 1
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = reduces
        elif isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(reduces)
        if piece is None:
            (0.0 * model(torch.zeros(1, 12)).sum()).backward()
        else:
            yield piece


def clear(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None
