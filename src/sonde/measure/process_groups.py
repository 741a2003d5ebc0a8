"""Process groups over given ranks, and sums over them that need not be waited for."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

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
