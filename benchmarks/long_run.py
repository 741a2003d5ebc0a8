"""What the log of a long run costs: its size, and what `sonde report` needs for it.

python -m benchmarks.long_run
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe
from sonde.batch_size.log import KnownOfWindow, MeasuredWindow, NoiseScaleLog
from sonde.batch_size.pace import Cost
from sonde.batch_size.stats.tracker import NoiseScaleTracker
from sonde.batch_size.stats.window_row import RoundingTolerance, WindowRow
from sonde.log.sinks import JsonlSink
from sonde.records import RunLog

RESULTS = Path(__file__).parent / "results"
GROUPS = ("embed", *(f"blocks.{i}" for i in range(10)), "head")
N_PIECES, UNITS_PER_PIECE = 8, 8.0

_REPORT = """
import sys, time
from sonde.cli import main
status = main(["report", sys.argv[1]])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024, time.process_time())
sys.exit(status)
"""


class Kept:
    """A sink that keeps readings, to be written again and again."""

    def __init__(self) -> None:
        self.header: Mapping[str, object] = {}
        self.readings: list[Mapping[str, object]] = []

    def write(self, record: Mapping[str, object]) -> None:
        if record["kind"] == "header":
            self.header = record
        elif record["kind"] == "reading":
            self.readings.append(record)

    def close(self) -> None:
        pass


def window_row(rng: random.Random, done: float) -> WindowRow:
    """A window's numbers like those of a language model: |G|² falls, tr Σ falls more slowly, both scatter."""
    signal, noise = math.exp(-3 * done), 40 * math.exp(-1.5 * done)
    small, big = [], []
    for k in range(len(GROUPS)):
        share = (1 + 0.3 * math.sin(k)) / len(GROUPS)
        trace, grad_sq = noise * share * rng.gauss(1, 0.05), signal * share * rng.gauss(1, 0.15)
        small.append(N_PIECES * (grad_sq + trace / UNITS_PER_PIECE))
        big.append((grad_sq + trace / (N_PIECES * UNITS_PER_PIECE)) * N_PIECES**2)
    summed = torch.full((4,), math.sqrt(signal), dtype=torch.float64)
    return WindowRow(
        sq_norm_over_weight=torch.tensor(small, dtype=torch.float64),
        weight=float(N_PIECES),
        weight_over_units=N_PIECES / UNITS_PER_PIECE,
        sq_weight_over_units=N_PIECES / UNITS_PER_PIECE,
        n_pieces=N_PIECES,
        n_units=N_PIECES * UNITS_PER_PIECE,
        problems=[],
        explanations=[],
        witness_small=float(summed.square().sum()),
        witness_ranks=float(summed.square().sum()),
        rank_sq_weight_over_units=1 / UNITS_PER_PIECE,
        witness_sizes={0: 4},
        witness_sum=summed,
        witness_squares=summed.square(),
        sq_norm_big=torch.tensor(big, dtype=torch.float64),
        witness_final=summed,
    )


def write_log(log: RunLog, n_windows: int) -> None:
    """Log a run through the probe's own log."""
    rng = random.Random(0)
    tracker = NoiseScaleTracker(
        unit="sequences", groups=GROUPS, n_ranks=1, rounding=RoundingTolerance(1e-3, 0.0, "rounding")
    )
    setup = {"wrapper": "plain", "ranks": 1, "groups": list(GROUPS), "log_every": log.every}
    noise = NoiseScaleLog(tracker, log, setup, lambda: Cost(1, None, None, None), {})
    began = time.time()
    for number in range(1, n_windows + 1):
        row = window_row(rng, number / n_windows)
        drop = tracker.update(row)
        loss = 2 + 8 * math.exp(-3 * number / n_windows) + rng.gauss(0, 0.1)
        scalars = {"loss": loss, "learning_rate": 3e-4 * (1 - number / n_windows), "grad/clip_fraction": 0.0}
        known = KnownOfWindow(number, began + 0.5 * number, 2e-4 * rng.gauss(1, 0.1), "leaf hooks")
        window = MeasuredWindow([row], known, scalars)
        noise.window(window, drop, tracker.last.norm if tracker.last is not None else None)
    noise.end("training ended")


def write_again(
    folder: Path, n_readings: int, readings: list[Mapping[str, object]], header: Mapping[str, object]
) -> None:
    """Write the same readings again and again, each at a window of its own."""
    sink = JsonlSink(folder)
    sink.write(header)
    for i in range(n_readings):
        record: dict[str, Any] = dict(readings[i % len(readings)])
        record["window"] = i + 1
        record["time"] = float(record["time"]) + i // len(readings) * 1e5
        record["metrics"] = record["metrics"] | {"run/units_seen": 64.0 * (i + 1)}
        sink.write(record)
    sink.write({"kind": "end", "time": record["time"], "window": n_readings, "reason": "training ended"})
    sink.close()


def report(folder: Path) -> dict[str, float]:
    """Write the report in a process of its own: seconds, peak memory in bytes, bytes of the page."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _REPORT, str(folder)], capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - start
    size = (folder / "report.html").stat().st_size
    peak, cpu = done.stdout.split()[-2:]
    return {"seconds": seconds, "cpu_seconds": float(cpu), "peak_bytes": float(peak), "page_bytes": float(size)}


def as_markdown(results: Mapping[str, Any]) -> str:
    """The results for people."""
    lines = ["# What the log of a long run costs", ""]
    lines += [f"- {name}: {text}" for name, text in results["machine"].items() if name != "compared"]
    found, n = results["found"], results["readings"]
    size, peak, page = (found[name] / 1e6 for name in ("log_bytes", "peak_bytes", "page_bytes"))
    lines += [
        f"- again: `{results['command']}`",
        "",
        f"Readings of {len(GROUPS)} groups of parameters and two values of the user's own, as the probe's own log",
        "writes them: a run of ten million windows has 11,000. The report is written by a process of its own: its",
        "seconds and its peak memory include the import of Bokeh. A busy machine shows in the first alone.",
        "",
        "| readings | log, MB | bytes a reading | report, s | processor, s | peak memory, MB | page, MB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        f"| {n:,} | {size:.1f} | {1e6 * size / n:,.0f} | {found['seconds']:.1f} | {found['cpu_seconds']:.1f} "
        f"| {peak:.0f} | {page:.2f} |",
        "",
        "Goal: 3 s, 300 MB and 2 MB.",
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    torch.set_num_threads(1)  # the tensors are small: more threads would only wait for each other
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readings", type=int, default=11_000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.readings)
    command = "python -m benchmarks.long_run"
    results = {"machine": describe("cpu", ()), "command": command, "readings": options.readings, "found": found}
    (options.out / "long_run_cpu.json").write_text(json.dumps(results, indent=2) + "\n")
    (options.out / "long_run_cpu.md").write_text(as_markdown(results))


def measure(folder: Path, n_readings: int) -> dict[str, float]:
    """What a log and its report take."""
    kept = Kept()
    write_log(RunLog([kept], run="long", every=1), 2_000)
    write_again(folder, n_readings, kept.readings, kept.header)
    return {"log_bytes": float((folder / "records.jsonl").stat().st_size), **report(folder)}


if __name__ == "__main__":
    main()
