"""Refuses what differs between ranks, where it would make their collectives differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

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
