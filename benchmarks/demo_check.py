"""Does the demo's advice hold when somebody follows it?

    python -m benchmarks.demo_check [--seeds 3] [--out benchmarks/results]

Runs the demo, and reads what it says of another batch size "in a run like this one": how many steps a batch of twice or
half the size needs, or a batch of the size of the noise scale's average. Then it runs the demo with that batch and so
many steps, at the learning rate times the root of the batches' ratio, as AdamW asks for. Both should end at the same
loss. Beside them stands the same batch with the steps that the noise scale *now* would promise, which is no advice for
a whole run.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import sonde
from benchmarks.machine import page
from sonde.batch_size.stats.critical_batch import relative_steps

BATCH, STEPS, RATE = 32, 300, 1e-3
PIECES = 4
"""Of the demo's batch: it divides the batch."""


@dataclass(frozen=True)
class Ending:
    """How one run of the demo ended.

    Attributes:
        batch: sequences a step.
        steps: of the run.
        loss: mean over the last tenth of the steps, in nats a byte.
        average: noise scale of the run, in sequences.
        now: noise scale at its end.
    """

    batch: int
    steps: int
    loss: float
    average: float
    now: float


def demo(batch: int, steps: int, seed: int) -> Ending:
    """Run the demo."""
    rate = RATE * math.sqrt(batch / BATCH)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        options = ["--batch", batch, "--steps", steps, "--seed", seed, "--learning-rate", rate, "--out", out]
        command = [sys.executable, "-m", "sonde", "demo", *map(str, options)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, capture_output=True)
        readings = sonde.read_run(out).readings
    losses = [r.metrics["loss"] for r in readings if r.window > 0.9 * steps and r.metrics["loss"] is not None]
    last = readings[-1].metrics
    known = (last["gns/b_simple_average"], last["gns/b_simple"] or last["gns/b_simple_low"])
    return Ending(batch, steps, statistics.fmean(losses), *(value or math.nan for value in known))  # type: ignore[arg-type]


def whole_pieces(batch: float) -> int:
    """The nearest batch that the demo's pieces divide."""
    return max(round(batch / PIECES), 1) * PIECES


def trials(reference: Ending, seed: int) -> dict[str, Ending]:
    """The runs that the reference's noise scales advise."""
    tried = {}
    for name, batch in (("twice the batch", 2 * BATCH), ("four times the batch", 4 * BATCH)):
        for scale, value in (("average", reference.average), ("now", reference.now)):
            steps = round(STEPS * relative_steps(batch, BATCH, value))
            tried[f"{name}, steps by the {'average' if scale == 'average' else 'noise scale now'}"] = demo(
                whole_pieces(batch), steps, seed
            )
    return tried


def main() -> None:
    """Run everything and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    found: dict[str, list[Ending]] = {}
    for seed in range(1, options.seeds + 1):
        reference = demo(BATCH, STEPS, seed)
        for name, ending in {"reference": reference, **trials(reference, seed)}.items():
            found.setdefault(name, []).append(ending)
            print(seed, name, ending, flush=True)
    lines = [
        "| run | batch × steps | loss at the end, by seed | mean | less the reference's, by seed |",
        "|---|---|---|---|---|",
    ]
    for name, endings in found.items():
        size = ", ".join(f"{e.batch} × {e.steps}" for e in endings)
        losses = ", ".join(f"{e.loss:.3f}" for e in endings)
        apart = ", ".join(f"{e.loss - r.loss:+.3f}" for e, r in zip(endings, found["reference"], strict=True))
        lines.append(f"| {name} | {size} | {losses} | {statistics.fmean(e.loss for e in endings):.3f} | {apart} |")
    spread = max(e.loss for e in found["reference"]) - min(e.loss for e in found["reference"])
    scales = ", ".join(f"{e.average:.1f} and {e.now:.0f}" for e in found["reference"])
    text = (
        f"Noise scale of the references, average and at the end, in sequences: {scales}. Spread of their loss over "
        f"seeds: {spread:.3f} nats a byte.\n\n" + "\n".join(lines)
    )
    made = page("Does the demo's advice hold when tried?", "python -m benchmarks.demo_check", text)
    print(made)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "demo_check.md").write_text(made)


if __name__ == "__main__":
    main()
