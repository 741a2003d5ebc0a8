"""What a group for each parameter costs, for 100, 1,000 and 10,000 parameters.

    python -m benchmarks.parameter_groups
    python -m benchmarks.parameter_groups --sizes 1000 --windows 300

Each size runs in a process of its own, once with one group in all and once with a group for each parameter. Leave the
machine alone meanwhile.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import statistics
import time
from dataclasses import dataclass

import torch
import tyro
from torch import Tensor, nn

import sonde
from benchmarks.machine import describe

WIDTH = 32


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        sizes: numbers of parameters.
        windows: measured windows of each run.
    """

    sizes: tuple[int, ...] = (100, 1_000, 10_000)
    windows: int = 250


@dataclass(frozen=True)
class Run:
    """One run of a probe.

    Attributes:
        window: host seconds inside the probe for each measured window, the median.
        reading: seconds of `reading()` with all groups, the median of three.
        memory: MiB that the process grew by while it trained and read.
        state: MB of the saved state as JSON.
    """

    window: float
    reading: float
    memory: float
    state: float


class Vectors(nn.Module):
    """Many vectors, each with a target of its own."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, WIDTH] → mean squared outputs, 0-dim."""
        return (x @ torch.stack(list(self.vectors), 1)).square().mean() * len(self.vectors)


def run(n: int, groups: str | None, windows: int) -> Run:
    """Train and measure every window."""
    torch.set_num_threads(1)
    model = Vectors(n)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before, seconds = _peak(), []
    with sonde.attach(model, optimizer, unit="rows", groups=groups, every=1, verbose=False) as probe:  # type: ignore[arg-type]
        for _ in range(windows):
            for _ in range(4):
                with probe.piece(units=4):
                    model(torch.randn(4, WIDTH)).backward()
            start = time.perf_counter()
            probe.step()
            probe.window()
            seconds.append(time.perf_counter() - start)
            optimizer.step()
            optimizer.zero_grad()
        readings = []
        for _ in range(3):
            start = time.perf_counter()
            probe.reading()
            readings.append(time.perf_counter() - start)
        memory = _peak() - before
        state = len(json.dumps(probe.state_dict())) / 1e6
    return Run(statistics.median(seconds), statistics.median(readings), memory, state)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(options: Options) -> None:
    """Print a table."""
    print("\n".join(f"{name}: {value}" for name, value in describe("cpu", ()).items()))
    print("\n| parameters | groups | end of a window | `reading()` | memory | saved state |\n|---|---|---|---|---|---|")
    spawn = multiprocessing.get_context("spawn")
    for n in options.sizes:
        for groups in (None, "parameters"):
            with spawn.Pool(1) as pool:
                each = pool.apply(run, (n, groups, options.windows))
            print(
                f"| {n:,} | {n if groups else 1:,} | {1e3 * each.window:.1f} ms | {1e3 * each.reading:,.0f} ms | "
                f"{each.memory:.0f} MiB | {each.state:.2f} MB |"
            )


if __name__ == "__main__":
    main(tyro.cli(Options))
