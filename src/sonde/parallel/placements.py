"""Tensors that are cut over ranks: DTensors, the parts that ranks hold of them, and modules that FSDP cuts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn


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


def reshard(model: nn.Module) -> None:
    """Make FSDP2 show the sharded parameters again, and gather them anew at the next forward.

    After a forward, FSDP2 leaves the outermost module's parameters gathered. Those stand in place of the shards, and
    would not follow a change of the shards.
    """
    for module in fsdp_modules(model):
        module.reshard()


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on, outermost first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [m for m in model.modules() if isinstance(m, fsdp.FSDPModule)]


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


def from_local(local: Tensor, spec: Any, placements: Sequence[Any] | None = None) -> Tensor:
    """The DTensor of which this rank holds `local`, placed as a spec or `placements` says; nothing is communicated."""
    from torch.distributed.tensor import DTensor

    placements = spec.placements if placements is None else placements
    return DTensor.from_local(local, spec.mesh, placements, run_check=False, shape=spec.shape, stride=spec.stride)


def shard_of(spec: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of what this rank holds of a tensor, and the index of its first element in the whole; along each dim.

    Args:
        spec: of a DTensor; each dim of this rank's part is one range of the whole dim, as FSDP2 and tensor parallelism
            cut it.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    return tuple(shape), tuple(offset)
