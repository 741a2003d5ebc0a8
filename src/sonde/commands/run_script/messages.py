"""What `sonde run` says: on stderr and on the first rank alone, since a script's stdout is the script's."""

from __future__ import annotations

import os

import torch.distributed as dist

from sonde.console import tell

_rank_before_the_end: int | None = None
"""The rank of this process in a process group that is no more."""


def is_first_rank() -> bool:
    """Whether this process speaks and writes for all."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    if _rank_before_the_end is not None:
        return _rank_before_the_end == 0
    return os.environ.get("RANK", "0") == "0"


def remember_rank() -> None:
    """Note that the process group is about to end: this process speaks afterwards if it speaks now."""
    global _rank_before_the_end
    if dist.is_available() and dist.is_initialized():
        _rank_before_the_end = dist.get_rank()


def say(text: str, *, on_every_rank: bool = False) -> None:
    """Write a sentence for the user.

    Args:
        text: the sentence.
        on_every_rank: whether other ranks than the first write it too, with their number.
    """
    is_first = is_first_rank()
    if is_first or on_every_rank:
        rank = "" if is_first else f"rank {dist.get_rank()}: "
        tell(f"{rank}{text}")
