"""Sums over ranks, values gathered from or compared over all ranks, and the list of all pipeline stages' parameters."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sonde.parallel.placements import check_mesh, is_dtensor, is_fsdp1, ranks_of

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


_BYTES = 7
"""Bytes of a digest, so that it and its negative are int64."""
_MOST_COMPARED = 32
"""Length of the vector that is compared, also on a rank that has no values."""


def digest(value: object) -> int:
    """A number that differs where the `repr` of values does, on any rank; from 0 up, within int64."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:_BYTES], "big")


def holds_on_all(group: dist.ProcessGroup | None, device: torch.device, *, here: bool) -> bool:
    """Whether something holds on all ranks, by one all-reduce that all ranks of the group have to join. Waits.

    Args:
        group: the ranks; None for this process alone.
        device: one that the group's backend accepts.
        here: whether it holds on this rank.
    """
    if group is None or group.size() == 1:
        return here
    answer = torch.tensor([int(here)], device=device)
    dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=group)
    return bool(answer.cpu())


def check_same_on_ranks(
    group: dist.ProcessGroup | None, device: torch.device, values: Mapping[str, object] | None, refused_elsewhere: str
) -> None:
    """Compare values over ranks, by one all-reduce that all ranks of the group have to join. Waits.

    Args:
        group: the ranks; None for this process alone.
        device: one that the group's backend accepts.
        values: by name, the same names on every rank; compared by their `repr`. None on a rank that has an error of its
            own to raise.
        refused_elsewhere: the message where some ranks have such an error and others do not.

    Raises:
        ValueError: on all ranks, when a value differs, naming it and this rank's value.
    """
    if group is None or group.size() == 1:
        return
    digests = [int(values is not None), *map(digest, (values or {}).values())]
    digests += [0] * (_MOST_COMPARED - len(digests))
    numbers = torch.tensor(digests, dtype=torch.int64, device=device)
    largest = torch.cat([numbers, -numbers])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = largest.view(2, -1).cpu()
    some_refuse, *differ = (highest != -lowest).tolist()
    if some_refuse:
        raise ValueError(refused_elsewhere)
    for (name, value), differs in zip((values or {}).items(), differ, strict=False):
        if differs:
            raise ValueError(
                f"{name} differs between ranks, got {value!r:.80} on this rank: attach with the same arguments, to the "
                "same model, on every rank"
            )


@dataclass(frozen=True)
class ModelParameters:
    """The parameters of the whole model.

    Attributes:
        names: of all of them; those of the first pipeline rank first, then those of the second, and so on.
        shapes: of each, whole.
        roles: of each, from `parameter_roles`.
        first: where this rank's parameters begin in that list.
    """

    names: list[str]
    shapes: list[tuple[int, ...]]
    roles: list[str]
    first: int = 0

    @property
    def numel(self) -> int:
        """Elements of the whole model."""
        return sum(map(math.prod, self.shapes))


def refuse_on_all_stages(why: str, pp_mesh: DeviceMesh) -> None:
    """Raise on all ranks of a pipeline if the stage of one is refused. All of them have to call this.

    Args:
        why: this rank's stage is refused; empty if it is not.
        pp_mesh: the pipeline's ranks.

    Raises:
        ValueError: naming the stages; also when `pp_mesh` is no mesh of one axis that contains this rank.
    """
    check_mesh("pp_mesh", pp_mesh, n_axes=1)
    reasons = gather_objects(group_of_mesh(pp_mesh), lambda: why)
    if why:
        raise ValueError(why)
    if refused := [f"stage {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]:
        raise ValueError(f"another rank's pipeline stage cannot be measured. {'. '.join(refused)}")


def model_parameters(own: Mapping[str, Tensor], roles: Sequence[str], pp_mesh: DeviceMesh | None) -> ModelParameters:
    """The parameters of all pipeline stages, by one exchange. All ranks of the pipeline have to call this.

    Names that two pipeline ranks both use, as those of modules that were numbered anew on each rank, begin with the
    number of the rank.

    Args:
        own: this rank's parameters, by name.
        roles: of each, from `parameter_roles`.
        pp_mesh: the pipeline's ranks; None without a pipeline.

    Raises:
        ValueError: when `pp_mesh` is no mesh of one axis that contains this rank.
    """
    mine = [(name, tuple(p.shape), role) for (name, p), role in zip(own.items(), roles, strict=True)]
    if pp_mesh is None:
        return ModelParameters(list(own), [shape for _, shape, _ in mine], list(roles))
    check_mesh("pp_mesh", pp_mesh, n_axes=1)
    stages = gather_objects(group_of_mesh(pp_mesh), lambda: mine)
    every_name = [name for stage in stages for name, *_ in stage]
    are_numbered = len(set(every_name)) < len(every_name)
    prefixes = [f"stages.{rank}." if are_numbered else "" for rank in range(len(stages))]
    names = [prefix + name for prefix, stage in zip(prefixes, stages, strict=True) for name, *_ in stage]
    shapes = [tuple(shape) for stage in stages for _, shape, _ in stage]
    every_role = [role for stage in stages for *_, role in stage]
    return ModelParameters(names, shapes, every_role, first=sum(map(len, stages[: pp_mesh.get_local_rank()])))
