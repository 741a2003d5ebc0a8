"""Study "watched": whole trainings that sonde measures, with rates that are tuned and rates that are not.

What a log of such a training holds at rising numbers of units: the losses, and for each metric the noise scale now and
on average over the run.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import sonde
from evidence.tasks import OPTIMIZERS, TASKS
from evidence.training import Training
from evidence.work import Arguments, Study
from sonde.batch_size.taps.metric import MetricName

BATCHES = (16, 128)
N_SEEDS = 5
LENGTHS = 2.0
"""A training that has not come to the last target ends after so many of its task's lengths."""
UNTUNED = ((8, 32, 128), (-4, -2, -1, 0, 1, 2), 3)
"""Batches, powers of 2 by which a rate is wrong, and seeds, where that is studied."""
FIRST_LOOK, PACE = 20, 1.3
"""Readings after so many steps, and then after each so many times more."""
METRICS: Mapping[str, tuple[MetricName, ...]] = {
    kind: ("euclidean", *(("adam",) if kind == "adamw" else ()), "sign", "spectral") for kind in OPTIMIZERS
}


def pieces(smoke: bool) -> Sequence[Arguments]:
    """Tuned rates for all tasks, others for two."""
    names = ("metrics", "lengths", "seed", "task_name", "kind", "batch", "offset")  # seed by seed
    batches, offsets, n_seeds = UNTUNED
    tuned = itertools.product(("all",), (LENGTHS,), range(N_SEEDS), TASKS, OPTIMIZERS, BATCHES, (0,))
    untuned = itertools.product(
        ("euclidean",), (LENGTHS,), range(n_seeds), ("mlp", "lm"), ("sgd", "adamw", "muon"), batches, offsets
    )
    tiny = [("all", 0.05, 0, "mlp", "adamw", 8, 0), ("euclidean", 0.05, 0, "lm", "muon", 8, -1)]
    return [dict(zip(names, case, strict=True)) for case in (tiny if smoke else [*tuned, *untuned])]


def run(
    task_name: str, kind: str, batch: int, offset: int, seed: int, lengths: float, metrics: str
) -> Mapping[str, Any]:
    """Train until the last target, or for so many lengths, and read the probe meanwhile."""
    training = Training(task_name, kind, batch, seed, offset)
    losses, looks, look = list[float](), list[dict[str, Any]](), FIRST_LOOK
    options = {"per_example": "never", "groups": None, "every": 1, "verbose": False}
    unit, measured = training.task.unit, METRICS[kind][: None if metrics == "all" else 1]
    with sonde.attach(training.model, training.optimizers, unit=unit, metric=measured, **options) as probe:  # type: ignore[arg-type]
        while training.n_units < lengths * training.task.length_at(batch):
            losses.append(training.step(probe=probe))
            if training.n_steps >= look:
                look = math.ceil(look * PACE)
                looks.append({"units": training.n_units, "held_out": training.held_out()} | summary(losses))
                looks[-1] |= {metric: noise_scale(probe.reading(metric=metric)) for metric in measured}
                if not looks[-1]["held_out"] > training.task.targets[-1]:  # there, or not a number
                    break
    return {"looks": looks}


def summary(losses: Sequence[float]) -> dict[str, float]:
    """Of the last third of all steps: the mean loss, and the scatter of a step about the one before."""
    last = losses[-max(len(losses) // 3, 3) :]
    changes = [(b - a) ** 2 / 2 for a, b in itertools.pairwise(last)]
    return {"loss": statistics.fmean(last), "scatter": math.sqrt(statistics.fmean(changes))}


def noise_scale(reading: sonde.NoiseScaleReading) -> list[float | None]:
    """Now with its interval, on average with its interval, |G|² and tr Σ."""
    average = reading.average
    of_run = [None] * 3 if average is None else [average.ratio, average.low, average.high]
    return [reading.b_simple, reading.low, reading.high, *of_run, reading.grad_sq, reading.trace_cov]


STUDY = Study("watched", pieces, run)
