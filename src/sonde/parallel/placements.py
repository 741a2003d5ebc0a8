"""How a gradient is spread over ranks, and so how much of it each rank counts.

A norm over ranks adds up the local sums of all ranks. If a gradient is cut into `n_shards` distinct shards, each shard
is held by `n_ranks/n_shards` of the summed ranks. So each rank counts `n_shards/n_ranks` of its local sum: then every
element counts once. The placements of the *gradient* matter, not those of the parameter. Under sequence parallelism a
replicated norm weight has a partial gradient, and a sharded row-wise embedding has a replicated gradient.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from sonde.parallel.meshes import ranks_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Layout:
    """How a tensor is placed on a mesh.

    Attributes:
        mesh: None for a plain tensor, which is whole on its rank.
        sharded: mesh axes over which the tensor is cut.
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
    def sharding_ranks(self) -> tuple[int, ...]:
        """This rank and those that hold the other shards of what it holds; empty for a whole tensor."""
        if self.mesh is None or self.n_shards == 1:
            return ()
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:  # this rank is outside the mesh and holds no elements
            return ()
        # Along the other axes, ranks hold copies of these shards: stay at this rank's coordinate there.
        index = tuple(slice(None) if axis in self.sharded else at for axis, at in enumerate(coordinate))
        return tuple(self.mesh.mesh[index].reshape(-1).tolist())


WHOLE = Layout(None)


def is_dtensor(value: object) -> bool:
    """Whether a tensor is a DTensor. Does not import DTensor, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether FSDP, of either version, holds this module's parameters. Imports neither version."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))


def is_fsdp1(kind: type) -> bool:
    """Whether modules of this type are of FSDP's first version. Does not import it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and issubclass(kind, fsdp.FullyShardedDataParallel)


def reshard(model: Any) -> None:
    """Make FSDP2 show the sharded parameters again, and gather them anew at the next forward.

    After a forward, FSDP2 leaves the outermost module's parameters gathered. Those stand in place of the shards, and
    would not follow a change of the shards.
    """
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


def layout_of(tensor: Tensor) -> Layout:
    """How a tensor is placed on its mesh.

    Args:
        tensor: plain or a DTensor.

    Raises:
        ValueError: for any placement other than Shard, the strided Shard of FSDP over tensor parallelism, Replicate,
            and Partial with "sum" or "avg".
    """
    return layout_of_spec(cast(Any, tensor)._spec) if is_dtensor(tensor) else WHOLE


def layout_of_spec(spec: Any) -> Layout:
    """As `layout_of`, from the spec of a DTensor."""
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
    return Layout(spec.mesh, tuple(sharded), tuple(partial))


def cut_every(tensor: Tensor, dim: int) -> int:
    """After how many elements a dim of the whole tensor is cut; 0 if it is not cut, 1 if the cuts may be anywhere."""
    if not is_dtensor(tensor):
        return 0
    from torch.distributed.tensor import Shard

    spec = cast(Any, tensor)._spec
    cuts = [
        -(-tensor.shape[dim] // spec.mesh.size(axis)) if type(placement) is Shard else 1
        for axis, placement in enumerate(spec.placements)
        if getattr(placement, "dim", None) == dim
    ]
    return 0 if not cuts else cuts[0] if len(cuts) == 1 else 1


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without a copy; the tensor itself if it is plain."""
    if not is_dtensor(tensor):
        return tensor
    local: Tensor = cast(Any, tensor)._local_tensor
    wait = getattr(local, "wait", None)  # a collective may still be writing to it
    return cast(Tensor, wait()) if callable(wait) else local


def spec_of(tensor: Tensor) -> Any:
    """The spec of a DTensor, the same object while it is placed alike; None for a plain tensor."""
    return getattr(tensor, "_spec", None)


def from_local(local: Tensor, spec: Any) -> Tensor:
    """The DTensor of which this rank holds `local`, placed as a spec says; nothing is communicated."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride)


def shard_of(spec: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of what this rank holds of a tensor, and the index of its first element in the whole; along each dim.

    Args:
        spec: of a DTensor; each dim of this rank's part is one range of the whole dim, as FSDP2 and tensor parallelism
            cut it.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    return tuple(shape), tuple(offset)


def is_gathered(parameter: Tensor, leaf: Tensor) -> bool:
    """Whether FSDP2 gathers a parameter from several ranks for forward and backward; alike on all ranks.

    Args:
        parameter: as the optimizer holds it.
        leaf: the tensor that backward makes its gradient for.
    """
    if parameter is leaf or not is_dtensor(parameter):
        return False
    # Ranks over which it stays cut, as by tensor parallelism.
    still_cut = ranks_of(cast(Any, leaf).device_mesh) if is_dtensor(leaf) else frozenset()
    spec = spec_of(parameter)
    coordinate = spec.mesh.get_coordinate()
    for axis in layout_of_spec(spec).sharded:
        index = tuple(slice(None) if a == axis else at for a, at in enumerate(coordinate))
        ranks = set(spec.mesh.mesh[index].reshape(-1).tolist())
        if len(ranks) > 1 and not ranks <= still_cut:
            return True
    return False


def holds_first_copy(layout: Layout, first_rank: int) -> bool:
    """Whether this rank is the first of those that hold the same elements.

    Args:
        layout: of a gradient; that of a plain one if it is the same on all ranks.
        first_rank: the lowest of all ranks that hold any of the gradient or of a copy, by its global number.
    """
    if layout.mesh is None:
        return dist.get_rank() == first_rank
    coordinate = layout.mesh.get_coordinate()
    # Where the mesh is a part of all ranks, the copies on its sister meshes do not count.
    if coordinate is None or first_rank not in ranks_of(layout.mesh):
        return False
    summed = {*layout.sharded, *(axis for axis, _ in layout.partial)}
    return all(at == 0 for axis, at in enumerate(coordinate) if axis not in summed)


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
    """What a rank counts of a gradient, so that every element counts once; None if it counts nothing.

    Args:
        spec: of the gradient, after partial axes have been summed; None for a plain one.
        first_rank: as for `holds_first_copy`.
        like: another spec. A gradient that is whole where this one is cut is counted as this one is cut.
    """
    layout = WHOLE if spec is None else layout_of_spec(spec)
    if like is not None and not layout.sharded and layout_of_spec(like).sharded:
        if not holds_first_copy(layout_of_spec(like), first_rank):
            return None
        shape, offset = shard_of(like)
        return CountedPart(like, tuple(slice(start, start + n) for start, n in zip(offset, shape, strict=True)))
    return CountedPart(spec) if holds_first_copy(layout, first_rank) else None


def share(layout: Layout, *, n_ranks: int, n_stages: int = 1, n_replicas: int | None = None) -> float:
    """How much of its local sum each rank counts, so that every element counts once in the sum over ranks.

    Args:
        layout: of the gradient, after partial axes have been summed.
        n_ranks: ranks that are summed, all stages included.
        n_stages: pipeline stages among these ranks, each with parameters of its own.
        n_replicas: ranks among them that hold the same values; None derives the number from the layout.

    Returns:
        One over the number of ranks that hold the same values: by the layout, n_shards over the ranks of a stage.
    """
    return 1.0 / n_replicas if n_replicas is not None else layout.n_shards * n_stages / n_ranks
