"""Partial gradients on real ranks: summed once, together, and written back."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
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


def _partial_missing_on_one_rank() -> tuple[float, bool]:
    mesh, rank = mesh_of((2,)), dist.get_rank()
    p = placed(torch.ones(3), mesh, [Partial()], (3,), [Replicate()])
    plan = sonde.group_parameters_for_norm([p], mesh=mesh)
    if rank == 1:
        p.grad = None
    return float(sonde.clip_grad_norm_distributed_(plan, 1.0)), p.grad is None


def test_a_partial_gradient_that_is_missing_on_one_rank_counts_as_zeros(ranks2: Ranks) -> None:
    first, second = ranks2(_partial_missing_on_one_rank)
    assert first == (pytest.approx(math.sqrt(3)), False)
    assert second == (pytest.approx(math.sqrt(3)), True)


def _partial_of_a_sharded_parameter() -> float:
    mesh, rank = mesh_of((2,)), dist.get_rank()
    p = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    p.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    plan = sonde.group_parameters_for_norm([p], mesh=mesh)
    if rank == 1:
        p.grad = None
    return float(sonde.clip_grad_norm_distributed_(plan, None))


def test_zeros_for_a_missing_partial_gradient_have_its_shape(ranks2: Ranks) -> None:
    assert ranks2(_partial_of_a_sharded_parameter) == [2.0, 2.0]


def _summed_and_averaged() -> float:
    """A gradient that is summed over one axis and averaged over the other."""
    mesh = mesh_of((2, 2), ("a", "b"))
    p = placed(torch.full((3,), 1.0 + dist.get_rank()), mesh, [Partial("avg"), Partial()], (3,), [Replicate()] * 2)
    return float(sonde.clip_grad_norm_([p], None, mesh=mesh))


def test_partial_sums_and_averages(ranks4: Ranks) -> None:
    # Ranks hold 1, 2 | 3, 4: sums 3 and 7, whose average is 5.
    assert ranks4(_summed_and_averaged) == pytest.approx([5 * math.sqrt(3)] * 4)
