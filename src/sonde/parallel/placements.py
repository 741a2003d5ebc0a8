"""How a gradient is spread over ranks, and so how much of it each rank counts.

A norm over ranks is a sum over ranks of each one's local sum. A rank that holds one of `n_shards` distinct shards, each
of which `n_ranks/n_shards` of the summed ranks hold, counts `n_shards/n_ranks` of its own: then every element counts
once. What matters is how the *gradient* lies, not the parameter: under sequence parallelism a replicated norm weight
has a partial gradient, and a row-wise embedding a sharded parameter with a replicated one.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on a mesh.

    Attributes:
        mesh: None for a plain tensor, which is whole on its rank.
        sharded: mesh axes over which it is cut.
        partial: mesh axes over which it is still to be summed, with "sum" or "avg".
    """

    mesh: DeviceMesh | None
    sharded: tuple[int, ...] = ()
    partial: tuple[tuple[int, str], ...] = ()

    @functools.cached_property
    def n_shards(self) -> int:
        """Distinct shards, once what is partial has been summed."""
        return math.prod(self.mesh.size(axis) for axis in self.sharded) if self.mesh is not None else 1

    @functools.cached_property
    def sharding_ranks(self) -> tuple[int, ...]:
        """The ranks that hold the other shards of what this rank holds, itself included; empty for a whole tensor."""
        if self.mesh is None or self.n_shards == 1:
            return ()
        here = self.mesh.get_coordinate()
        if here is None:  # outside the mesh, where there are no elements
            return ()
        index = tuple(slice(None) if axis in self.sharded else at for axis, at in enumerate(here))
        return tuple(self.mesh.mesh[index].reshape(-1).tolist())


WHOLE = Layout(None)


def is_dtensor(value: object) -> bool:
    """Whether a tensor is a DTensor, without importing DTensor: that takes half a second, and who has one has it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether FSDP, of either version, holds this module's parameters; imports neither."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))


def reshard(model: Any) -> None:
    """Let FSDP2 gather parameters anew at the next forward, and show their shards until then.

    It keeps those of the outermost module gathered after a forward: they would not follow what is done to the shards,
    and stand in the shards' place.
    """
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


def layout_of(tensor: Tensor) -> Layout:
    """How a tensor lies on its mesh.

    Args:
        tensor: plain or a DTensor.

    Raises:
        ValueError: for a placement that is none of Shard, its strided kind of FSDP over tensor parallelism, Replicate,
            and Partial with "sum" or "avg".
    """
    return layout_of_spec(cast(Any, tensor)._spec) if is_dtensor(tensor) else WHOLE


def layout_of_spec(spec: Any) -> Layout:
    """As `layout_of`, of what a DTensor says of itself."""
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
                f"placement {placement!r} on mesh axis {axis} is not known, got it in {tuple(spec.placements)}: "
                "redistribute the gradient to Shard, Replicate or Partial('sum') first"
            )
    return Layout(spec.mesh, tuple(sharded), tuple(partial))


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without a copy; the tensor itself if it is plain."""
    if not is_dtensor(tensor):
        return tensor
    local: Tensor = cast(Any, tensor)._local_tensor
    wait = getattr(local, "wait", None)  # a collective may still be writing to it
    return cast(Tensor, wait()) if callable(wait) else local


def ranks_of(mesh: DeviceMesh) -> frozenset[int]:
    """The ranks of a mesh: meshes made apart are the same if these are."""
    return frozenset(mesh.mesh.reshape(-1).tolist())


def check_mesh(name: str, mesh: Any, *, n_axes: int | None = None) -> None:
    """Refuse what is no mesh, or one that this rank is not in.

    Raises:
        ValueError: naming the argument.
    """
    device_mesh = sys.modules.get("torch.distributed.device_mesh")
    if device_mesh is None or not isinstance(mesh, device_mesh.DeviceMesh):
        raise ValueError(f"{name} must be a DeviceMesh, got {mesh!r:.60}: make one by init_device_mesh")
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{name} has ranks {_some(ranks_of(mesh))}, and this rank is none of them: call it on those ranks only"
        )
    if n_axes is not None and mesh.ndim != n_axes:
        raise ValueError(f"{name} must have {n_axes} axis, got {mesh.ndim}: pass mesh['pp'], say, and not all of it")


def check_layout(
    layout: Layout, device: torch.device, mesh: DeviceMesh | None, *, n_replicas: int | None = None
) -> None:
    """Refuse a gradient that cannot be summed with the others.

    Args:
        layout: of the gradient.
        device: of its local part.
        mesh: of all ranks, if one was given.
        n_replicas: how many of them were said to hold the same values.

    Raises:
        ValueError: when it lies on ranks outside, not on this one, on another kind of device than its mesh (the CPU is
            allowed, as gradients may be offloaded, unless they are still to be summed), or so that no such number of
            ranks can hold the same.
    """
    own = layout.mesh if layout.mesh is not None else mesh
    if own is not None and device.type not in (own.device_type, "cpu"):
        raise ValueError(
            f"it is on {device.type} and its mesh on {own.device_type}: move it there, or make the mesh where the "
            "gradient is"
        )
    if layout.mesh is None:
        return
    if layout.partial and device.type != layout.mesh.device_type:
        raise ValueError(
            f"it is still to be summed on {layout.mesh.device_type}, and lies on {device.type}: move it there"
        )
    if layout.mesh.get_coordinate() is None and n_replicas is None:
        raise ValueError(
            f"it lies on ranks {_some(ranks_of(layout.mesh))}, and this rank, which is none of them, cannot tell how "
            "many hold the same: pass the mesh of all ranks, and replicas= for it"
        )
    if mesh is None:
        return
    if not ranks_of(layout.mesh) <= ranks_of(mesh):
        raise ValueError(
            f"it lies on ranks {_some(ranks_of(layout.mesh))}, which mesh= ({_some(ranks_of(mesh))}) does not contain: "
            "pass the mesh of all ranks that hold the model"
        )
    least, most = layout.mesh.size() // layout.n_shards, mesh.size() // layout.n_shards
    if n_replicas is not None and (n_replicas % least or n_replicas > most):
        raise ValueError(
            f"it is cut into {layout.n_shards} shards over {layout.mesh.size()} of {mesh.size()} ranks, so that "
            f"replicas= must be a multiple of {least} up to {most}, got {n_replicas}"
        )


def _some(ranks: frozenset[int]) -> str:
    first = sorted(ranks)[:8]
    return ", ".join(map(str, first)) + (f", … {max(ranks)}" if len(ranks) > len(first) else "")


def share(layout: Layout, *, n_ranks: int, n_stages: int = 1, n_replicas: int | None = None) -> float:
    """How much of its local sum a rank counts where so many ranks are summed.

    Args:
        layout: of the gradient, once what is partial has been summed.
        n_ranks: that are summed, all stages included.
        n_stages: pipeline stages among them, each with parameters of its own.
        n_replicas: ranks among them that hold the same values; None for as many as the layout leaves.

    Returns:
        One over the ranks that hold the same: n_shards over the ranks of a stage.
    """
    return 1.0 / n_replicas if n_replicas is not None else layout.n_shards * n_stages / n_ranks


def check_stages(layout: Layout, pp_mesh: DeviceMesh | None) -> None:
    """Refuse stages that are no stages: a gradient is not cut over them, as each has parameters of its own.

    Raises:
        ValueError: when it is.
    """
    if pp_mesh is None or layout.mesh is None:
        return
    if len(shared := ranks_of(pp_mesh) & set(layout.sharding_ranks)) > 1:
        raise ValueError(
            f"it is cut over ranks {_some(shared)} of pp_mesh=, whose ranks are pipeline stages with parameters of "
            "their own: pass the axis of the stages alone"
        )


_COUNTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_elements(gradient: Tensor, *, allow_sparse: bool) -> None:
    """Refuse a gradient whose elements cannot be squared and added up.

    Raises:
        ValueError: when it is sparse, complex, of another dtype than the common four, or on the meta device.
    """
    local = local_tensor(gradient)
    if local.layout is not torch.strided and not (allow_sparse and local.layout is torch.sparse_coo):
        raise ValueError("it is sparse, and only dense ones can be counted: use Embedding(sparse=False)")
    if local.is_complex():
        raise ValueError("it is complex, and only real ones can be counted: use torch.view_as_real")
    if local.dtype not in _COUNTED_DTYPES:
        raise ValueError(f"its dtype is {local.dtype}, and only fp16, bf16, fp32 and fp64 can be counted: convert it")
    if local.is_meta:
        raise ValueError("it is on the meta device, where there is nothing to count: materialise the model first")
