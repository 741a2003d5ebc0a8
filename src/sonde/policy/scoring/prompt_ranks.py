"""The ranks that hold a policy, and which of them have responses of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from sonde.parallel.data_ranks import DataRanks, check_whole_mesh, data_ranks, find_experts
from sonde.parallel.gathered import gathered_parameters
from sonde.parallel.placements import is_dtensor, stage_ranks
from sonde.parallel.process_groups import data_parallel_group, group_of_mesh, group_over

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class PromptRanks:
    """The ranks that take part in a measurement of a policy.

    Attributes:
        everyone: all of them; None for this process alone.
        same_part: those that hold the same part of every gradient as this rank, each for responses of its own.
        data: which of the ranks have responses of their own. Ranks of tensor parallelism share theirs.
        mesh: all of them, if parameters are cut over ranks; otherwise None.
    """

    everyone: dist.ProcessGroup | None
    same_part: dist.ProcessGroup | None
    data: DataRanks
    mesh: DeviceMesh | None


def prompt_ranks(
    model: nn.Module, process_group: dist.ProcessGroup | None = None, mesh: DeviceMesh | None = None
) -> PromptRanks:
    """Find the ranks of a policy. Under FSDP2 and tensor parallelism, all ranks have to call this.

    Args:
        model: plain, in DDP, or cut by FSDP2 or tensor parallelism.
        process_group: the ranks with responses of their own, for a model that is not cut; by default those of DDP.
        mesh: all ranks that hold any of a cut model, where no parameter is on all of them.

    Raises:
        ValueError: when the ranks of a cut model cannot be found.
    """
    parameters: Mapping[str, Tensor] = dict(model.named_parameters())
    if not any(map(is_dtensor, parameters.values())):
        group = data_parallel_group(model) if process_group is None else process_group
        data = DataRanks(group.rank(), group.size()) if group is not None else DataRanks()
        return PromptRanks(group, group, data, None)
    gathered = gathered_parameters(model)
    parameters = dict(model.named_parameters())  # FSDP2 shows its sharded parameters again
    leaves: list[Tensor] = [gathered.get(id(p), p) for p in parameters.values()]
    if find_experts(list(parameters.values()), leaves) is not None:
        raise ValueError(
            "gradients of single prompts cannot be read of experts that several ranks feed: measure the model without "
            "expert parallelism"
        )
    mesh = check_whole_mesh(parameters, mesh)
    data = data_ranks(mesh, leaves)
    cut: list[DeviceMesh] = [leaf.device_mesh for leaf in leaves if is_dtensor(leaf)]  # type: ignore[attr-defined]
    everyone = same_part = group_of_mesh(mesh)
    if data.n_sharing > 1:
        peers = stage_ranks(mesh, max(cut, key=lambda m: m.size()))
        same_part = group_over(peers) if len(peers) > 1 else None
    return PromptRanks(everyone, same_part, data, mesh)
