"""Three real trainings compared, at batches 4, 16 and 64, and the seconds that `sonde compare` takes for 20 long runs.

python -m benchmarks.compare_runs --folder runs --sequences 16384 --readings 11000
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.runs.report.plausible_run import write_run

ROOT = Path(__file__).parent.parent


def train(folder: Path, batch: int, sequences: int) -> str:
    """Train a small byte-level GPT at one rate, and return the folder of its log."""
    size = ["--batch", str(batch), "--steps", str(sequences // batch), "--log", str(folder.resolve())]
    command = [sys.executable, "examples/branch_nanogpt.py", *size]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return str(folder)


def long_runs(folder: Path, readings: int, n: int = 20) -> list[str]:
    """Folders of n runs whose logs are one file on the disk."""
    first = write_run(folder / "run-0", readings)
    for k in range(1, n):
        (folder / f"run-{k}").mkdir()
        os.link(first / "records.jsonl", folder / f"run-{k}" / "records.jsonl")
    return [str(folder / f"run-{k}") for k in range(n)]


def compare(runs: list[str], page: Path, stdout: int | None = None) -> None:
    subprocess.run([sys.executable, "-m", "sonde", "compare", *runs, "--out", str(page)], check=True, stdout=stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=16_384)
    parser.add_argument("--readings", type=int, default=11_000)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    options = parser.parse_args()
    runs = [train(options.folder / f"batch-{batch}", batch, options.sequences) for batch in (4, 16, 64)]
    compare(runs, options.folder / "compare.html")
    with tempfile.TemporaryDirectory() as scratch:
        logs = long_runs(Path(scratch), options.readings)
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        compare(logs, Path(scratch) / "compare.html", stdout=subprocess.DEVNULL)
        seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    print(f"20 runs of {options.readings:,} readings are compared in {seconds:.1f} s of one core")


if __name__ == "__main__":
    main()
