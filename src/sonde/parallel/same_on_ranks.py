"""Refuses what differs between ranks, where it would make their collectives differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

_BYTES = 7
"""Bytes of a digest, so that it and its negative are int64."""


def digest(value: object) -> int:
    """A number that differs where the `repr` of values does, on any rank; from 0 up, within int64."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:_BYTES], "big")


def check_all_succeeded(
    group: dist.ProcessGroup | None, device: torch.device, *, has_failed: bool, message: str
) -> None:
    """See that no rank has failed, by one all-reduce that all ranks of the group have to join. Waits.

    Args:
        group: the ranks; None for this process alone.
        device: one that the group's backend accepts.
        has_failed: whether this rank has, which then raises an error of its own.
        message: for the other ranks.

    Raises:
        RuntimeError: on the ranks that have not failed, when another has.
    """
    if group is None or group.size() == 1:
        return
    failed = torch.tensor([int(has_failed)], device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if int(failed.cpu()) and not has_failed:
        raise RuntimeError(message)


def check_same_on_ranks(
    group: dist.ProcessGroup | None,
    device: torch.device,
    values: Mapping[str, object],
    messages: Mapping[str, str] | None = None,
) -> None:
    """Compare values over ranks, by one all-reduce that all ranks of the group have to join. Waits.

    Args:
        group: the ranks; None for this process alone.
        device: one that the group's backend accepts.
        values: by name, the same names on every rank; compared by their `repr`.
        messages: by name, of errors that need words of their own.

    Raises:
        ValueError: on all ranks, when a value differs, naming it and this rank's value.
    """
    if group is None or group.size() == 1:
        return
    numbers = torch.tensor([digest(value) for value in values.values()], dtype=torch.int64, device=device)
    largest = torch.cat([numbers, -numbers])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = largest.view(2, -1).cpu()
    for name, differs in zip(values, (highest != -lowest).tolist(), strict=True):
        if differs:
            raise ValueError(
                (messages or {}).get(name)
                or f"{name} differs between ranks, got {values[name]!r:.80} on this rank: attach with the same "
                "arguments, to the same model, on every rank"
            )
