"""What reading a window costs the ranks: one collective, which empty ranks join, and no value on the host."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.batch_size.ddp_loops import batches, wrap
from tests.batch_size.loops import (
    attached,
    batch,
    mean_loss,
    small_model,
)
from tests.ranks import Ranks


class Reads(TorchDispatchMode):
    """Counts values that this thread reads on the host; DDP's callbacks run the same code on other threads."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


def _issued(tap: str | None, n_micro: int) -> tuple[int, int]:
    """Collectives and host reads of 4 windows under DDP; without a probe if `tap` is None."""
    _, model = wrap({"bucket_cap_mb": 0.01})
    generator = torch.Generator().manual_seed(dist.get_rank())
    units: dict[str, Any] = {"units_per_piece": 4, "log_every": 1000}
    reads = Reads()
    with attached(model, tap=tap, **units) if tap else contextlib.nullcontext() as probe:
        for window in range(8):  # DDP rebuilds its buckets after the first
            if window == 4:
                before = _sequence_number()
            with reads if window >= 4 else contextlib.nullcontext():
                for i in range(n_micro):
                    sync = contextlib.nullcontext() if i == n_micro - 1 else model.no_sync()
                    with probe.piece(units=4) if probe else contextlib.nullcontext(), sync:
                        mean_loss(model, *batch(4, generator)).backward()
                if probe:
                    probe.clip_grad_norm_(1.0)
                model.zero_grad()
        return _sequence_number() - before, reads.count


def _sequence_number() -> int:
    """How many collectives this process group has issued."""
    return dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]


@pytest.mark.parametrize(("tap", "n_micro"), [("leaf", 1), ("leaf", 3), ("comm_hook", 1), ("comm_hook", 3)])
def test_one_collective_a_window_and_nothing_else_read_on_the_host(ranks2: Ranks, tap: str, n_micro: int) -> None:
    """On a CPU, and only there, each of the 4 clips looks whether its norm fits fp32 and its coefficient is 1."""
    without = ranks2(_issued, None, n_micro)
    for (n_with, read), (n_without, _) in zip(ranks2(_issued, tap, n_micro), without, strict=True):
        assert (n_with - n_without, read) == (4, 4 * 2)


def _an_empty_rank_after_a_skipped_step() -> tuple[int, dict[str, int]]:
    """The optimizer skips window 0, and rank 0 has no piece in window 1 but still takes part in the sum."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rank = dist.get_rank()
    with attached(model, optimizer, process_group=dist.group.WORLD) as probe:
        for window in range(3):
            for x, y in batches(rank, 2, window) if (rank, window) != (0, 1) else []:
                with probe.piece(units=len(x)):
                    mean_loss(model, x, y).backward()
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
            probe.step()
            if window:
                optimizer.step()
            model.zero_grad()
        reading = probe.reading()
    return reading.windows, dict(reading.dropped)


def test_an_empty_rank_takes_part(ranks2: Ranks) -> None:
    assert ranks2(_an_empty_rank_after_a_skipped_step) == [(3, {})] * 2
