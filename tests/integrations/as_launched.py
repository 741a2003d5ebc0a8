"""The environment that torchrun sets, for Accelerate and trainers on the ranks of `tests/ranks.py`."""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from collections.abc import Iterator

import torch.distributed as dist


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def as_launched(port: int) -> Iterator[None]:
    """As if torchrun had started this rank, on the CPU. Accelerate holds one state for the process: it ends here."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    ours = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    ours |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    os.environ |= ours
    from accelerate.state import AcceleratorState

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        for name in ours:
            os.environ.pop(name, None)
