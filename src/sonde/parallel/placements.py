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
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

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


@dataclass(frozen=True)
class GatheredAxis:
    """The mesh axis along which FSDP2 gathers a parameter.

    Attributes:
        dim: of the parameter, which is cut along that axis.
        ranks: along the axis, in the order of their shards, by their global numbers; this rank is among them.
        group: of these ranks.
    """

    dim: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup


def gathered_axis(spec: Any, still_cut: Collection[int]) -> GatheredAxis | None:
    """The axis along which FSDP2 gathers a parameter; None if every rank holds what it would gather.

    Args:
        spec: of the parameter as the optimizer holds it.
        still_cut: ranks over which it stays cut in forward and backward, as by tensor parallelism.

    Raises:
        ValueError: when there are several such axes.
    """
    layout, coordinate = layout_of_spec(spec), spec.mesh.get_coordinate()
    found = []
    for axis in layout.sharded:
        index = tuple(slice(None) if a == axis else at for a, at in enumerate(coordinate))
        ranks = tuple(spec.mesh.mesh[index].reshape(-1).tolist())
        if len(ranks) > 1 and not set(ranks) <= set(still_cut):
            found.append(GatheredAxis(spec.placements[axis].dim, ranks, spec.mesh.get_group(axis)))
    if len(found) > 1:
        raise ValueError(
            f"a parameter is gathered along {len(found)} mesh axes, got {tuple(spec.placements)}, where metric='adam' "
            "knows how to gather along one: cut it along one axis, or use metric='euclidean'"
        )
    return found[0] if found else None


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


def ranks_of(mesh: DeviceMesh) -> frozenset[int]:
    """The ranks of a mesh. Two meshes that were made separately are the same if their ranks are."""
    if (ranks := _ranks.get(mesh)) is None:
        ranks = _ranks[mesh] = frozenset(mesh.mesh.reshape(-1).tolist())
    return ranks


_ranks: weakref.WeakKeyDictionary[DeviceMesh, frozenset[int]] = weakref.WeakKeyDictionary()
"""A mesh makes the list of its ranks anew each time, and is asked once for each of thousands of parameters."""


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


def check_mesh(name: str, mesh: Any, *, n_axes: int | None = None) -> None:
    """Refuse a value that is not a mesh, or a mesh that does not contain this rank.

    Raises:
        ValueError: naming the argument.
    """
    device_mesh = sys.modules.get("torch.distributed.device_mesh")
    if device_mesh is None or not isinstance(mesh, device_mesh.DeviceMesh):
        raise ValueError(f"{name} must be a DeviceMesh, got {mesh!r:.60}: make one by init_device_mesh")
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{name} has ranks {_list_ranks(ranks_of(mesh))}, and this rank is not among them: call it on those ranks "
            "only"
        )
    if n_axes is not None and mesh.ndim != n_axes:
        raise ValueError(
            f"{name} must have {n_axes} axis, got {mesh.ndim}: pass one axis of the mesh, for example mesh['pp']"
        )


def check_layout(
    layout: Layout, device: torch.device, mesh: DeviceMesh | None, *, n_replicas: int | None = None
) -> None:
    """Refuse a gradient that cannot be summed with the others.

    Args:
        layout: of the gradient.
        device: of its local part.
        mesh: all ranks that hold any of the model, if it was given.
        n_replicas: how many of these ranks hold the same values, if it was declared.

    Raises:
        ValueError: when the gradient is on ranks outside `mesh`; when this rank is outside the gradient's mesh; when it
            is on another kind of device than its mesh (the CPU is allowed, since gradients may be offloaded, unless
            they must still be summed); when its layout contradicts `n_replicas`.
    """
    gradient_mesh = layout.mesh if layout.mesh is not None else mesh
    if gradient_mesh is not None and device.type not in (gradient_mesh.device_type, "cpu"):
        raise ValueError(
            f"it is on {device.type} and its mesh on {gradient_mesh.device_type}: move the gradient to the mesh's "
            "device, or make the mesh on the gradient's"
        )
    if layout.mesh is None:
        return
    if layout.partial and device.type != layout.mesh.device_type:
        raise ValueError(
            f"it must still be summed on {layout.mesh.device_type}, but is on {device.type}: move it to "
            f"{layout.mesh.device_type}"
        )
    if layout.mesh.get_coordinate() is None and n_replicas is None:
        raise ValueError(
            f"it is on ranks {_list_ranks(ranks_of(layout.mesh))}, and this rank, which is not among them, cannot know "
            "how many ranks hold the same values: pass the mesh of all ranks, and replicas= for this parameter"
        )
    if mesh is None:
        return
    if not ranks_of(layout.mesh) <= ranks_of(mesh):
        raise ValueError(
            f"it is on ranks {_list_ranks(ranks_of(layout.mesh))}, which mesh= ({_list_ranks(ranks_of(mesh))}) does "
            "not contain: pass the mesh of all ranks that hold the model"
        )
    # Each shard is on at least as many ranks as its own mesh has copies, and on at most as many as all ranks allow.
    least, most = layout.mesh.size() // layout.n_shards, mesh.size() // layout.n_shards
    if n_replicas is not None and (n_replicas % least or n_replicas > most):
        raise ValueError(
            f"it is cut into {layout.n_shards} shards over {layout.mesh.size()} of {mesh.size()} ranks, so replicas= "
            f"must be a multiple of {least}, at most {most}, got {n_replicas}: pass how many ranks hold the same values"
        )


def axes_over(mesh: DeviceMesh, ranks: Collection[int]) -> tuple[int, ...] | None:
    """The axes of a mesh along which these ranks lie, seen from this rank; None if they are no whole axes of it."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    grid, wanted = mesh.mesh, set(ranks)
    axes = []
    for axis, at in enumerate(coordinate):
        neighbour = [*coordinate]
        neighbour[axis] = (at + 1) % grid.shape[axis]
        if grid.shape[axis] > 1 and int(grid[tuple(neighbour)]) in wanted:
            axes.append(axis)
    index = tuple(slice(None) if axis in axes else at for axis, at in enumerate(coordinate))
    along = set(grid[index].reshape(-1).tolist())
    return tuple(axes) if along == wanted or (len(wanted) < 2 and not axes) else None


def place_along(mesh: DeviceMesh, axes: Collection[int]) -> tuple[int, int]:
    """This rank's position among the ranks along some axes of a mesh, and how many these are."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # check_mesh refused other ranks
    at, of = 0, 1
    for axis in axes:
        size = mesh.size(axis)
        at, of = at * size + coordinate[axis], of * size
    return at, of


def stage_ranks(mesh: DeviceMesh, pp_mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks of a mesh that are in this rank's pipeline stage, in order.

    Args:
        mesh: all ranks.
        pp_mesh: the stages of this rank's pipeline, two or more; its ranks are in `mesh`.

    Raises:
        ValueError: when the meshes do not show which ranks these are.
    """
    coordinate, axes = mesh.get_coordinate(), axes_over(mesh, ranks_of(pp_mesh))
    if coordinate is not None and axes is not None:
        index = tuple(at if axis in axes else slice(None) for axis, at in enumerate(coordinate))
        return tuple(sorted(mesh.mesh[index].reshape(-1).tolist()))
    # The stages are an axis of another grid of these ranks. In a regular grid, the same number of ranks is between all
    # neighbouring stages.
    ranks, pipeline = sorted(ranks_of(mesh)), pp_mesh.mesh.tolist()
    first, n_stages = ranks.index(pipeline[0]), len(pipeline)
    apart = ranks.index(pipeline[1]) - first
    is_regular = apart > 0 and len(ranks) % (apart * n_stages) == 0 and first // apart % n_stages == 0
    if not is_regular or pipeline != ranks[first : first + apart * n_stages : apart]:
        raise ValueError(
            f"pp_mesh= has ranks {', '.join(map(str, pipeline[:8]))}, and mesh= has no such axis: pass a mesh= that "
            "has the pipeline stages as an axis, and that axis as pp_mesh="
        )
    stage = pp_mesh.get_local_rank()
    return tuple(rank for at, rank in enumerate(ranks) if at // apart % n_stages == stage)


def _list_ranks(ranks: frozenset[int]) -> str:
    first = sorted(ranks)[:8]
    return ", ".join(map(str, first)) + (f", … {max(ranks)}" if len(ranks) > len(first) else "")


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


def check_stages(layout: Layout, pp_mesh: DeviceMesh | None, in_stage: Collection[int]) -> None:
    """Refuse a `pp_mesh` whose ranks are not pipeline stages: stages have parameters of their own.

    Args:
        layout: of the gradient.
        pp_mesh: the stages, if they were given.
        in_stage: the ranks of this rank's stage; empty if they are not known.

    Raises:
        ValueError: when the gradient is cut over ranks of `pp_mesh`, or over ranks of several stages.
    """
    if pp_mesh is None or layout.mesh is None:
        return
    if len(shared := ranks_of(pp_mesh) & set(layout.sharding_ranks)) > 1:
        raise ValueError(
            f"it is cut over ranks {_list_ranks(shared)} of pp_mesh=, whose ranks are pipeline stages with parameters "
            "of their own: pass the mesh axis of the stages alone"
        )
    if in_stage and (others := set(layout.sharding_ranks).difference(in_stage)):
        raise ValueError(
            f"it is cut over ranks {_list_ranks(frozenset(others))} too, which are in other pipeline stages than this "
            "rank: pass a mesh= that has the pipeline stages as an axis, and that axis as pp_mesh="
        )


_COUNTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_elements(gradient: Tensor, *, allow_sparse: bool) -> None:
    """Refuse a gradient whose elements cannot be squared and added up.

    Raises:
        ValueError: when it is sparse, complex, on the meta device, or its dtype is not fp16, bf16, fp32 or fp64.
    """
    local = local_tensor(gradient)
    if local.layout is not torch.strided and not (allow_sparse and local.layout is torch.sparse_coo):
        raise ValueError("it is sparse, and only dense gradients can be counted: use Embedding(sparse=False)")
    if local.is_complex():
        raise ValueError("it is complex, and only real gradients can be counted: use torch.view_as_real")
    if local.dtype not in _COUNTED_DTYPES:
        raise ValueError(f"its dtype is {local.dtype}, and only fp16, bf16, fp32 and fp64 can be counted: convert it")
    if local.is_meta:
        raise ValueError("it is on the meta device, which holds no values: materialise the model first")
