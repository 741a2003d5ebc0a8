"""Meshes of ranks: which ranks they have, which of their axes some ranks lie along, and where this rank is on them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from sonde.parallel.placements import spec_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
