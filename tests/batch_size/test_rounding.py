"""Rounding by 16-bit communication is no change; lossy communication is."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.batch_size.ddp_loops import assert_as_by_hand, in_bf16, in_fp16, train_on_rank
from tests.batch_size.loops import (
    attached,
    batch,
    mean_loss,
    small_model,
)
from tests.ranks import Ranks


def _with_hook(hook: str, tap: str) -> dict[str, Any]:
    return train_on_rank({}, hook=hook, tap=tap, windows=6, clip=False)


@pytest.mark.parametrize("tap", ["leaf", "comm_hook"])
def test_sixteen_bit_communication_counts_as_rounding(ranks2: Ranks, tap: str) -> None:
    # bf16 rounds each element by up to 2⁻⁸; B moves by the square of that, κ by its mean over the witness.
    results = ranks2(_with_hook, "bf16", tap)
    assert_as_by_hand(results, windows=6, rel=3e-3)
    assert 1e-4 < results[0]["reading"].scale_residual < 1e-2


def test_lossy_communication_is_named(ranks2: Ranks) -> None:
    for result in ranks2(_with_hook, "powersgd", "leaf"):
        reading = result["reading"]
        assert any("communication hook 'powerSGD_hook' is lossy" in reason for reason in reading.dropped)


def _hook_registered_late() -> tuple[int, dict[str, int]]:
    model = DistributedDataParallel(small_model())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap="leaf", log_every=1) as probe:
        model.register_comm_hook(None, in_bf16)
        for _ in range(10):
            with probe.piece(units=4):
                mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            model.zero_grad()
        return probe.reading().windows, dict(probe.reading().dropped)


def test_a_communication_hook_may_be_registered_after_attach(ranks2: Ranks) -> None:
    for windows, dropped in ranks2(_hook_registered_late):
        assert (windows, dropped) == (10, {})


def _bias_before_batch_norm() -> tuple[int, dict[str, int]]:
    """The gradient of a bias before batch norm is 0 but for rounding, and fp16 loses the rounding."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 3)))
    model.register_comm_hook(None, in_fp16)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attached(model, tap="leaf") as probe:
        for _ in range(10):
            for k in range(2):
                x = torch.randn(8, 6, generator=generator)
                with model.no_sync() if k == 0 else contextlib.nullcontext(), probe.piece(units=8):
                    (model(x) - x[:, :3]).square().mean().backward()
            probe.step()
            model.zero_grad()
        return probe.reading().windows, dict(probe.reading().dropped)


def test_underflow_in_fp16_does_not_count_as_a_change(ranks2: Ranks) -> None:
    for windows, dropped in ranks2(_bias_before_batch_norm):
        assert (windows, dropped) == (10, {})
