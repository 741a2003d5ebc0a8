"""Partial gradients on real ranks: summed once, together, and written back."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import sonde
from tests.gradient_norm.placed_gradients import placed
from tests.ranks import Ranks, mesh_of


def _five_partial() -> tuple[float, list[int], list[str], list[list[float]]]:
    mesh, rank = mesh_of((2,)), dist.get_rank()
    norms = [placed(torch.full((3,), float(rank + k)), mesh, [Partial()], (3,), [Replicate()]) for k in range(5)]
    counts = []
    for _ in range(2):
        with CommDebugMode() as counted:
            norm = sonde.clip_grad_norm_(norms, math.inf, mesh=mesh)
        counts.append(counted.get_total_counts())
    grads = [p.grad for p in norms]
    assert all(isinstance(g, DTensor) for g in grads)
    return (
        float(norm),
        counts,
        [str(g.placements) for g in grads],  # type: ignore[union-attr]
        [g.to_local().tolist() for g in grads],  # type: ignore[union-attr]
    )


def test_partial_gradients_are_summed_once_and_written_back(ranks2: Ranks) -> None:
    """Five partial gradients take one all-reduce. The optimizer and a second clip find them summed."""
    for norm, counts, placements, values in ranks2(_five_partial):
        assert norm == pytest.approx(math.sqrt(3 * sum((2 * k + 1) ** 2 for k in range(5))), rel=1e-7)
        assert counts == [2, 1]
        assert placements == ["(Replicate(),)"] * 5
        assert values == [[2.0 * k + 1] * 3 for k in range(5)]


def _missing_on_one_rank(is_sharded: bool) -> tuple[float, bool]:
    """The gradient of a replicated or of a sharded parameter."""
    mesh, n = mesh_of((2,)), 4
    p = placed(torch.ones(n), mesh, [Partial()], (n,), [Shard(0)] if is_sharded else [Replicate()])
    plan = sonde.group_parameters_for_norm([p], mesh=mesh)
    if dist.get_rank() == 1:
        p.grad = None
    return float(sonde.clip_grad_norm_distributed_(plan, 1.0)), p.grad is None


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_partial_gradient_that_is_missing_on_one_rank_counts_as_zeros(ranks2: Ranks, is_sharded: bool) -> None:
    assert ranks2(_missing_on_one_rank, is_sharded) == [(2.0, False), (2.0, True)]
