"""Study "watched": whole trainings that sonde measures, with rates that are tuned and rates that are not.

What a log of such a training holds at rising numbers of units: the held-out loss, and for each metric the noise scale
now and on average over the run.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import sonde
from evidence.replicas import begun, mean_loss
from evidence.tasks import OPTIMIZERS, TASKS, Task, make_optimizers, task
from evidence.work import Arguments, Study
from sonde.batch_size.taps.metric import MetricName

BATCHES = (16, 128)
N_SEEDS = 5
N_PIECES = 4
OFFSETS = (-4, -2, -1, 1, 2)
"""Powers of 2 by which a rate is wrong, where that is studied: from a sixteenth to four times the best."""
FIRST_LOOK, PACE = 20, 1.3
"""Readings after so many steps, and then after each so many times more."""
METRICS: Mapping[str, tuple[MetricName, ...]] = {
    "sgd": ("euclidean", "sign", "spectral"),
    "sgd-0.9": ("euclidean", "sign", "spectral"),
    "adamw": ("euclidean", "adam", "sign", "spectral"),
    "muon": ("euclidean", "sign", "spectral"),
}


def pieces(smoke: bool) -> Sequence[Arguments]:
    """Tuned rates for all tasks, others for some."""
    if smoke:
        names = ("task_name", "kind", "batch", "offset", "seed", "lengths")
        return [dict(zip(names, (*case, 8, 0, 0, 0.02), strict=True)) for case in (("mlp", "adamw"), ("lm", "muon"))]
    tuned = [
        {"task_name": name, "kind": kind, "batch": batch, "offset": 0, "seed": seed, "lengths": 2.0}
        for name in TASKS
        for kind in OPTIMIZERS
        for batch in BATCHES
        for seed in range(N_SEEDS)
    ]
    untuned = [
        {"task_name": name, "kind": kind, "batch": batch, "offset": offset, "seed": seed, "lengths": 2.0}
        for name in ("mlp", "lm")
        for kind in ("sgd", "adamw", "muon")
        for batch in (8, 32, 128)
        for offset in (0, *OFFSETS)
        for seed in range(3)
    ]
    return [*tuned, *untuned]


def run(task_name: str, kind: str, batch: int, offset: int, seed: int, lengths: float) -> Mapping[str, Any]:
    """Train until the last target, or for so many lengths, and read the probe meanwhile."""
    training = Training(task(task_name), kind, batch, offset, seed)
    trained, looks = training.trained, []
    with sonde.attach(
        training.model,
        training.optimizers,
        unit=trained.unit,
        metric=METRICS[kind],
        per_example="never",
        groups=None,
        every=1,
        verbose=False,
    ) as probe:
        look = FIRST_LOOK
        while training.n_units < lengths * trained.length_at(batch):
            training.step(probe)
            if training.n_steps >= look:
                look = math.ceil(look * PACE)
                looks.append(training.look() | {m: noise_scale(probe.reading(metric=m)) for m in METRICS[kind]})
                if not looks[-1]["held_out"] > trained.targets[-1]:  # there, or not a number
                    break
    return {"looks": looks}


class Training:
    """A training in an ordinary loop, with torch's own optimizers.

    Args:
        trained: what.
        kind: of optimizer.
        batch: units of a step.
        offset: power of 2 by which the rate differs from the best.
        seed: of weights and data.
    """

    def __init__(self, trained: Task, kind: str, batch: int, offset: float, seed: int) -> None:
        self.trained, self.batch, self.n_steps = trained, batch, 0
        self.model = begun(trained, seed)
        self.optimizers = make_optimizers(kind, self.model, trained.rates[kind].at(batch) * 2.0**offset)
        self._data = torch.Generator().manual_seed(1000 + seed)
        self._losses: list[float] = []

    @property
    def n_units(self) -> int:
        """Trained on so far."""
        return self.n_steps * self.batch

    def step(self, probe: sonde.NoiseScaleProbe) -> None:
        """One step, of four micro-batches."""
        total = 0.0
        inputs, targets = self.trained.draw(self.batch, self._data)
        for units in zip(inputs.chunk(N_PIECES), targets.chunk(N_PIECES), strict=True):
            with probe.piece(units=len(units[0])):
                loss = mean_loss(self.trained, self.model, units) / N_PIECES
                loss.backward()
            total += loss.item()
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()
        self.n_steps += 1
        self._losses.append(total)

    def look(self) -> dict[str, Any]:
        """Losses: held-out, and of the last third of all steps, with the scatter of a step about the one before."""
        with torch.no_grad():
            held_out = float(mean_loss(self.trained, self.model, self.trained.held_out))
        last = self._losses[-max(len(self._losses) // 3, 3) :]
        steps = [b - a for a, b in itertools.pairwise(last)]
        scatter = math.sqrt(statistics.fmean(step**2 for step in steps) / 2)
        return {"units": self.n_units, "held_out": held_out, "loss": statistics.fmean(last), "scatter": scatter}


def noise_scale(reading: sonde.NoiseScaleReading) -> list[float | None]:
    """Now with its interval, on average with its interval, |G|² and tr Σ."""
    average = reading.average
    of_run = [None] * 3 if average is None else [average.b_simple, average.low, average.high]
    return [reading.b_simple, reading.low, reading.high, *of_run, reading.grad_sq, reading.trace_cov]


STUDY = Study("watched", pieces, run)
