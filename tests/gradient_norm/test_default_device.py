"""A default device, such as "meta" or "cuda", does not move the numbers that a norm needs: they name their device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

import sonde
from tests.gradient_norm.placed_gradients import placed, plain
from tests.ranks import Ranks, mesh_of


def _norms_on(device: str | None) -> list[float]:
    """Norms of all public calls; gradients and meshes are made before the default device is set."""
    mesh, stages = mesh_of((2,)), mesh_of((2,), ("pp",))
    sharded = placed(torch.arange(6.0).view(2, 3), mesh, [Shard(0)], (4, 3))
    partial = placed(torch.ones(3), mesh, [Partial()], (3,), [Replicate()])
    large = plain(torch.ones(256, 300))
    ranks_own = plain(torch.arange(12.0).view(3, 4) + dist.get_rank())
    everything = [("sharded", sharded), ("partial", partial), ("large", large)]
    gradients = [torch.full((3,), float(k)) for k in range(70)]
    torch.set_default_device(device)
    try:
        norms: list[Any] = []
        for order in (2.0, 3.0, math.inf):
            norms.append(sonde.clip_grad_norm_(everything, None, order, mesh=mesh))
            norms.append(sonde.clip_grad_norm_(everything, None, order))
            norms.append(sonde.clip_grad_norm_([ranks_own], None, order, mesh=stages, pp_mesh=stages))
        plan = sonde.group_parameters_for_norm(everything, mesh=mesh)
        norms.append(sonde.clip_grad_norm_distributed_(plan, 1.0, nonfinite="skip"))
        norm, by_group = sonde.get_total_norm(gradients, mesh=mesh, by_group=[str(k) for k in range(70)])
        norms += [norm, by_group["3"]]
        sonde.clip_grads_with_norm_(everything, 0.5, 1.0)
        norms.append(sonde.get_total_norm([large.grad]))
    finally:
        torch.set_default_device(None)
    return [*map(float, norms)]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_changes_no_norm(ranks2: Ranks, device: str) -> None:
    assert ranks2(_norms_on, device) == ranks2(_norms_on, None)
