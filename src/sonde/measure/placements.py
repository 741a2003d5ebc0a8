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
        assert here is not None  # a rank outside the mesh has no local tensor
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


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without a copy; the tensor itself if it is plain."""
    if not is_dtensor(tensor):
        return tensor
    local: Tensor = cast(Any, tensor)._local_tensor
    wait = getattr(local, "wait", None)  # a collective may still be writing to it
    return cast(Tensor, wait()) if callable(wait) else local


def ranks_of(mesh: DeviceMesh) -> frozenset[int]:
    """The ranks of a mesh: meshes made apart are the same if these are."""
    return frozenset(mesh.mesh.reshape(-1).tolist())


def check_layout(layout: Layout, device: torch.device, mesh_ranks: frozenset[int] | None) -> None:
    """Refuse a gradient that cannot be summed with the others.

    Args:
        layout: of the gradient.
        device: of its local part.
        mesh_ranks: the ranks that everything is summed over, if one mesh was given for all.

    Raises:
        ValueError: when it lies on ranks outside, or on another kind of device than its mesh; the CPU is allowed, as
            gradients may be offloaded.
    """
    if layout.mesh is None:
        return
    if mesh_ranks is not None and not (own := ranks_of(layout.mesh)) <= mesh_ranks:
        raise ValueError(
            f"it lies on ranks {_some(own)}, which mesh= ({_some(mesh_ranks)}) does not contain: "
            "pass the mesh of all ranks that hold the model"
        )
    if device.type not in (layout.mesh.device_type, "cpu"):
        raise ValueError(
            f"it is on {device.type} and its mesh on {layout.mesh.device_type}: move it there, or make the mesh where "
            "the gradient is"
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
