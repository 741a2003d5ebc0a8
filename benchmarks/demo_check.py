"""Does the demo's advice hold when somebody follows it?

    python -m benchmarks.demo_check [--seeds 3] [--out benchmarks/results]

Runs the demo, and reads its verdict: which part of the steps another batch would need, in a run like this one and from
here on. Then it runs the demo with that batch and so many steps, the middle of what is said, at the learning rate times
the root of the batches' ratio, as AdamW asks for. The first should end at the loss of the reference. The second is no
advice for a whole run, and stands beside it to show why there are two sentences. So does four times the batch, by the
same equation, for a larger step than the verdict's.
"""

from __future__ import annotations

import argparse
import math
import os
import re
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
COST = re.compile(
    r"(twice|half|a batch of ([\d.,]+)) (?:the batch|sequences) "
    r"would need ([\d.]+)(?: to ([\d.]+))? (% of|times) the steps"
)
"""A verdict's sentence about another batch."""


@dataclass(frozen=True)
class Ending:
    """How one run of the demo ended.

    Attributes:
        batch: sequences a step.
        steps: of the run.
        loss: mean over the last tenth of the steps, in nats a byte.
        average: noise scale of the run, in sequences.
        now: noise scale at its end.
        said: another batch and its part of the steps, in a run like this one and from here on, as the verdict says.
    """

    batch: int
    steps: int
    loss: float
    average: float
    now: float
    said: list[tuple[float, float]]


def demo(batch: int, steps: int, seed: int) -> Ending:
    """Run the demo."""
    rate = RATE * math.sqrt(batch / BATCH)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        options = ["--batch", batch, "--steps", steps, "--seed", seed, "--learning-rate", rate, "--out", out]
        command = [sys.executable, "-m", "sonde", "demo", *map(str, options)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
        readings = sonde.read_run(out).readings
    losses = [r.metrics["loss"] for r in readings if r.window > 0.9 * steps and r.metrics["loss"] is not None]
    last = readings[-1].metrics
    average, now = (
        last["gns/b_simple_average"] or math.nan,
        last["gns/b_simple"] or last["gns/b_simple_low"] or math.nan,
    )
    return Ending(batch, steps, statistics.fmean(losses), average, now, costs_in(ended.stdout, batch))


def costs_in(printed: str, batch: int) -> list[tuple[float, float]]:
    """Each batch that a verdict speaks of, with the part of the steps that it needs: the middle of what is said."""
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", printed).split())
    costs = []
    for name, size, low, high, unit in COST.findall(text):
        other = {"twice": 2.0 * batch, "half": batch / 2}.get(name) or float(size.replace(",", ""))
        part = (float(low) + float(high or low)) / 2
        costs.append((other, part / 100 if unit == "% of" else part))
    return costs


def whole_pieces(batch: float) -> int:
    """The nearest batch that the demo's pieces divide."""
    return max(round(batch / PIECES), 1) * PIECES


def trials(reference: Ending, seed: int) -> dict[str, Ending]:
    """The runs that the reference's verdict advises, and those with four times the batch."""
    more = 4 * BATCH
    of_run, now = reference.said
    planned = {
        "as said of a run like this one": of_run,
        "as said of the time from here on": now,
        "four times the batch, by the average": (more, relative_steps(more, BATCH, reference.average)),
        "four times the batch, by the noise scale now": (more, relative_steps(more, BATCH, reference.now)),
    }
    return {name: demo(whole_pieces(b), round(STEPS * part), seed) for name, (b, part) in planned.items()}


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
