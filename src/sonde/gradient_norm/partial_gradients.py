"""Sums partial gradients over their ranks, together: one all-reduce for each group of ranks and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.parallel.placements import layout_of, local_tensor


def reduce_partial(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Sum partial gradients over their mesh axes, by one all-reduce for each mesh axis, dtype and kind of sum.

    Norm weights under sequence parallelism have partial gradients. The caller should write the sums back to `.grad`:
    otherwise the optimizer reduces each of them again, one by one.

    Args:
        gradients: DTensors, with or without partial placements; in the same order on every rank.

    Returns:
        The gradients, with Replicate in place of Partial. A gradient without a partial placement is returned as it is.
    """
    from torch.distributed.tensor import DTensor, Replicate

    reduced = list(gradients)
    # Each bin takes one all-reduce. Bins are sorted: ranks whose gradients come in another order are refused later, in
    # the sum of the norm, and must get there.
    bins: dict[tuple[Any, ...], list[int]] = {}
    for i, gradient in enumerate(gradients):
        for axis, op in layout_of(gradient).partial:
            mesh = cast(DTensor, gradient).device_mesh
            ranks = tuple(dist.get_process_group_ranks(mesh.get_group(axis)))
            bins.setdefault((axis, ranks, str(gradient.dtype), op), []).append(i)
    for (axis, _ranks, _dtype, op), members in sorted(bins.items()):
        mesh = cast(DTensor, gradients[members[0]]).device_mesh
        locals_ = [local_tensor(reduced[i]) for i in members]
        # A gradient that is partial on two axes is in two bins: the second reduces what the first has left.
        packed = torch.cat([t.reshape(-1) for t in locals_])
        dist.all_reduce(packed, group=mesh.get_group(axis))
        if op == "avg":
            packed /= mesh.size(axis)
        for i, part, local in zip(members, packed.split([t.numel() for t in locals_]), locals_, strict=True):
            old = cast(DTensor, reduced[i])
            placements = [Replicate() if a == axis else p for a, p in enumerate(old.placements)]
            reduced[i] = DTensor.from_local(
                part.view(local.shape),
                old.device_mesh,
                placements,
                run_check=False,
                shape=old.shape,
                stride=old.stride(),
            )
    return reduced
