"""One of 4,096 ranks, with a fake process group: `python -m benchmarks.at_scale` prints its seconds and bytes."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import sonde

N_PARAMETERS = 6000
PP, DP, TP = 8, 64, 8


class SentBytes(TorchDispatchMode):
    """Counts the bytes that all-reduces send."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allreduce" in str(func):
            self.total += sum(t.numel() * t.element_size() for t in args[0])
        return func(*args, **(kwargs or {}))


def shards(mesh: DeviceMesh) -> list[tuple[DeviceMesh, list[Placement]]]:
    """Four ways to place: FSDP; FSDP over TP, cut over both axes; the same, cut over dp only; TP alone."""
    both = mesh["dp", "tp"]
    return [
        (mesh["dp"], [Shard(0)]),
        (both, [Shard(0), Shard(1)]),
        (both, [Shard(0), Replicate()]),
        (mesh["tp"], [Shard(1)]),
    ]


def measure(n_parameters: int = N_PARAMETERS) -> dict[str, float]:
    """Seconds to plan and of a later call; collectives and bytes of the first call; groups; the squared norm."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=PP * DP * TP)
    mesh = init_device_mesh("cpu", (PP, DP, TP), mesh_dim_names=("pp", "dp", "tp"))
    kinds, parameters = shards(mesh), []
    for k in range(n_parameters):
        on, placements = kinds[k % len(kinds)]
        p = nn.Parameter(DTensor.from_local(torch.zeros(2, 3), on, placements, run_check=False))
        p.grad = DTensor.from_local(torch.ones(2, 3), on, placements, run_check=False)
        parameters.append(p)
    start = time.perf_counter()
    plan = sonde.group_parameters_for_norm(parameters, mesh=mesh, pp_mesh=mesh["pp"])
    planned = time.perf_counter()
    with CommDebugMode() as counted, SentBytes() as sent:
        norm = sonde.clip_grad_norm_distributed_(plan, 1.0)
    again = time.perf_counter()
    sonde.clip_grad_norm_distributed_(plan, 1.0)
    done = time.perf_counter()
    return {
        "planning_seconds": planned - start,
        "later_call_seconds": done - again,
        "collectives": counted.get_total_counts(),
        "bytes": sent.total,
        "groups": len(plan.groups),
        "sq_norm": float(norm) ** 2,
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
