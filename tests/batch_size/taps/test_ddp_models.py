"""Leaf hooks under DDP: models of other kinds, and backwards that no piece can be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.batch_size.loops import attached, batch, mean_loss, small_model
from tests.ranks import Ranks


def _all_checkpointed() -> list[str]:
    model = small_model()
    ddp, forward = DistributedDataParallel(model), model.forward
    model.forward = lambda x: checkpoint(forward, x, use_reentrant=True)  # type: ignore[method-assign]
    with attached(ddp, units_per_piece=4) as probe:
        x, y = batch(4, torch.Generator().manual_seed(dist.get_rank()))
        mean_loss(ddp, x.requires_grad_(), y).backward()
        probe.step()
        return list(probe.reading().dropped)


def test_reentrant_checkpointing_without_declared_pieces_is_named(ranks2: Ranks) -> None:
    for [reason] in ranks2(_all_checkpointed):
        assert "reentrant checkpointing runs backward inside backward" in reason


class Sparse(nn.Module):
    """An embedding with sparse gradients, which DDP reduces in a bucket of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x[:, 0].abs().mul(10).long()))  # type: ignore[no-any-return]


class Blocks(nn.Module):
    """Residual blocks that a step may skip: all but two that the witness does not read in every window."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(6))
        self.choose = torch.Generator().manual_seed(9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = float(torch.rand((), generator=self.choose)) < 0.5
        for layer in (self.layers[1], self.layers[4]) if skips else self.layers:
            x = x + torch.tanh(layer(x))
        return x


def _made(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "two modules":
        return nn.Sequential(DistributedDataParallel(nn.Linear(12, 8)), DistributedDataParallel(nn.Linear(8, 3)))
    inner = {"sparse": Sparse, "skipped": Blocks}.get(kind, small_model)()
    model = DistributedDataParallel(inner, find_unused_parameters=kind == "skipped")
    if kind == "built-in hook":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return model


def _windows(kind: str) -> tuple[int, int, list[str]]:
    """How many communication hooks DDP has, windows and reasons, of 12 windows."""
    model, generator = _made(kind), torch.Generator().manual_seed(dist.get_rank())
    with attached(model, units_per_piece=8, groups=None) as probe:
        for _ in range(12):
            model(batch(8, generator)[0]).square().sum(1).mean().backward()
            probe.step()
            model.zero_grad()
        return len(getattr(model, "_comm_hooks", ())), probe.reading().windows, list(probe.reading().dropped)


@pytest.mark.parametrize("kind", ["sparse", "skipped", "two modules", "built-in hook"])
def test_any_model_is_read_and_ddp_gets_no_communication_hook(ranks2: Ranks, kind: str) -> None:
    assert ranks2(_windows, kind) == [(0, 12, [])] * 2
