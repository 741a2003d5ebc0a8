"""Does the demo's advice hold when somebody follows it?

    python -m benchmarks.demo_check [--seeds 3] [--out benchmarks/results]

Runs the demo, and reads its verdict: which part of the steps another batch would need in a run like this one. Then it
runs the demo with that batch and so many steps, the middle of what is said, at the learning rate times the root of the
batches' ratio, as AdamW asks for. It should end at the loss of the reference. So should four times the batch, by the
same equation, for a larger step than the verdict's.

What the verdict says of the time from here on is tried where it is said: the demo's model is trained for a while, and
then goes on from there, with the batch as it was, and with the batch and the steps of the verdict.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from sonde.batch_size.stats.critical_batch import relative_steps
from sonde.batch_size.stats.proxy import FACTORS
from torch import Tensor, nn

import sonde
from benchmarks.machine import page
from sonde.demos.byte_lm.task import ByteTransformer, draw_windows, find_sources, read_corpus, window_generator
from sonde.demos.byte_lm.train import LAST_RATE, MAX_GRAD_NORM, WARMUP_STEPS, next_byte_loss

BATCH, STEPS, RATE, CONTEXT = 32, 300, 1e-3, 96
CRITICAL = FACTORS["Adam or AdamW (β = 0.9)", "euclidean"].median
"""The critical batch size over the run's average noise scale, as the verdict takes it."""
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
        now: noise scale where the verdict is given, at the end of the run, or where it goes on.
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
    """The run that the reference's verdict advises, and that with four times the batch."""
    more = 4 * BATCH
    planned = {
        "as said of a run like this one": reference.said[0],
        "four times the batch, by the average": (more, relative_steps(more, BATCH, CRITICAL * reference.average)),
    }
    return {name: demo(whole_pieces(b), round(STEPS * part), seed) for name, (b, part) in planned.items()}


class Training:
    """The demo's model in one process, which can be copied and go on with another batch.

    Args:
        seed: of weights and data.
    """

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._seed, self._corpus, self._n_steps = seed, read_corpus(find_sources()), 0
        self.model = ByteTransformer(context=CONTEXT)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, betas=(0.9, 0.99))

    def _drawn(self, batch: int, stream: int) -> Tensor:
        return draw_windows(self._corpus, batch, CONTEXT, window_generator(self._seed, self._n_steps, stream))

    def step(self, batch: int, rate: float, probe: sonde.NoiseScaleProbe | None = None) -> None:
        """One step. Another number of steps done, or another batch, draws other data."""
        self._n_steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for windows in self._drawn(batch, batch).chunk(PIECES):
            (next_byte_loss(self.model, windows) / PIECES).backward()
        if probe is None:
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        else:
            probe.clip_grad_norm_(MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def goes_on(self, batch: int, steps: int) -> float:
        """Train a copy on to a tenth of its rate, which grows with the root of the batch; its loss on fresh text."""
        branch = copy.deepcopy(self)
        for k in range(steps):
            decay = LAST_RATE + (1 - LAST_RATE) * (1 - (k + 0.5) / steps)
            branch.step(batch, RATE * math.sqrt(batch / BATCH) * decay)
        with torch.no_grad():
            fresh = draw_windows(self._corpus, 2_048, CONTEXT, window_generator(self._seed, 0, -1))
            return statistics.fmean(float(next_byte_loss(branch.model, windows)) for windows in fresh.split(64))


def continued(seed: int) -> dict[str, Ending]:
    """A training that goes on as it was, and as the verdict says of the time from here on."""
    training = Training(seed)
    probe = sonde.attach(training.model, training.optimizer, unit="sequences", every=1, verbose=False)
    for k in range(STEPS):
        training.step(BATCH, RATE * min((k + 1) / WARMUP_STEPS, 1), probe)
    reading = probe.reading()
    probe.close()
    said = costs_in(f"{reading.verdict.headline} {reading.verdict.detail}", BATCH)
    average, now = reading.average.b_simple or math.nan, reading.b_simple or math.nan
    batch, part = whole_pieces(said[1][0]), said[1][1]
    planned = {"goes on as it was": (BATCH, STEPS), "as said of the time from here on": (batch, round(STEPS * part))}
    return {name: Ending(b, n, training.goes_on(b, n), average, now, said) for name, (b, n) in planned.items()}


def as_table(found: dict[str, list[Ending]]) -> str:
    """The endings of all seeds beside those of the first entry, the reference."""
    reference = next(iter(found.values()))
    spread = max(e.loss for e in reference) - min(e.loss for e in reference)
    scales = ", ".join(f"{e.average:.1f} and {e.now:.0f}" for e in reference)
    lines = [
        f"Noise scale of the references, average and where the verdict is given, in sequences: {scales}. Spread of "
        f"their loss over seeds: {spread:.3f} nats a byte.",
        "",
        "| run | batch × steps | loss at the end, by seed | mean | less the reference's, by seed |",
        "|---|---|---|---|---|",
    ]
    for name, endings in found.items():
        size = ", ".join(f"{e.batch} × {e.steps}" for e in endings)
        losses = ", ".join(f"{e.loss:.3f}" for e in endings)
        apart = ", ".join(f"{e.loss - r.loss:+.3f}" for e, r in zip(endings, reference, strict=True))
        lines.append(f"| {name} | {size} | {losses} | {statistics.fmean(e.loss for e in endings):.3f} | {apart} |")
    return "\n".join(lines)


def main() -> None:
    """Run everything and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    of_runs: dict[str, list[Ending]] = {}
    from_here_on: dict[str, list[Ending]] = {}
    for seed in range(1, options.seeds + 1):
        reference = demo(BATCH, STEPS, seed)
        for found, endings in (
            (of_runs, {"reference": reference, **trials(reference, seed)}),
            (from_here_on, continued(seed)),
        ):
            for name, ending in endings.items():
                found.setdefault(name, []).append(ending)
                print(seed, name, ending, flush=True)
    text = (
        f"## A run like this one\n\n{as_table(of_runs)}\n\n## From here on\n\nAfter {STEPS} steps at a steady rate, "
        "which then falls to a tenth. The loss is that of 2,048 fresh sequences, the same for both.\n\n"
        f"{as_table(from_here_on)}"
    )
    made = page("Does the demo's advice hold when tried?", "python -m benchmarks.demo_check", text)
    print(made)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "demo_check.md").write_text(made)


if __name__ == "__main__":
    main()
