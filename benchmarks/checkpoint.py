"""How a measurement at fixed weights should divide its data into windows, and how often its interval is right.

    python -m benchmarks.checkpoint [--runs 100] [--out benchmarks/results]

A small network learns for some steps. Then the gradient of each of its examples is computed, so that tr Σ and |G|² are
known exactly. Each run draws micro-batches of 4 examples with replacement and stops as `sonde.measure` does, when both
ends of the interval are within `until` of B_simple, at the earliest after 12 windows. The table compares windows that
grow with windows of one length: examples until a run stops, and the share of runs whose interval holds the exact value.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.machine import describe
from sonde.batch_size.measure import precision
from sonde.batch_size.stats.averages import FixedWeights, window_lengths
from sonde.batch_size.stats.noise_scale import Pieces, WindowEstimate
from sonde.batch_size.stats.window_row import SolvedWindow

DIVISIONS: dict[str, Callable[[], Iterator[int]]] = {
    "2, 4, 6, 8, …": lambda: window_lengths(1),
    "2, 2, 3, 3, 4, 4, …": lambda: (2 + i // 2 for i in itertools.count()),
    "always 32": lambda: itertools.repeat(32),
    "always 8": lambda: itertools.repeat(8),
}
NETWORKS = (("as initialised", 0), ("after 30 steps", 30), ("after 200 steps", 200))
UNTIL = (0.1, 0.3)
PIECE = 4
FEWEST_WINDOWS = 12
MOST_EXAMPLES = 100_000
N_EXAMPLES, N_INPUTS, N_HIDDEN, N_OUTPUTS = 40_000, 12, 32, 3


@dataclass(frozen=True)
class Cell:
    """The runs of one network with one division into windows.

    Attributes:
        network: which.
        b_simple: its exact noise scale, in examples.
        until: precision that was asked for.
        division: pieces of the windows.
        examples: until a run stops, median.
        windows: likewise.
        held: share of runs whose interval holds the exact value.
        stopped: share of runs that reached the precision.
    """

    network: str
    b_simple: float
    until: float
    division: str
    examples: float
    windows: float
    held: float
    stopped: float


def gradients_after(steps: int) -> Tensor:
    """The gradient of every example after some steps of training; [examples, parameters]."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(N_INPUTS, N_HIDDEN), nn.Tanh(), nn.Linear(N_HIDDEN, N_OUTPUTS))
    x = torch.randn(N_EXAMPLES, N_INPUTS)
    y = x[:, :N_OUTPUTS] + 0.5 * torch.randn(N_EXAMPLES, N_OUTPUTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        rows = torch.randint(0, N_EXAMPLES, (64,))
        (model(x[rows]) - y[rows]).square().sum(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(p: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        return (functional_call(model, p, (one[None],))[0] - target).square().sum()

    of_examples = vmap(grad(loss), in_dims=(None, 0, 0), chunk_size=4096)(parameters, x, y)
    return torch.cat([g.flatten(1) for g in of_examples.values()], 1)


def window(gradients: Tensor, n_pieces: int, generator: torch.Generator) -> SolvedWindow:
    """A window of pieces drawn with replacement."""
    rows = torch.randint(0, len(gradients), (n_pieces, PIECE), generator=generator)
    pieces = gradients[rows].mean(1)
    total = pieces.sum(0)
    counts = Pieces(n_pieces, n_pieces / PIECE, n_pieces / PIECE, n_pieces)
    estimate = counts.solve(float(pieces.square().sum()), float(total @ total))
    return SolvedWindow(torch.tensor([estimate, estimate], dtype=torch.float64).T, 1.0, n_pieces * PIECE, 1 / PIECE)


def measure(gradients: Tensor, lengths: Iterator[int], until: float, generator: torch.Generator) -> tuple[Tensor, bool]:
    """One run.

    Returns:
        Examples, windows, and both ends of the interval; and whether it reached the precision.
    """
    fixed, n_examples = FixedWeights(), 0
    for i, n_pieces in enumerate(lengths, start=1):
        fixed.add(window(gradients, n_pieces, generator), weight=n_pieces)
        n_examples += n_pieces * PIECE
        if i < FEWEST_WINDOWS or i % max(i // 20, 1):  # many windows are looked at every 5 %
            continue
        total = fixed.total()
        reached = precision(total.b_simple, total.low, total.high)
        is_precise = reached is not None and reached <= until
        if is_precise or n_examples > MOST_EXAMPLES:
            break
    low, high = (float("nan") if end is None else end for end in (total.low, total.high))
    return torch.tensor([n_examples, i, low, high]), is_precise


def cell(network: str, gradients: Tensor, until: float, division: str, *, n_runs: int) -> Cell:
    """All runs of one network with one division into windows."""
    mean = gradients.double().mean(0)
    exact = WindowEstimate(float((gradients.double() - mean).square().sum(1).mean()), float(mean @ mean))
    b_simple = exact.trace_cov / exact.grad_sq
    generator = torch.Generator().manual_seed(1)
    runs = [measure(gradients, DIVISIONS[division](), until, generator) for _ in range(n_runs)]
    table = torch.stack([run for run, _ in runs])
    held = (table[:, 2] <= b_simple) & (table[:, 3] >= b_simple)
    return Cell(
        network,
        b_simple,
        until,
        division,
        statistics.median(table[:, 0].tolist()),
        statistics.median(table[:, 1].tolist()),
        float(held.double().mean()),
        sum(is_precise for _, is_precise in runs) / n_runs,
    )


def as_table(cells: list[Cell]) -> str:
    """One row for each network and precision, one column for each division."""
    lines = ["| network | B_simple | until | " + " | ".join(DIVISIONS) + " |", "|---" * (3 + len(DIVISIONS)) + "|"]
    for (network, until), row in itertools.groupby(cells, key=lambda c: (c.network, c.until)):
        of_row = list(row)
        texts = [
            f"{c.examples:,.0f}, {c.windows:,.0f}: {100 * c.held:.1f} %"
            + ("" if c.stopped == 1 else f"; {100 * c.stopped:.0f} % stopped")
            for c in of_row
        ]
        lines.append(f"| {network} | {of_row[0].b_simple:.3g} | ± {100 * until:.0f} % | {' | '.join(texts)} |")
    return "\n".join(lines)


def main() -> None:
    """Run all networks and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = []
    for network, steps in NETWORKS:
        gradients = gradients_after(steps)
        for until, division in itertools.product(UNTIL, DIVISIONS):
            cells.append(cell(network, gradients, until, division, n_runs=options.runs))
            print(cells[-1], flush=True)
    machine = ", ".join(f"{name}: {value}" for name, value in describe("cpu", ()).items())
    text = (
        "# How long should the windows of a measurement be?\n\n"
        f"`python -m benchmarks.checkpoint --runs {options.runs}`, {machine}.\n\n"
        f"Columns: micro-batches in the windows, of {PIECE} examples each. A cell: examples and windows until a run "
        "stops (medians), and the share of runs whose interval holds the exact B_simple. Runs end after "
        f"{MOST_EXAMPLES:,} examples at the latest.\n\n{as_table(cells)}\n"
    )
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "checkpoint.md").write_text(text)
    (options.out / "checkpoint.json").write_text(json.dumps([asdict(c) for c in cells], indent=1) + "\n")


if __name__ == "__main__":
    main()
