"""What windows send on one of up to 4,096 ranks: `python -m benchmarks.windows_at_scale` counts collectives and bytes.

A fake process group stands for the other ranks. It sums nothing, so only what is sent is measured, not its result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sonde
from benchmarks.machine import page

RANKS = (8, 64, 4096)
KINDS = ("data parallel", "FSDP2", "FSDP2 over tensor parallelism")
N_WINDOWS = 3


@dataclass(frozen=True)
class Sent:
    """What the end of one window sends.

    Attributes:
        kind: of parallelism.
        n_ranks: of the fake group.
        in_pieces: collectives that the probe adds to the window's backwards.
        collectives: of the window's end.
        n_bytes: that these collectives reduce, of each rank.
        with_clip: collectives of a window's end that clips too.
    """

    kind: str
    n_ranks: int
    in_pieces: int
    collectives: int
    n_bytes: int
    with_clip: int


class Collectives(TorchDispatchMode):
    """Notes the bytes of every collective of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if "c10d" in name and "wait" not in name and "wrap_tensor" not in name:
            self.n_bytes.append(sum(t.numel() * t.element_size() for t in tree_leaves(args) if isinstance(t, Tensor)))
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_ranks(n_ranks: int) -> Iterator[None]:
    """One of so many ranks, in this process alone."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def model_of(kind: str, n_ranks: int) -> nn.Module:
    """A small model, cut as `kind` says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    if kind == "FSDP2":
        fully_shard(model, mesh=init_device_mesh("cpu", (n_ranks,)))
    if kind == "FSDP2 over tensor parallelism":
        mesh = init_device_mesh("cpu", (n_ranks // 4, 4), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    return model


def train(kind: str, n_ranks: int, *, probed: bool) -> tuple[int, list[list[int]]]:
    """Collectives of the last window's backwards, and bytes of those of each window's end; the last window clips."""
    model = model_of(kind, n_ranks)
    group = dist.group.WORLD if kind == "data parallel" else None  # the loop averages gradients itself
    options: Any = {"process_group": group, "unit": "rows", "units_per_piece": 4, "every": 1, "verbose": False}
    ends = []
    with sonde.attach(model, **options) if probed else contextlib.nullcontext() as probe:
        for window in range(N_WINDOWS):
            with Collectives() as of_pieces:
                for _ in range(2):
                    with probe.piece() if probe else contextlib.nullcontext():
                        model(torch.randn(4, 8)).square().mean().backward()
            with Collectives() as of_end:
                if probe and window < N_WINDOWS - 1:
                    probe.step()
                elif probe:
                    probe.clip_grad_norm_(1.0)
            ends.append(of_end.n_bytes)
            model.zero_grad()
    return len(of_pieces.n_bytes), ends


def measure() -> list[Sent]:
    """Every kind on every number of ranks."""
    found = []
    for kind in KINDS:
        for n_ranks in RANKS:
            with fake_ranks(n_ranks), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of FSDP2, about the output of this small model
                plain, _ = train(kind, n_ranks, probed=False)
                pieces, ends = train(kind, n_ranks, probed=True)
            found.append(Sent(kind, n_ranks, pieces - plain, len(ends[1]), sum(ends[1]), len(ends[-1])))
    return found


def table(found: list[Sent]) -> str:
    """The results, for people."""
    lines = ["| | ranks | collectives added to a window | bytes | with a clip |", "|---|---|---|---|---|"]
    for sent in found:
        added = sent.in_pieces + sent.collectives
        lines.append(f"| {sent.kind} | {sent.n_ranks:,} | {added} | {sent.n_bytes:,} | {sent.with_clip} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table, and the numbers as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.windows_at_scale", description=__doc__)
    parser.add_argument("--out", type=Path, help="a folder to write the table to as well")
    options = parser.parse_args(arguments)
    measured = measure()
    print(table(measured))
    print(json.dumps([asdict(sent) for sent in measured]))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        text = page("What a window sends", "python -m benchmarks.windows_at_scale", table(measured))
        (options.out / "windows_at_scale.md").write_text(text)


if __name__ == "__main__":
    main()
