"""Ranks over which experts are spread while each rank has data of its own, as expert parallelism spreads them.

Every backward of such ranks sends tokens of all of them to each expert. So what one backward adds to an expert's
gradient is of the data of all of these ranks: a piece of the experts is what the whole group fed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import Tensor

from sonde.parallel.meshes import ranks_along, ranks_of
from sonde.parallel.placements import is_dtensor
from sonde.parallel.process_groups import group_over
from sonde.parallel.shares import gathered_axes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
