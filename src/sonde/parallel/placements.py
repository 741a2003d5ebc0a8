"""Tensors that are cut over ranks, meshes of these ranks, and modules that FSDP cuts."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without a copy; the tensor itself if it is plain."""
    if not is_dtensor(tensor):
        return tensor
    local: Tensor = cast(Any, tensor)._local_tensor
    wait = getattr(local, "wait", None)  # a collective may still be writing to it
    return cast(Tensor, wait()) if callable(wait) else local


def is_partial(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor that is still to be summed over ranks, so that each holds another number."""
    return any(placement.is_partial() for placement in getattr(spec_of(tensor), "placements", ()))


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


def ranks_of(mesh: DeviceMesh) -> frozenset[int]:
    """The ranks of a mesh. Two meshes that were made separately are the same if their ranks are."""
    if (ranks := _ranks.get(mesh)) is None:
        ranks = _ranks[mesh] = frozenset(mesh.mesh.reshape(-1).tolist())
    return ranks


_ranks: weakref.WeakKeyDictionary[DeviceMesh, frozenset[int]] = weakref.WeakKeyDictionary()
"""A mesh makes the list of its ranks anew each time, and is asked once for each of thousands of parameters."""


def mesh_of_all_ranks(tensors: Collection[Tensor]) -> DeviceMesh | None:
    """The mesh of some of these tensors that has all ranks of the job, if others are cut otherwise, or not at all.

    A sum over its ranks then counts them all. Where all tensors are cut over one mesh, None: nothing is missing.
    """
    meshes = dict.fromkeys(None if (spec := spec_of(t)) is None else spec.mesh for t in tensors)
    if len(meshes) < 2:
        return None
    return next((mesh for mesh in meshes if mesh is not None and mesh.size() == dist.get_world_size()), None)


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a mesh is an axis of, or several axes; the mesh itself if it is whole."""
    return mesh._get_root_mesh()


def size_along(mesh: DeviceMesh, axis: str) -> int:
    """Ranks along the axis of this name; 1 without such an axis."""
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)).get(axis, 1)


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
            f"{name} has ranks {list_ranks(ranks_of(mesh))}, and this rank is not among them: call it on those ranks "
            "only"
        )
    if n_axes is not None and mesh.ndim != n_axes:
        raise ValueError(
            f"{name} must have {n_axes} axis, got {mesh.ndim}: pass one axis of the mesh, for example mesh['pp']"
        )


def axes_over(mesh: DeviceMesh, ranks: Collection[int]) -> tuple[int, ...] | None:
    """The axes of a mesh along which these ranks lie, seen from this rank; None if they are no whole axes of it."""
    if mesh.get_coordinate() is None:
        return None
    wanted = set(ranks)
    axes = [a for a in range(mesh.ndim) if mesh.size(a) > 1 and wanted.issuperset(ranks_along(mesh, [a]))]
    along = set(ranks_along(mesh, axes))
    return tuple(axes) if along == wanted or (len(wanted) < 2 and not axes) else None


def ranks_along(mesh: DeviceMesh, axes: Collection[int]) -> tuple[int, ...]:
    """This rank and the others that it reaches along some axes of a mesh, in the mesh's order; none from outside it."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    index = tuple(slice(None) if axis in axes else at for axis, at in enumerate(coordinate))
    return tuple(mesh.mesh[index].reshape(-1).tolist())


def place_along(mesh: DeviceMesh, axes: Collection[int]) -> tuple[int, int]:
    """This rank's position among the ranks along some axes of a mesh, and how many these are."""
    ranks = ranks_along(mesh, axes)
    return ranks.index(dist.get_rank()), len(ranks)


def stage_ranks(mesh: DeviceMesh, pp_mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks of a mesh that are in this rank's pipeline stage, in order.

    Args:
        mesh: all ranks.
        pp_mesh: the stages of this rank's pipeline, two or more; its ranks are in `mesh`.

    Raises:
        ValueError: when the meshes do not show which ranks these are.
    """
    axes = axes_over(mesh, ranks_of(pp_mesh))
    if axes is not None:
        return tuple(sorted(ranks_along(mesh, set(range(mesh.ndim)).difference(axes))))
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


def list_ranks(ranks: Collection[int]) -> str:
    """Ranks in words, for messages: the first eight, and the last."""
    first = sorted(ranks)[:8]
    return ", ".join(map(str, first)) + (f", … {max(ranks)}" if len(ranks) > len(first) else "")


# The whole parameters that FSDP2 gathers for forward and backward: the leaves whose gradients backward makes.


def gathered_parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """The gathered parameter that stands in for each sharded one, by the `id` of the sharded one.

    FSDP2 makes a gathered parameter at its first gathering and keeps it: later it only frees and refills its memory. So
    a hook on it sees the gradient of every backward on this rank, before FSDP2 adds it up or reduces it.

    Each module of FSDP2 is gathered once, one after another. All ranks have to call this. Afterwards the model shows
    its sharded parameters.

    Raises:
        ValueError: for parameters on the meta device.
    """
    modules = fsdp_modules(model)
    if modules and (meta := next((name for name, p in model.named_parameters() if p.is_meta), None)):
        raise ValueError(f"{meta!r} is on the meta device, which holds no values: attach after to_empty() and loading")
    reshard(model)  # after a forward, the outermost module shows its gathered parameters
    gathered: dict[int, nn.Parameter] = {}
    for module in modules:
        sharded = list(_own_parameters(module))
        module.unshard()
        try:
            shown = list(_own_parameters(module))
        finally:
            module.reshard()
        gathered |= {id(old): new for old, new in zip(sharded, shown, strict=True) if new is not old}
    return gathered


def reduction_dtypes(model: nn.Module) -> list[torch.dtype]:
    """The dtypes in which FSDP2 reduces gradients over ranks, where a policy sets them."""
    # A private path, since torch has no public one; a test guards it.
    policies = [state._mp_policy for state in fsdp_states(model)]
    return list(dict.fromkeys(p.reduce_dtype for p in policies if p.reduce_dtype is not None))


def shown_after_forward(model: nn.Module) -> dict[int, nn.Parameter]:
    """The sharded parameter in whose place FSDP2 shows another since a forward, by the `id` of the one that it shows.

    Where `reshard_after_forward` is a number of ranks, each forward leaves new parameters in the model, cut over that
    many ranks, until FSDP2 gathers again.
    """
    # A record gets this private attribute at the first such forward; a test guards it.
    shown = {
        record.sharded_param: getattr(record, "_sharded_post_forward_param", None)
        for group in fsdp_groups(model)
        for record in group.fsdp_params
    }
    return {id(parameter): own for own, parameter in shown.items() if parameter is not None}


def fsdp_groups(model: nn.Module) -> list[Any]:
    """FSDP2's own records of the parameters that it gathers together."""
    # Private paths, since torch has no public ones; tests guard them.
    groups: list[Any] = []
    for state in fsdp_states(model):
        groups += getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def fsdp_states(model: nn.Module) -> list[Any]:
    """FSDP2's own records of the modules that `fully_shard` was called on."""
    return [module._get_fsdp_state() for module in fsdp_modules(model)]


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a module and its descendants, except those of modules of FSDP2 inside it."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not hasattr(child, "unshard"):
            yield from _own_parameters(child)
