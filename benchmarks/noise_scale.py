"""Cost and accuracy of the noise-scale probe, beside other estimators: `python -m benchmarks.noise_scale`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.accuracy import Moments, accuracy, estimates, train_then_freeze
from benchmarks.contestants import ENTRIES, PLAIN, Entry, Estimate
from benchmarks.device import add_option, count, stem
from benchmarks.gpt import ABOUT_6M, GPT2_SMALL, TINY
from benchmarks.launch import on_ranks
from benchmarks.machine import describe, import_seconds
from benchmarks.memory import peak_bytes
from benchmarks.table import Results, Row, markdown
from benchmarks.timing import cost, time_blocks
from benchmarks.training import Setup
from benchmarks.waiting import collectives_per_window, synchronisations_per_window


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    Attributes:
        processes: fresh processes that time each contestant.
        blocks: blocks of four windows timed in each.
        goal_factor: factor on `processes` for rows with a goal: a decision about 1 % takes more processes.
        memory_repeats: processes whose peak memory is measured; an odd number.
        accuracy_runs: independent runs behind each bias.
        accuracy_windows: windows in each run.
        weights: number of the `WEIGHTS` at which biases are measured.
        import_repeats: new processes that import each package.
        start: how timed processes start: "spawn" gives each a memory layout of its own.
    """

    processes: int
    blocks: int
    goal_factor: int
    memory_repeats: int
    accuracy_runs: int
    accuracy_windows: int
    weights: int
    import_repeats: int
    start: Literal["spawn", "forkserver"]


FULL = Effort(
    processes=3,
    blocks=6,
    goal_factor=3,
    memory_repeats=1,
    accuracy_runs=8,
    accuracy_windows=300,
    weights=2,
    import_repeats=5,
    start="spawn",
)
QUICK = Effort(
    processes=1,
    blocks=1,
    goal_factor=1,
    memory_repeats=1,
    accuracy_runs=2,
    accuracy_windows=20,
    weights=1,
    import_repeats=1,
    start="forkserver",
)
GOAL, GOAL_ON_CPU = 0.005, 0.01
"""Largest share of a window's time that measuring every window may add, on an accelerator and on a CPU."""
# Early in training, B_simple is about the size of a window. Later, noise drowns |G|², and estimators differ.
WEIGHTS = {"early in training": 20, "late in training": 150}


def setups(device: str, *, quick: bool) -> list[Setup]:
    """One process that accumulates, DDP with one piece per rank, and DDP that accumulates; windows of equal size."""
    if device != "cpu":
        alone = Setup(1, 1, micro_batches=4, sequences=8, shape=TINY if quick else GPT2_SMALL, device=device)
        n_gpus = count(device)
        ddp = dataclasses.replace(alone, ranks=n_gpus, micro_batches=1)
        return [alone, ddp] if n_gpus > 1 else [alone]
    shape = TINY if quick else ABOUT_6M
    # Threads that wait for each other on busy cores take a second for a window of the tiny model.
    return [
        Setup(ranks=1, threads=1 if quick else 2, micro_batches=4, sequences=4, shape=shape),
        Setup(ranks=2, threads=1, micro_batches=1, sequences=8, shape=shape),
        Setup(ranks=2, threads=1, micro_batches=4, sequences=2, shape=shape),
    ]


def measure(device: str, effort: Effort, *, quick: bool, command: str, only: Sequence[str] = tuple(ENTRIES)) -> Results:
    """Measure one contestant after the other."""
    start = time.monotonic()
    pairs = [
        (entry, setup)
        for setup in setups(device, quick=quick)
        for entry in (ENTRIES[name] for name in only)
        if (entry.ddp if setup.ranks > 1 else entry.alone)
        # Accumulation under DDP: other contestants see a rank as one piece, as in the set-up before.
        and (setup.ranks == 1 or setup.micro_batches == 1 or entry.make in (PLAIN.make, ENTRIES["sonde"].make))
    ]
    rows = [Row(entry.title, str(setup), setup.pieces, note=_how_to_get(entry)) for entry, setup in pairs]
    for row, (entry, setup) in zip(rows, pairs, strict=True):
        if entry.timed and not entry.missing:
            _say(start, f"cost of {entry.title}: {setup}")
            _measure_cost(row, entry, setup, effort)
    exact = {}
    if device == "cpu":
        exact = _measure_accuracy(rows, pairs, effort, start)
    return Results(
        machine=describe(device),
        command=command,
        quick=quick,
        goal=GOAL_ON_CPU if device == "cpu" else GOAL,
        windows=f"{effort.accuracy_runs} independent runs of {effort.accuracy_windows} windows",
        exact=exact,
        rows=rows,
        import_seconds=import_seconds(effort.import_repeats),
    )


def _measure_cost(row: Row, entry: Entry, setup: Setup, effort: Effort) -> None:
    for k in range(effort.processes * (effort.goal_factor if entry.has_goal else 1)):
        row.blocks += on_ranks(setup, _time, entry, effort.blocks, k % 2 == 1, start=effort.start)[:1]
    row.cost = cost(row.blocks)
    for _ in range(effort.memory_repeats):
        # Each is compared with a plain process of its own, since memory (huge pages, caches) drifts on a machine.
        plain, with_it = (on_ranks(setup, peak_bytes, e, 4) for e in (PLAIN, entry))
        row.extra_bytes.append((sum(with_it) - sum(plain)) / setup.ranks)
    if setup.ranks > 1:
        plain, with_it = (on_ranks(setup, collectives_per_window, e)[0] for e in (PLAIN, entry))
        row.extra_collectives = with_it - plain
    if setup.device == "cuda":  # only CUDA says how often it was waited for
        row.synchronisations = on_ranks(setup, synchronisations_per_window, entry)[0]


def _time(setup: Setup, entry: Entry, blocks: int, contestant_first: bool) -> list[tuple[float, float]]:
    return time_blocks(setup, entry, blocks, contestant_first=contestant_first)


def _measure_accuracy(
    rows: Sequence[Row], pairs: Sequence[tuple[Entry, Setup]], effort: Effort, start: float
) -> dict[str, Moments]:
    exact = {}
    for name, n_windows in list(WEIGHTS.items())[: effort.weights]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "weights.pt"
            alone = dataclasses.replace(pairs[0][1], shape=TINY)
            [exact[name]] = on_ranks(alone, train_then_freeze, n_windows, path)
            for row, (entry, setup) in zip(rows, pairs, strict=True):
                if entry.make is PLAIN.make or entry.missing:
                    continue
                _say(start, f"accuracy of {entry.title}, {name}: {setup}")
                row.accuracy[name] = accuracy(_estimates(setup, entry, path, effort), exact[name])
    return exact


def _estimates(setup: Setup, entry: Entry, path: Path, effort: Effort) -> list[Estimate]:
    """The estimates of all runs. No time is measured here, so that runs share the cores."""
    one_thread = dataclasses.replace(setup, threads=1)
    n_jobs = min(max((os.cpu_count() or 1) // setup.ranks, 1), effort.accuracy_runs)
    shares = [range(first, effort.accuracy_runs, n_jobs) for first in range(n_jobs)]
    with ThreadPoolExecutor(n_jobs) as pool:
        results = pool.map(
            lambda seeds: on_ranks(one_thread, estimates, entry, path, effort.accuracy_windows, seeds)[0], shares
        )
        return [estimate for share in results for estimate in share]


def _how_to_get(entry: Entry) -> str:
    if not entry.missing:
        return ""
    lines = (Path(__file__).parent / "requirements.txt").read_text().splitlines()
    pin = next(line for line in lines if line.startswith(f"{entry.package}=="))
    return f"not installed: `pip install --no-deps {pin} numpy`"


def _say(start: float, text: str) -> None:
    print(f"[{time.monotonic() - start:5.0f} s] {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write `noise_scale_<name of the device>.json` and `.md`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.noise_scale", description=__doc__)
    add_option(parser)
    parser.add_argument(
        "--quick", action="store_true", help="take a minute to show that it works; the numbers mean nothing"
    )
    parser.add_argument("--only", nargs="+", choices=list(ENTRIES), default=list(ENTRIES), help="contestants, by name")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder to write to")
    options = parser.parse_args(arguments)
    command = f"python -m benchmarks.noise_scale --device {options.device}" + " --quick" * options.quick
    if options.only != list(ENTRIES):
        command += " --only " + " ".join(options.only)
    effort = QUICK if options.quick else FULL
    results = measure(options.device, effort, quick=options.quick, command=command, only=options.only)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / stem("noise_scale", options.device)
    page = markdown(results)
    path.with_suffix(".json").write_text(json.dumps(dataclasses.asdict(results), indent=1) + "\n")
    path.with_suffix(".md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
