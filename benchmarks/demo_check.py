"""Does the demo's advice hold when somebody follows it?

    python -m benchmarks.demo_check [--seeds 3] [--out benchmarks/results]

Runs the demo, and reads the table of its decision: for how many steps another batch is to be trained, the upper end of
what is said. Then it runs the demo with twice and four times the batch and so many steps, at the learning rate times
the root of the batches' ratio, as AdamW asks for. Both should end at the loss of the reference.

What is said of the time from here on is tried where it is said: the demo's model is trained for a while, and then goes
on from there, with the batch as it was, and with twice the batch and the steps of the table.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import sonde
from benchmarks.machine import page
from sonde.batch_size.last_words import decision_of
from sonde.decision.decide import Decision
from sonde.decision.facts import FROM_HERE_ON, RUN_LIKE_THIS
from sonde.demos.byte_lm.task import ByteTransformer, draw_windows, find_sources, read_corpus, window_generator
from sonde.demos.byte_lm.train import LAST_RATE, MAX_GRAD_NORM, WARMUP_STEPS, next_byte_loss
from sonde.runs.facts import facts_of_run

BATCH, STEPS, RATE, CONTEXT = 32, 300, 1e-3, 96
PIECES = 4
"""Of the demo's batch: it divides the batch."""
SIZES = (64, 128)
"""Batches that are tried."""


@dataclass(frozen=True)
class Ending:
    """How one run of the demo ended.

    Attributes:
        batch: sequences a step.
        steps: of the run.
        loss: mean over the last tenth of the steps, in nats a byte.
        average: noise scale of the run, in sequences.
        now: noise scale where the decision is made, at the end of the run, or where it goes on.
        said: steps of each batch that learn as much, by the batch over the demo's.
    """

    batch: int
    steps: int
    loss: float
    average: float
    now: float
    said: dict[int, float]


def steps_said(found: Decision, scope: str) -> dict[int, float]:
    """Steps of other batches over those of the present one, by the batch over it: the upper end of the table."""
    advice = found.advice[scope]
    others = [plan for plan in advice.plans if plan.batch in SIZES]
    return {round(plan.batch / BATCH): plan.steps.high / advice.scope.steps for plan in others}


def demo(batch: int, steps: int, seed: int) -> Ending:
    """Run the demo."""
    rate = RATE * math.sqrt(batch / BATCH)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        options = ["--batch", batch, "--steps", steps, "--seed", seed, "--learning-rate", rate, "--out", out]
        command = [sys.executable, "-m", "sonde", "demo", *map(str, options)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
        run = sonde.read_run(out)
    losses = [r.metrics["loss"] for r in run.readings if r.window > 0.9 * steps and r.metrics["loss"] is not None]
    last = run.readings[-1]
    said = steps_said(sonde.decide(facts_of_run(run)), RUN_LIKE_THIS) if batch == BATCH else {}
    now = last.now.ratio or last.now.low or math.nan
    return Ending(batch, steps, statistics.fmean(losses), last.average.ratio or math.nan, now, said)


def trials(reference: Ending, seed: int) -> dict[str, Ending]:
    """The runs with other batches, and the steps that the reference's table has for them."""
    return {f"{k} times the batch": demo(k * BATCH, round(STEPS * part), seed) for k, part in reference.said.items()}


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
    said = steps_said(decision_of(probe, reading), FROM_HERE_ON)
    average, now = reading.average.ratio or math.nan, reading.b_simple or math.nan
    planned = {"goes on as it was": (BATCH, STEPS), "twice the batch": (2 * BATCH, round(STEPS * said[2]))}
    return {name: Ending(b, n, training.goes_on(b, n), average, now, said) for name, (b, n) in planned.items()}


def as_table(found: dict[str, list[Ending]]) -> str:
    """The endings of all seeds beside those of the first entry, the reference."""
    reference = next(iter(found.values()))
    spread = max(e.loss for e in reference) - min(e.loss for e in reference)
    scales = ", ".join(f"{e.average:.1f} and {e.now:.0f}" for e in reference)
    lines = [
        f"Noise scale of the references, average and at the end, in sequences: {scales}. Spread of "
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
