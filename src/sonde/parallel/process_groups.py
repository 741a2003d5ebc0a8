"""Process groups: which ranks have data of their own, asynchronous sums over ranks, values gathered from all ranks."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sonde.parallel.meshes import ranks_of
from sonde.parallel.placements import is_dtensor, is_fsdp1

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
Tokens = dict[str, Tensor]
"""By name: values of each token, [responses, tokens], or of each response, [responses]; on the CPU."""

_KNOWN = "sonde_known_to_all_ranks"
"""Attribute of an error that was gathered from all ranks."""

_groups_by_ranks: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
"""The groups that `group_over` made, for each world. Module-level because a function has nowhere else to cache, and to
make a group twice is a leak. The keys are weak, so that the groups of a destroyed world go with it."""


def group_over(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The process group of these ranks. The first call makes the group, and all of these ranks must make that call.

    Args:
        ranks: global ranks, in any order, this rank among them.
    """
    world = cast(Any, dist.group.WORLD)
    assert world is not None  # whoever has a mesh has initialised torch.distributed
    key = tuple(sorted(ranks))
    if len(key) == world.size():
        return cast(dist.ProcessGroup, world)
    groups = _groups_by_ranks.setdefault(world, {})
    if key not in groups:
        # Local synchronization: only the ranks of the group take part, the rest of the world need not call.
        groups[key] = cast(dist.ProcessGroup, dist.new_group(list(key), use_local_synchronization=True))
    return groups[key]


def check_group(group: object) -> None:
    """Refuse what is no process group with this rank; None is accepted.

    Raises:
        ValueError: naming the argument `process_group`.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"process_group must be a torch.distributed.ProcessGroup that this rank is in, got {group!r:.60}: make one "
            "by torch.distributed.new_group on all ranks, and pass it on its own ranks"
        )


def start_reduce(
    packed: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> dist.Work | None:
    """Start reducing a vector over ranks, in place.

    Args:
        packed: on a device that the group's backend accepts.
        group: None for this process alone.
        op: sum or maximum.

    Returns:
        The work to wait for before `packed` is read; None for one rank.
    """
    if group is None or group.size() == 1:
        return None
    return cast("dist.Work | None", dist.all_reduce(packed, op=op, group=group, async_op=True))


def is_fake(group: dist.ProcessGroup | None) -> bool:
    """Whether a group only pretends to reduce, as in dry runs: its results are this rank's own numbers."""
    return group is not None and dist.get_backend(group) == "fake"


def n_summed(group: dist.ProcessGroup | None) -> int:
    """How many ranks add to a sum over a group: 1 without one, and in dry runs, where a rank gets its own numbers."""
    return 1 if group is None or is_fake(group) else group.size()


def group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The process group of all ranks of a mesh; None for a mesh of one rank."""
    if mesh.size() == 1:  # torch makes no group for some meshes of one rank
        return None
    return mesh.get_group() if mesh.ndim == 1 else group_over(sorted(ranks_of(mesh)))


def data_parallel_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that have data of their own: DDP's, or FSDP2's; None for a plain model.

    Raises:
        ValueError: for parameters on several mesh axes, since some of these may not be data-parallel; for FSDP's first
            version.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return module.process_group
    if any(is_fsdp1(type(m)) for m in model.modules()):
        raise ValueError("FSDP's first version does not tell how it cuts parameters: use fully_shard (FSDP2)")
    meshes = dict.fromkeys(p.device_mesh for p in model.parameters() if is_dtensor(p))  # type: ignore[attr-defined]
    if any(mesh.ndim > 1 for mesh in meshes) or len(meshes) > 1:
        raise ValueError(
            "parameters are sharded on several mesh axes: pass the ranks that have data of their own as process_group="
        )
    return group_of_mesh(next(iter(meshes))) if meshes else None


def gather_from_all_ranks(group: dist.ProcessGroup | None, work: Callable[[], Tokens]) -> Tokens:
    """Run `work` on every rank, and give every rank all results: rows in the order of ranks, padded to the widest.

    Args:
        group: the ranks; None for this process alone.
        work: returns this rank's values. If it raises, the error is raised here, and the other ranks raise too.

    Raises:
        RuntimeError: when another rank failed.
    """
    if group is None or group.size() == 1:
        return work()
    return _stack_rows(gather_objects(group, work))


def gather_objects(group: dist.ProcessGroup | None, work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank, and give every rank all results, in the order of ranks.

    Args:
        group: the ranks; None for this process alone.
        work: returns this rank's value, which can be pickled. If it raises, the error is raised here, and the other
            ranks raise too.

    Raises:
        RuntimeError: when another rank failed.
    """
    if group is None or group.size() == 1:
        return [work()]
    # A rank that fails still takes part in the gathering, with its message: otherwise its peers would hang.
    problem: Exception | None = None
    own: T | None = None
    try:
        own = work()
    except Exception as error:
        problem = error
    message = f"{type(problem).__name__}: {problem}" if problem else ""
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, (message, own), group=group)
    if problem is not None:
        raise _known_to_all(problem)
    if failures := [(rank, message) for rank, (message, _) in enumerate(gathered) if message]:
        rank, message = failures[0]
        raise _known_to_all(RuntimeError(f"rank {rank} of the group failed: {message}"))
    return [value for _, value in gathered]


@contextlib.contextmanager
def together(group: dist.ProcessGroup | None) -> Iterator[None]:
    """A block that ends alike on all ranks: an error on one rank is raised on all, wherever in the block it happens.

    A rank that fails by itself takes part in its peers' next gathering, with its message. So the block may gather by
    the functions of this module, and after an error nobody waits. Between a gathering and an all-reduce nothing may
    fail: such a rank would answer the all-reduce of its peers with a gathering.

    Args:
        group: the ranks; None for this process alone.

    Raises:
        RuntimeError: when another rank failed.
    """
    try:
        yield
    except Exception as error:
        if not getattr(error, _KNOWN, False):
            gather_objects(group, functools.partial(_raise, error))
        raise
    gather_objects(group, lambda: None)


def _raise(error: Exception) -> None:
    raise error


def _known_to_all(error: Exception) -> Exception:
    """The error, marked: every rank has its message."""
    setattr(error, _KNOWN, True)
    return error


def _stack_rows(by_rank: Sequence[Tokens]) -> Tokens:
    """The rows of all ranks; shorter rows are padded with 0."""
    merged = {}
    for name in by_rank[0]:
        tensors = [tokens[name] for tokens in by_rank]
        if tensors[0].dim() == 2:
            width = max(t.shape[1] for t in tensors)
            tensors = [torch.cat([t, t.new_zeros(len(t), width - t.shape[1])], 1) for t in tensors]
        merged[name] = torch.cat(tensors)
    return merged
