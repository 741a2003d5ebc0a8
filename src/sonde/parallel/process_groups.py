"""Process groups: which ranks share data, sums over them that need not be waited for, and values of all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sonde.parallel.placements import is_dtensor, is_fully_sharded, ranks_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Tokens = dict[str, Tensor]
"""By name, values of each token, [responses, tokens], or of each response, [responses]; on the CPU."""

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
"""Groups made here, for as long as their world lives: a group cannot be made twice without a leak."""


def group_over(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The process group of some ranks; the first call with them makes it, and must come from all of them.

    Args:
        ranks: global ranks, in any order, this one among them.
    """
    world = cast(Any, dist.group.WORLD)
    assert world is not None  # who has a mesh has initialised torch.distributed
    wanted = tuple(sorted(ranks))
    if len(wanted) == world.size():
        return cast(dist.ProcessGroup, world)
    made = _made.setdefault(world, {})
    if wanted not in made:
        made[wanted] = cast(dist.ProcessGroup, dist.new_group(list(wanted), use_local_synchronization=True))
    return made[wanted]


def start_reduce(
    packed: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> dist.Work | None:
    """Start reducing a vector over ranks, in place.

    Args:
        packed: on a device that the group's backend takes.
        group: None for this process alone.
        op: sum or maximum.

    Returns:
        What to wait for before reading it; None when there is one rank.
    """
    if group is None or group.size() == 1:
        return None
    return cast("dist.Work | None", dist.all_reduce(packed, op=op, group=group, async_op=True))


def group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The process group of all ranks of a mesh; None where that is one."""
    if mesh.size() == 1:  # torch makes no group for some of these
        return None
    return mesh.get_group() if mesh.ndim == 1 else group_over(sorted(ranks_of(mesh)))


def data_parallel_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that have data of their own: DDP's, or FSDP2's; None for a plain model.

    Raises:
        ValueError: for parameters on a mesh of several axes, of which some may not be data-parallel.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return module.process_group
    if any(is_fully_sharded(m) and not hasattr(m, "reshard") for m in model.modules()):
        raise ValueError("FSDP's first version does not say how it cuts parameters: use fully_shard (FSDP2)")
    meshes = dict.fromkeys(p.device_mesh for p in model.parameters() if is_dtensor(p))  # type: ignore[attr-defined]
    if any(mesh.ndim > 1 for mesh in meshes) or len(meshes) > 1:
        raise ValueError(
            "parameters are sharded on several axes: say which ranks have data of their own, process_group="
        )
    return group_of_mesh(next(iter(meshes))) if meshes else None


def gather_from_all_ranks(group: dist.ProcessGroup | None, work: Callable[[], Tokens]) -> Tokens:
    """What every rank made of its responses, on each of them: rows in the order of ranks, as wide as the widest.

    Args:
        group: the ranks; None for this process alone.
        work: what this rank does; what it raises here, the others learn.

    Raises:
        RuntimeError: when another rank failed.
    """
    if group is None or group.size() == 1:
        return work()
    problem: Exception | None = None
    own: Tokens = {}
    try:
        own = work()
    except Exception as error:
        problem = error
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (f"{type(problem).__name__}: {problem}" if problem else "", own), group=group)
    if problem is not None:
        raise problem
    if failed := [(rank, words) for rank, (words, _) in enumerate(everyone) if words]:
        rank, words = failed[0]
        raise RuntimeError(f"rank {rank} of the group failed: {words}")
    return _stack_rows([tokens for _, tokens in everyone])


def _stack_rows(of_ranks: Sequence[Tokens]) -> Tokens:
    """Rows of all, 0 where one has fewer columns than another."""
    merged = {}
    for name in of_ranks[0]:
        tensors = [tokens[name] for tokens in of_ranks]
        if tensors[0].dim() == 2:
            width = max(t.shape[1] for t in tensors)
            tensors = [torch.cat([t, t.new_zeros(len(t), width - t.shape[1])], 1) for t in tensors]
        merged[name] = torch.cat(tensors)
    return merged
