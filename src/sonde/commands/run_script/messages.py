"""What `sonde run` says: on stderr and on the first rank alone, since a script's stdout is the script's."""

from __future__ import annotations

import contextlib
import os
import sys

import torch.distributed as dist


def is_first_rank() -> bool:
    """Whether this process speaks and writes for all."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Write a sentence for the user, where the script has left a stderr to write to."""
    if is_first_rank():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"sonde run: {text}\n")
