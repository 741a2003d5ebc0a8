"""What `sonde.attach` itself costs on models of 7 billion parameters: `python -m benchmarks.planning` prints a table.

Plain models are on the meta device, which holds no values. Under FSDP2, this process is one of 4,096 ranks of a fake
process group, which shard over 64 ranks and replicate 64 times (HSDP). `attach` gathers each block once there, so it
takes the time in which this machine fills that memory.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import tracemalloc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sonde
from benchmarks.machine import page
from benchmarks.windows_at_scale import fake_ranks

MESH = (64, 64)
"""Replicas, and ranks that share one. Over 4,096 shards, `fully_shard` itself would take minutes for 10,000 tensors."""
RANKS = math.prod(MESH)
CUTS = ("plain", "FSDP2")


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer.

    Attributes:
        width: of its residual stream.
        depth: blocks.
        hidden: of each multilayer perceptron.
        vocabulary: of its embedding and its head.
        experts: multilayer perceptrons of each block.
    """

    width: int
    depth: int
    hidden: int
    vocabulary: int
    experts: int = 1


SHAPES = {
    "7B": Shape(width=4096, depth=32, hidden=11008, vocabulary=32000),
    "mixture of experts": Shape(width=4096, depth=32, hidden=64, vocabulary=32000, experts=102),
}
QUICK_SHAPES = {
    "7B": Shape(width=64, depth=2, hidden=96, vocabulary=128),
    "mixture of experts": Shape(width=64, depth=2, hidden=8, vocabulary=128, experts=5),
}


@dataclass(frozen=True)
class Planned:
    """One attach.

    Attributes:
        shape: of the model, by name.
        cut: one of `CUTS`.
        tensors: parameter tensors.
        parameters: their elements, of all ranks.
        seconds: of `attach`; under FSDP2 it gathers each block in them.
        gathering_seconds: in which FSDP2 alone gathered and freed each block, for the second time; 0 without it.
        kept_bytes: that Python objects of the probe take on the host; None under FSDP2, where it would gather again.
        close_seconds: of `close`.
    """

    shape: str
    cut: str
    tensors: int
    parameters: int
    seconds: float
    gathering_seconds: float
    kept_bytes: int | None
    close_seconds: float


class _Perceptron(nn.Module):
    """Of gated linear units, without biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))
        self.norm_attention, self.norm_mlp = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.experts = nn.ModuleList(_Perceptron(shape) for _ in range(shape.experts))


class _Transformer(nn.Module):
    """Parameters alone: nothing is computed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.depth))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)


def model_of(shape: Shape, cut: str) -> nn.Module:
    """In bf16, on the meta device; under FSDP2 this rank's shards on the CPU."""
    with torch.device("meta"):
        model = _Transformer(shape).to(torch.bfloat16)
    if cut == "FSDP2":
        mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
    return model


def plan(name: str, shape: Shape, cut: str) -> Planned:
    """Attach once for time and, to a plain model, once more for memory."""
    with fake_ranks(RANKS) if cut == "FSDP2" else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_of(shape, cut)
        gathering = 0.0
        if cut == "FSDP2":
            _seconds_to_gather(model)  # the first time, memory is new to the process
            gathering = _seconds_to_gather(model)
        start = time.perf_counter()
        probe = _attached(model)
        attached = time.perf_counter()
        probe.close()
        closed = time.perf_counter()
        kept = _kept_bytes(model) if cut == "plain" else None
        sizes = [p.numel() for p in model.parameters()]
    return Planned(name, cut, len(sizes), sum(sizes), attached - start, gathering, kept, closed - attached)


def _kept_bytes(model: nn.Module) -> int:
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    probe = _attached(model)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    probe.close()
    return after - before


def _attached(model: nn.Module) -> sonde.NoiseScaleProbe:
    return sonde.attach(model, unit="sequences", units_per_piece=1, verbose=False)


def _seconds_to_gather(model: Any) -> float:
    """What FSDP2 takes to gather each of its modules and to free it, without sonde."""
    start = time.perf_counter()
    for module in (model, *model.blocks):
        module.unshard()
        module.reshard()
    return time.perf_counter() - start


def measure(*, quick: bool) -> Iterator[Planned]:
    """Every shape, cut in every way."""
    for name, shape in (QUICK_SHAPES if quick else SHAPES).items():
        for cut in CUTS:
            yield plan(name, shape, cut)


HEADER = (
    "| model | | tensors | parameters | attach | the same gathering alone | kept on the host | close |\n"
    "|---|---|---|---|---|---|---|---|"
)


def line(row: Planned) -> str:
    """A row of the table, for people."""
    where = f"{row.cut}, {RANKS:,} ranks" if row.cut == "FSDP2" else f"{row.cut}, meta device"
    gathering = f"{row.gathering_seconds:.2f} s" if row.gathering_seconds else "–"
    kept = "–" if row.kept_bytes is None else f"{row.kept_bytes / 2**20:.1f} MiB"
    return (
        f"| {row.shape} | {where} | {row.tensors:,} | {row.parameters / 1e9:.2g} billion | {row.seconds:.2f} s "
        f"| {gathering} | {kept} | {row.close_seconds:.2f} s |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table, and the numbers as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, to see that it works")
    parser.add_argument("--out", type=Path, help="a folder to write the table to as well")
    options = parser.parse_args(arguments)
    print(HEADER)
    rows = []
    for row in measure(quick=options.quick):
        print(line(row), flush=True)
        rows.append(row)
    print(json.dumps([asdict(row) for row in rows]))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        table = "\n".join([HEADER, *map(line, rows)])
        command = f"python -m benchmarks.planning{' --quick' * options.quick}"
        (options.out / "planning.md").write_text(page("What attach itself costs", command, table))


if __name__ == "__main__":
    main()
