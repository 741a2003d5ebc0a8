"""What torchrun sets and Accelerate finds, for loops and trainers on the ranks of `tests/ranks.py`."""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

NUMBERS = ("b_simple", "low", "high", "grad_sq", "trace_cov", "units_per_window", "windows", "dropped", "unit")


def result_of(plain: torch.Tensor, measured: torch.Tensor, reading: Any) -> dict[str, Any]:
    """What a rank sends back of two trainings: how far their weights are apart, and the numbers of a reading."""
    return {
        "apart": float((plain - measured).abs().max()),
        "reading": {name: getattr(reading, name) for name in NUMBERS},
    }


def reading_of_all(results: Sequence[dict[str, Any]], *, apart: float = 0.0) -> Any:
    """The reading, on which all ranks must agree; weights may be this far from those without sonde."""
    assert max(result["apart"] for result in results) <= apart
    assert all(result["reading"] == results[0]["reading"] for result in results)
    return SimpleNamespace(**results[0]["reading"])


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def as_launched(port: int, **others: str) -> Iterator[None]:
    """As if torchrun had started this rank, on the CPU, with these variables too.

    Accelerate holds one state for the process: it ends here.
    """
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    ours = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    ours |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", **others}
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


def fsdp2() -> Any:
    """Accelerate's plugin for FSDP2, which cuts all layers: after TrainingArguments, before an Accelerator.

    Accelerate takes a plugin on accelerators only, though FSDP2 itself runs on CPUs: it is told that it has some.
    """
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import DistributedType, PartialState

    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=False, auto_wrap_policy="size_based_wrap", min_num_params=10
    )
