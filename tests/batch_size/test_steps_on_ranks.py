"""The step of the optimizer ends the window on all ranks, whatever each of them has."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel

from tests.batch_size.loops import attached, batch, mean_loss, small_model
from tests.ranks import Ranks


def state_made_on_rank() -> tuple[int, int, list[str]]:
    """torch.distributed.checkpoint makes an optimizer's state by a step without gradients."""
    model = DistributedDataParallel(small_model())
    optimizer, generator = torch.optim.AdamW(model.parameters()), torch.Generator().manual_seed(dist.get_rank())
    with attached(model, optimizer, units_per_piece=4) as probe:
        get_state_dict(model, optimizer)
        for _ in range(4):
            mean_loss(model, *batch(4, generator)).backward()
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
        return reading.windows, sum(reading.dropped.values()), list(probe.alerts)


def test_a_step_that_makes_the_optimizers_state_raises_no_alarm(ranks2: Ranks) -> None:
    assert ranks2(state_made_on_rank) == [(4, 1, [])] * 2


def windows_on_rank(empty: bool) -> tuple[int, dict[str, int], list[str]]:
    """On two ranks, of which one may have no batch in some steps."""
    model = DistributedDataParallel(small_model())
    optimizer, generator = torch.optim.SGD(model.parameters(), lr=0.01), torch.Generator().manual_seed(dist.get_rank())
    with attached(model, optimizer, units_per_piece=4) as probe:
        for window in range(6):
            if not (empty and window == 3 and dist.get_rank() == 1):
                with model.no_sync() if empty else nullcontext():
                    mean_loss(model, *batch(4, generator)).backward()
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
        return reading.windows, dict(reading.dropped), list(probe.alerts)


@pytest.mark.parametrize("empty", [False, True])
def test_the_step_ends_the_window_on_all_ranks(empty: bool, ranks2: Ranks) -> None:
    """Also on a rank that has no piece: its peers wait for its part of the sum."""
    for windows, dropped, alerts in ranks2(windows_on_rank, empty):
        if empty:  # nothing is reduced here, so no window can be used; but none hangs
            assert windows + sum(dropped.values()) == 6
        else:
            assert (windows, dropped, alerts) == (6, {}, [])
