"""Single examples on several ranks: every example of every rank is a piece, and one collective carries them all."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.batch_size.loops import attached, batch, flat_grad, mean_loss
from tests.batch_size.single_examples import Scaled
from tests.oracles import window_by_hand
from tests.ranks import Ranks, mesh_of

SIZES = (5, 2, 4)
"""Rows of the micro-batches of ranks 0, 1 and 2."""


class Routed(nn.Module):
    """One of two layers by the sign of the first row's first number: another one on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.ModuleList([nn.Linear(12, 5), nn.Linear(12, 5)])
        self.own = nn.Parameter(torch.ones(5))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.first[dist.get_rank() % 2]
        h = chosen(x)
        # The parameter that no rule covers is used on rank 0 alone.
        return self.last(h * self.own if dist.get_rank() == 0 else h)


def data(rank: int, window: int, n: int | None = None) -> tuple[Tensor, Tensor]:
    return batch(n or SIZES[rank], torch.Generator().manual_seed(100 * window + rank))


def routed() -> dict[str, Any]:
    """Each rank covers other parameters than its peer."""
    model, rank, world = Routed(), dist.get_rank(), dist.get_world_size()
    with attached(model, per_example="always", process_group=dist.group.WORLD) as probe:
        (x, y) = data(rank, 0, n=4)
        with probe.piece(units=4):
            mean_loss(model, x, y).backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
        probe.step()
        reading = probe.reading()
    model.zero_grad()
    own = [flat_grad(model, (model(x) - y).square().sum(-1)[b] / 4) for b in range(4)]
    gradients: list[Any] = [None] * world
    dist.all_gather_object(gradients, own)
    keep = torch.cat([torch.full((p.numel(),), name != "own") for name, p in model.named_parameters()])
    kept = [g[keep] for of_rank in gradients for g in of_rank]
    exact = window_by_hand(kept, [1 / 4] * 8, [1.0] * 8, torch.stack(kept).sum(0) / world)
    return {"found": (reading.trace_cov, reading.grad_sq), "exact": exact, "coverage": reading.coverage}


def test_only_parameters_that_are_covered_on_all_ranks_count(ranks2: Ranks) -> None:
    for result in ranks2(routed):
        assert result["found"] == pytest.approx(result["exact"], rel=5e-6)
        assert result["coverage"].n_parameters == result["coverage"].n_all - 1


class Partly(Scaled):
    """A parameter that no rule covers, and a layer that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Identity()


def one_rank_stops_reading(wrapper: str) -> tuple[int, bool, list[str]]:
    """After the first window, rank 0 has the only piece. Rank 1 cannot read examples once its hooks were off.

    Returns:
        Windows that were averaged, whether rank 1 has stopped reading, and the reasons of dropped windows.
    """
    torch.manual_seed(2)
    inner = Partly()
    rank, model = dist.get_rank(), inner if wrapper == "FSDP2" else DistributedDataParallel(inner)
    if wrapper == "FSDP2":
        fully_shard(inner, mesh=mesh_of((2,)))
    with attached(model, per_example="always", every=2, log_every=1) as probe:
        for window in range(24):
            has_piece = rank == 0 or window == 0
            x, y = data(rank, window)
            with probe.piece(units=len(x)) if has_piece else contextlib.nullcontext():
                (mean_loss(model, x, y) * has_piece).backward()
            probe.step()
            model.zero_grad()
            if (rank, window) == (1, 0):
                inner.idle.compile(backend="eager")  # models with compiled parts are refused
        reading = probe.reading()
        return reading.windows, bool(probe._mechanism.why_not), list(reading.dropped)


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_a_rank_that_reads_no_examples_does_not_say_what_it_covers(ranks2: Ranks, wrapper: str) -> None:
    for rank, (windows, has_stopped, reasons) in enumerate(ranks2(one_rank_stops_reading, wrapper)):
        assert has_stopped == (rank == 1)
        assert 1 <= windows < 24
        assert all("another rank does not read them" in reason for reason in reasons), reasons
        assert reasons
