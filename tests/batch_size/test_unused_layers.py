"""A layer that a rank uses in some micro-batches only, in a loop whose DDP reduces after each of them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.batch_size.loops import attached, batch, flat_grad
from tests.oracles import window_by_hand
from tests.ranks import Ranks

N_MICRO = 3
USED = {"in turn": lambda rank, micro: micro == rank, "late": lambda rank, micro: micro >= rank}


class Routed(nn.Module):
    """A model with a layer that its caller may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.last, self.extra = nn.Linear(12, 160), nn.Linear(160, 3), nn.Linear(160, 3)

    def forward(self, x: Tensor, uses_extra: bool) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden) + (self.extra(hidden) if uses_extra else 0)  # type: ignore[no-any-return]


def train_on_rank(no_sync: bool, used: str, forgets_to_zero: bool, every: int) -> dict[str, Any]:
    """Windows at fixed weights, whose tr Σ and |G|² are compared with those of whole gradients of all ranks."""
    plain, twin = Routed(), Routed()
    model = DistributedDataParallel(plain, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss_of(model: nn.Module, rank: int, window: int, micro: int) -> Tensor:
        x, y = batch(4, torch.Generator().manual_seed(1000 * rank + 10 * window + micro))
        return (model(x, USED[used](rank, micro)) - y).square().sum(-1).mean()  # type: ignore[no-any-return]

    differences = []
    with attached(model, optimizer, units_per_piece=4, log_every=1, every=every) as probe:
        for window in range(6):
            for micro in range(N_MICRO):
                with model.no_sync() if no_sync and micro < N_MICRO - 1 else contextlib.nullcontext():
                    loss_of(model, dist.get_rank(), window, micro).backward()
            probe.step()
            optimizer.step()
            if not forgets_to_zero:
                optimizer.zero_grad()
            if (solved := probe.window()) is not None:
                grads = [
                    flat_grad(twin, loss_of(twin, rank, window, micro))
                    for rank in range(dist.get_world_size())
                    for micro in range(N_MICRO)
                ]
                final = torch.stack(grads).sum(0) / dist.get_world_size()
                trace, grad_sq = window_by_hand(grads, [1.0] * len(grads), [4.0] * len(grads), final)
                differences += [solved.total.trace_cov / trace - 1, (solved.total.grad_sq - grad_sq) / trace]
        reading = probe.reading()
    return {
        "windows": reading.windows,
        "dropped": reading.dropped,
        "alerts": dict(probe.alerts),
        "differences": differences,
    }


@pytest.mark.parametrize("no_sync", [True, False])
@pytest.mark.parametrize("used", USED)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_gradients_that_ddp_has_reduced_before_are_not_left_over(ranks2: Ranks, no_sync: bool, used: str) -> None:
    for found in ranks2(train_on_rank, no_sync, used, False, 1):
        assert (found["windows"], found["dropped"], found["alerts"]) == (6, {}, {})
        # fp32 gradients that gloo has averaged, after each micro-batch or once.
        assert found["differences"] == pytest.approx([0.0] * 12, abs=1e-5)


@pytest.mark.parametrize("no_sync", [True, False])
@pytest.mark.parametrize("used", USED)
def test_gradients_that_are_left_over_are_noticed_all_the_same(ranks2: Ranks, no_sync: bool, used: str) -> None:
    for found in ranks2(train_on_rank, no_sync, used, True, 1):
        assert found["windows"] == 1
        assert "not_zeroed" in found["alerts"]
