"""Branches on two ranks: every rank gets its own part of the state back, and all agree on what was found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sonde
from sonde.parallel.placements import local_tensor
from tests.ranks import Ranks, mesh_of

HELD_OUT = torch.linspace(-1.0, 1.0, 24).reshape(6, 4)


def wrapped(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2))
    if kind == "DDP":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    for layer in (model[0], model):
        fully_shard(layer, mesh=mesh_of((2,)))
    return model


class Loop:
    """A training whose ranks share each batch equally."""

    def __init__(self, kind: str) -> None:
        self.model = wrapped(kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.draws = torch.Generator().manual_seed(dist.get_rank())
        self.drawn: list[float] = []
        for _ in range(3):
            self.step(4)

    def step(self, batch: int) -> None:
        x = torch.randn(batch // 2, 4, generator=self.draws)
        self.drawn.append(float(x[0, 0]))
        self.optimizer.zero_grad()
        (self.model(x) - x[:, :2] - torch.randn(batch // 2, 2, generator=self.draws)).square().mean().backward()
        self.optimizer.step()
        self.loss()  # FSDP2 leaves the outermost module's parameters gathered

    def loss(self) -> float:
        with torch.no_grad():
            return float((self.model(HELD_OUT) - HELD_OUT[:, :2]).square().mean())

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "draws": self.draws}

    def tensors(self) -> list[Tensor]:
        parameters = self.optimizer.param_groups[0]["params"]
        tensors = [*parameters, *(t for p in parameters for t in (p.grad, *self.optimizer.state[p].values()))]
        return [*(local_tensor(t.detach()).clone() for t in tensors if t is not None), self.draws.get_state()]


def branched(kind: str) -> tuple[sonde.Branches, list[Any], list[Any], list[Any], set[float]]:
    """What was found; a training's tensors before and after; the ends of two trainings, one with branches; and what
    was drawn.
    """
    loop = Loop(kind)
    before = loop.tensors()
    found = sonde.branch(
        loop.step, loop.state(), loss=loop.loss, batches=[4, 8], units=32, seeds=2, evaluations=4, verbose=False
    )
    after, ends = loop.tensors(), []
    for each in (loop, Loop(kind)):
        each.step(4)
        ends.append(each.tensors())
    return found, before, after, ends, set(loop.drawn)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_every_rank_gets_its_part_back(ranks2: Ranks, kind: str) -> None:
    results = ranks2(branched, kind)
    assert results[0][4].isdisjoint(results[1][4])
    for found, before, after, ends, _ in results:
        for one, other in ((before, after), ends):
            assert len(one) == len(other) > 12
            assert all(map(torch.equal, one, other))
        assert found == results[0][0]
        assert [b.copy for b in found.branches] == [0, 1, 0, 0, 0]
        assert found.branches[0].curve == found.branches[1].curve


def apart(by_loss: bool) -> str:
    """The message of a call whose ranks have other losses, or whose ranks ignore their seed."""
    loop = Loop("DDP")
    loss = (lambda: loop.loss() + dist.get_rank()) if by_loss else loop.loss
    seed = None if by_loss else (lambda k: None)
    try:
        sonde.branch(loop.step, loop.state(), loss=loss, batches=[4, 8], units=32, seed=seed, verbose=False)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_disagree_are_told_so(ranks2: Ranks) -> None:
    assert all("average it over ranks" in message for message in ranks2(apart, True))
    assert all("another seed changes nothing" in message for message in ranks2(apart, False))
