"""Gradients that are still to be summed over ranks: reduced together, once for each group of ranks and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.parallel.placements import layout_of, local_tensor


def reduce_partial(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Sum what is partial over its mesh axes, by one all-reduce for each mesh axis, dtype and kind.

    Norm weights under sequence parallelism have such gradients. An optimizer would reduce each of them once more, on
    its own: so the reduced ones are to be written back.

    Args:
        gradients: DTensors, those without partial placements among them; in the same order on every rank.

    Returns:
        The same, with Replicate in place of Partial; those that had none are the same objects.
    """
    from torch.distributed.tensor import DTensor, Replicate

    reduced = list(gradients)
    bins: dict[tuple[Any, ...], list[int]] = {}
    for i, gradient in enumerate(gradients):
        for axis, op in layout_of(gradient).partial:
            mesh = cast(DTensor, gradient).device_mesh
            ranks = tuple(dist.get_process_group_ranks(mesh.get_group(axis)))
            bins.setdefault((axis, ranks, gradient.dtype, op), []).append(i)
    for (axis, _ranks, _dtype, op), members in bins.items():
        mesh = cast(DTensor, gradients[members[0]]).device_mesh
        locals_ = [local_tensor(reduced[i]) for i in members]
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
