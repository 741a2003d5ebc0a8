"""What a rank counts of one parameter's gradient, so that every element of the model counts once over all ranks.

Every parallelism is this one linear map. If a gradient is cut into `n_shards` distinct shards, each shard is held by
`n_ranks/n_shards` of the ranks that are summed. A rank either counts its part with a weight of `n_shards/n_ranks`, or
the first of the ranks that hold a part counts it alone. The placements of the *gradient* matter, not those of the
parameter. Under sequence parallelism a replicated norm weight has a partial gradient, and a sharded row-wise embedding
has a replicated gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from sonde.parallel.placements import (
    axes_over,
    from_local,
    is_dtensor,
    local_tensor,
    ranks_along,
    ranks_of,
    shard_of,
    spec_of,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class Share:
    """How a gradient is spread over the ranks of its mesh.

    Attributes:
        mesh: None for a plain tensor, which is whole on its rank.
        sharded: mesh axes over which the gradient is cut.
        partial: mesh axes over which it must still be summed, each with "sum" or "avg".
    """

    mesh: DeviceMesh | None
    sharded: tuple[int, ...] = ()
    partial: tuple[tuple[int, str], ...] = ()

    @functools.cached_property
    def n_shards(self) -> int:
        """Distinct shards, after partial axes have been summed."""
        return math.prod(self.mesh.size(axis) for axis in self.sharded) if self.mesh is not None else 1

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """This rank and those that hold the other shards of what it holds.

        Empty for a whole gradient, and on a rank outside the mesh, which holds no elements.
        """
        return ranks_along(self.mesh, self.sharded) if self.mesh is not None and self.n_shards > 1 else ()

    def is_first_copy(self, first_rank: int) -> bool:
        """Whether this rank is the first of those that hold the same elements.

        Args:
            first_rank: the lowest of all ranks that hold any of the gradient or of a copy, by its global number. A
                plain gradient is the same on all of them.
        """
        if self.mesh is None:
            return dist.get_rank() == first_rank
        coordinate = self.mesh.get_coordinate()
        # Where the mesh is a part of all ranks, the copies on its sister meshes do not count.
        if coordinate is None or first_rank not in ranks_of(self.mesh):
            return False
        summed = {*self.sharded, *(axis for axis, _ in self.partial)}
        return all(at == 0 for axis, at in enumerate(coordinate) if axis not in summed)


WHOLE = Share(None)


def share_of(spec: Any) -> Share:
    """How a gradient is spread over ranks.

    Args:
        spec: of a DTensor; None for a plain tensor.

    Raises:
        ValueError: for any placement other than Shard, the strided Shard of FSDP over tensor parallelism, Replicate,
            and Partial with "sum" or "avg".
    """
    if spec is None:
        return WHOLE
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard  # not a subclass of Shard

    sharded: list[int] = []
    partial: list[tuple[int, str]] = []
    for axis, placement in enumerate(spec.placements):
        if type(placement) in (Shard, _StridedShard):
            sharded.append(axis)
        elif type(placement) is Partial and placement.reduce_op in ("sum", "avg"):
            partial.append((axis, placement.reduce_op))
        elif type(placement) is not Replicate:
            raise ValueError(
                f"placement {placement!r} on mesh axis {axis} is not supported, got {tuple(spec.placements)}: "
                "redistribute the gradient to Shard, Replicate or Partial('sum') first"
            )
    return Share(spec.mesh, tuple(sharded), tuple(partial))


def same_placement(a: Any, b: Any) -> bool:
    """Whether two DTensor specs, or None for plain tensors, place elements alike; shapes do not matter."""
    if a is None or b is None:
        return a is b
    return bool(a.placements == b.placements and (a.mesh is b.mesh or a.mesh == b.mesh))


@dataclass(frozen=True)
class CountedPart:
    """The part that a rank counts of a gradient that several ranks hold.

    Attributes:
        spec: how that part is placed; None for a plain gradient.
        block: the part of what this rank holds, as slices; None for all of it.
    """

    spec: Any
    block: tuple[slice, ...] | None = None

    def of(self, local: Tensor) -> Tensor:
        """The part of what this rank holds; a view."""
        return local if self.block is None else local[self.block]


def counted_part(spec: Any, first_rank: int, *, like: Any = None) -> CountedPart | None:
    """What a rank counts of a gradient if the first copy counts alone; None if it counts nothing.

    Args:
        spec: of the gradient, after partial axes have been summed; None for a plain one.
        first_rank: as for `Share.is_first_copy`.
        like: another spec. A gradient that is whole where this one is cut is counted as this one is cut.
    """
    share, its = share_of(spec), share_of(like)
    if its.sharded and not share.sharded:
        if not its.is_first_copy(first_rank):
            return None
        shape, offset = shard_of(like)
        return CountedPart(like, tuple(slice(start, start + n) for start, n in zip(offset, shape, strict=True)))
    return CountedPart(spec) if share.is_first_copy(first_rank) else None


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
        for axis, op in share_of(spec_of(gradient)).partial:
            mesh = spec_of(gradient).mesh
            ranks = tuple(dist.get_process_group_ranks(mesh.get_group(axis)))
            bins.setdefault((axis, ranks, str(gradient.dtype), op), []).append(i)
    for (axis, _ranks, _dtype, op), members in sorted(bins.items()):
        mesh = spec_of(gradients[members[0]]).mesh
        locals_ = [local_tensor(reduced[i]) for i in members]
        # A gradient that is partial on two axes is in two bins: the second reduces what the first has left.
        packed = torch.cat([t.reshape(-1) for t in locals_])
        dist.all_reduce(packed, group=mesh.get_group(axis))
        if op == "avg":
            packed /= mesh.size(axis)
        for i, part, local in zip(members, packed.split([t.numel() for t in locals_]), locals_, strict=True):
            old = cast(DTensor, reduced[i])
            placements = [Replicate() if a == axis else p for a, p in enumerate(old.placements)]
            reduced[i] = from_local(part.view(local.shape), spec_of(old), placements)
    return reduced


def gathered_axes(parameter: Tensor, leaf: Tensor) -> list[int]:
    """The axes of a parameter's mesh from which FSDP2 gathers it for forward and backward, also those of copies.

    Args:
        parameter: a DTensor, as the optimizer holds it.
        leaf: the tensor that backward makes its gradient for. It may stay cut over some axes, as by tensor parallelism.
    """
    mesh = spec_of(parameter).mesh
    still_cut = axes_over(mesh, ranks_of(spec_of(leaf).mesh)) if is_dtensor(leaf) else ()
    return [axis for axis in range(mesh.ndim) if axis not in (still_cut or ())]


def is_gathered(parameter: Tensor, leaf: Tensor) -> bool:
    """Whether FSDP2 gathers a parameter from several ranks; alike on all ranks. Arguments as `gathered_axes`."""
    if parameter is leaf or not is_dtensor(parameter):
        return False
    spec = spec_of(parameter)
    return any(spec.mesh.size(axis) > 1 for axis in gathered_axes(parameter, leaf) if axis in share_of(spec).sharded)
