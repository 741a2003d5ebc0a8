"""Which ranks have data of their own, and which of these feed the same experts.

The other ranks hold parts of a model that works on the same micro-batch. Under expert parallelism, every backward sends
tokens of all ranks of a group to each expert. So what one backward adds to an expert's gradient is of the data of all
of them: a piece of the experts is what the whole group fed them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import Tensor

from sonde.parallel.placements import axes_over, check_mesh, is_dtensor, place_along, ranks_along, ranks_of
from sonde.parallel.process_groups import group_over
from sonde.parallel.shares import gathered_axes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class DataRanks:
    """This rank's place among the ranks that have data of their own.

    Ranks of tensor parallelism work on one micro-batch together: they are one data-parallel rank, and one of them
    counts its pieces.

    Attributes:
        rank: number of this rank's data.
        n_ranks: how many ranks have data of their own.
        n_sharing: how many ranks share this rank's parameters and its data, this rank included.
        first_sharing: the lowest of them, by its global number.
        counts_pieces: whether this rank counts the pieces of its data. (In a pipeline, one stage does.)
    """

    rank: int = 0
    n_ranks: int = 1
    n_sharing: int = 1
    first_sharing: int = 0
    counts_pieces: bool = True


def check_whole_mesh(parameters: Mapping[str, Tensor], mesh: Any = None, experts: Collection[int] = ()) -> DeviceMesh:
    """The mesh of all ranks that hold any of a model: as given, or the largest of its parameters.

    Args:
        parameters: by name; plain ones count for nothing.
        mesh: as the user gave it, or None.
        experts: positions of parameters whose own mesh is taken only if no other is as large, since it need not have
            the axes of the others.

    Raises:
        ValueError: when it does not contain the ranks of every parameter, or is no mesh.
    """
    meshes = {name: cast(Any, p).device_mesh for name, p in parameters.items() if is_dtensor(p)}
    if mesh is None:
        are_experts = [name for i, name in enumerate(parameters) if i in experts]
        _, mesh = max(meshes.items(), key=lambda item: (item[1].size(), item[0] not in are_experts, item[1].ndim))
    check_mesh("mesh", mesh)
    for name, its_mesh in meshes.items():
        if its_mesh is not mesh and not ranks_of(its_mesh) <= ranks_of(mesh):
            raise ValueError(
                f"{name!r} is on ranks outside the mesh of the other parameters, so no mesh of the model holds all of "
                "its ranks: pass mesh=, the mesh of all ranks that hold any of the model"
            )
    return cast("DeviceMesh", mesh)


def axis_of_sequences(parameters: Iterable[Tensor]) -> str | None:
    """The name of a mesh axis over which a parameter is cut and that is named after context parallelism, if any."""
    for mesh in {cast(Any, p).device_mesh for p in parameters if is_dtensor(p)}:
        for axis, name in enumerate(mesh.mesh_dim_names or ()):
            if mesh.size(axis) > 1 and {"cp", "context"} & set(name.split("_")):
                return str(name)
    return None


def data_ranks(
    mesh: DeviceMesh,
    leaves: Sequence[Tensor],
    pp_mesh: DeviceMesh | None = None,
    cp_mesh: DeviceMesh | None = None,
) -> DataRanks:
    """Which ranks of a mesh have data of their own.

    FSDP2 cuts parameters over ranks with data of their own, and gathers them for forward and backward. What is still
    cut then is cut over ranks that work on the same data, as pipeline stages do.

    Args:
        mesh: all ranks that hold any of the model.
        leaves: the parameters as forward uses them.
        pp_mesh: the pipeline stages.
        cp_mesh: ranks that hold parts of the same sequences; then no leaf may be cut.

    Raises:
        ValueError: when the ranks over which they are cut, those that share sequences, or the pipeline stages are no
            whole axes of the mesh.
    """
    meshes = [cast(Any, leaf).device_mesh for leaf in leaves if is_dtensor(leaf)]
    if cp_mesh is not None:
        if pp_mesh is not None or meshes:
            raise ValueError(
                "context parallelism is measured alone and below FSDP2 or DDP, got a model that is cut by tensor, "
                "expert or pipeline parallelism too: measure the norm by sonde.clip_grad_norm_"
            )
        if axes_over(mesh, ranks_of(cp_mesh)) is None:
            raise ValueError(
                "cp_mesh= is no axis of the mesh of all ranks: pass mesh=, a mesh of all ranks of which cp_mesh= is an "
                "axis, even where FSDP2 was given that mesh flattened"
            )
        meshes = [cp_mesh]
    sharing = ranks_of(max(meshes, key=lambda m: m.size())) if meshes else frozenset([dist.get_rank()])
    axes = axes_over(mesh, sharing)
    if axes is None or any(not ranks_of(m) <= sharing for m in meshes):
        raise ValueError(
            "parameters are cut over ranks that are no axes of one mesh, so it is not known which ranks have data of "
            "their own: cut the model over axes of one mesh"
        )
    stages = axes_over(mesh, ranks_of(pp_mesh)) if pp_mesh is not None else ()
    if stages is None:
        raise ValueError("pp_mesh= is no axis of mesh=: pass a mesh= that has the pipeline stages as an axis")
    together = {*axes, *stages}
    rank, n_ranks = place_along(mesh, [axis for axis in range(mesh.ndim) if axis not in together])
    counts_pieces = place_along(mesh, sorted(together))[0] == 0
    return DataRanks(rank, n_ranks, len(sharing), min(sharing), counts_pieces)


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that feed this rank's experts.

    Attributes:
        indices: which of the model's trainable parameters are experts'.
        group: the ranks that feed the same experts, this rank among them; each has data of its own.
        n_ranks: how many they are.
        is_first: whether this rank is the first of them.
    """

    indices: frozenset[int]
    group: dist.ProcessGroup
    n_ranks: int
    is_first: bool


def find_experts(
    parameters: Sequence[Tensor],
    leaves: Sequence[Tensor],
    expert_mesh: DeviceMesh | None = None,
    *,
    n_trainable: int | None = None,
) -> ExpertRanks | None:
    """Find parameters that are cut over ranks with data of their own, though FSDP2 does not gather them.

    FSDP2 cuts a parameter over ranks with data of their own. If a gathered parameter is still cut over some of the
    ranks over which FSDP2 cuts others, these ranks feed it together.

    Args:
        parameters: of the model; trainable ones first.
        leaves: the tensors that forward uses for them, [parameters].
        expert_mesh: the ranks over which experts are spread, two or more in one axis, where no parameter is cut by
            FSDP2; None to find them.
        n_trainable: how many of the parameters are trainable; all by default.

    Returns:
        The experts' ranks; None without experts.

    Raises:
        ValueError: when experts are spread over different sets of ranks, or no parameter is cut over
            `expert_mesh`.
    """
    me = dist.get_rank() if dist.is_initialized() else 0
    if expert_mesh is not None:
        with_data = ranks_of(expert_mesh)
    else:
        # One parameter for each pair of meshes: to look at a mesh takes as long as it has ranks.
        of_meshes = {
            (id(cast(Any, p).device_mesh), id(cast(Any, leaf).device_mesh) if is_dtensor(leaf) else None): (p, leaf)
            for p, leaf in zip(parameters, leaves, strict=True)
            if leaf is not p
        }
        gathered = [ranks_along(cast(Any, p).device_mesh, gathered_axes(p, leaf)) for p, leaf in of_meshes.values()]
        with_data = frozenset[int]().union(*gathered)
    feeding: dict[int, frozenset[int]] = {}
    for index, leaf in enumerate(leaves[:n_trainable]):
        if is_dtensor(leaf) and len(ranks := (ranks_of(cast(Any, leaf).device_mesh) & with_data) | {me}) > 1:
            feeding[index] = ranks
    if not feeding:
        if expert_mesh is not None:
            raise ValueError(
                "expert_mesh= has several ranks, and no trainable parameter is cut over any of them: pass the mesh "
                "axis over which experts are DTensors, for example mesh['ep']"
            )
        return None
    ranks = next(iter(feeding.values()))
    if any(other != ranks for other in feeding.values()):
        raise ValueError(
            "experts are spread over different sets of ranks, and pieces can be counted for one set alone: spread all "
            "experts over one mesh axis"
        )
    return ExpertRanks(frozenset(feeding), group_over(sorted(ranks)), len(ranks), min(ranks) == me)
