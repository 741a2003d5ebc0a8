"""Study "sweep": whole trainings at several batch sizes and rates, and the units that each needs for its targets.

A training goes on until some rate has brought every seed to the last target, and half as many units again: a rate that
needs more is not the best. Where the best of the rates is the highest or the lowest, further ones are tried.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evidence.replicas import Replicas
from evidence.tasks import OPTIMIZERS, Task, task
from evidence.work import Arguments, Study
from sonde.evidence.stats.loss_curves import Curve, falling, units_at

BATCHES = {
    "regression": (1, 4, 16, 64, 256),
    "mlp": (4, 16, 64, 256, 1024),
    "lm": (4, 16, 64, 256, 512),
    "convnet": (4, 16, 64, 256, 1024),
}
N_SEEDS, N_RATES = 5, 5
STEP = 0.5
"""Between the powers of 2 that are tried as rates."""
FIRST_LOOK, PACE = 32, 1.08
"""Held-out losses are computed at so many units first, and then at each so many times more units."""
PATIENCE, SURE = 1.5, 3
"""Part of the units to go on, after so many looks in which every seed of some rate was below the last target."""
MOST_TRIES = 4
MOST_LENGTHS = 8
"""Times the length of a training that is thought right: after so many, no rate comes to the last target."""

Units = dict[float, list[list[float | None]]]
"""Units that a training needed, [targets][seeds], by the rate's power of 2; None where it came to no such loss."""


def pieces(smoke: bool) -> Sequence[Arguments]:
    """Every task with every optimizer at every batch."""
    if smoke:
        small = {"n_seeds": 2, "n_rates": 2, "cap": 512}
        return [{"task_name": name, "kind": kind, "batch": 64} | small for name in BATCHES for kind in OPTIMIZERS]
    full = {"n_seeds": N_SEEDS, "n_rates": N_RATES, "cap": None}
    return [
        {"task_name": name, "kind": kind, "batch": batch} | full
        for name, batches in BATCHES.items()
        for kind in OPTIMIZERS
        for batch in batches
    ]


def run(task_name: str, kind: str, batch: int, n_seeds: int, n_rates: int, cap: int | None) -> Mapping[str, Any]:
    """Train at rates about the one that is thought best, and at further ones while the best is not between others."""
    trained, known, most = task(task_name), Units(), float(cap or MOST_LENGTHS * task(task_name).length_at(batch))
    centre = round(math.log2(trained.rates[kind].at(batch)) / STEP)
    powers = [STEP * (centre + k - n_rates // 2) for k in range(n_rates)]
    for _ in range(MOST_TRIES):
        found, most = train(trained, kind, batch, n_seeds, powers, most)
        known |= found
        powers = further(known) if cap is None else []
        if not powers:
            break
    ordered = sorted(known)
    return {"powers": ordered, "units": [known[power] for power in ordered]}


def train(
    trained: Task, kind: str, batch: int, n_seeds: int, powers: Sequence[float], most: float
) -> tuple[Units, float]:
    """Train with each rate and seed.

    Args:
        trained: what.
        kind: of optimizer.
        batch: units of a step.
        n_seeds: trainings of each rate.
        powers: of 2, the rates.
        most: units after which to end.

    Returns:
        What each rate needed, and after how many units rates that are tried later may end.
    """
    replicas = Replicas(trained, kind, range(n_seeds), [2.0**power for power in powers])
    looked, losses = [0], [replicas.held_out_losses()]
    n_units, look, n_below = 0, FIRST_LOOK, torch.zeros_like(losses[0])
    while n_units < most:
        replicas.step(batch)
        n_units += batch
        if n_units >= look:
            look = math.ceil(n_units * PACE)
            looked.append(n_units)
            losses.append(replicas.held_out_losses())
            n_below += losses[-1] <= trained.targets[-1]
            if bool((n_below >= SURE).all(0).any()):
                most = min(most, PATIENCE * n_units)
    units: Units = {}
    for k, power in enumerate(powers):
        curves = [Curve(tuple(looked), tuple(float(loss[s, k]) for loss in losses)) for s in range(n_seeds)]
        units[power] = [[units_needed(curve, target) for curve in curves] for target in trained.targets]
    return units, most


def units_needed(curve: Curve, target: float) -> float | None:
    """Units at which a noisy curve has come to a loss; None where it has not, or diverged."""
    if not all(map(math.isfinite, curve.losses)):
        return None
    return units_at(falling(curve), target)


def mean_log(units: Sequence[float | None]) -> float:
    """Mean over seeds of the log of what they needed; infinite where one did not come there."""
    return statistics.fmean(math.log(u) if u else math.inf for u in units)


def further(known: Units) -> list[float]:
    """Powers of 2 to try next: two steps beyond each end that is best for some target; none where no end is."""
    low, high, more = min(known), max(known), set[float]()
    for of_target in zip(*known.values(), strict=True):
        logs = dict(zip(known, map(mean_log, of_target), strict=True))
        best = min(logs, key=logs.__getitem__)
        if best == low:
            more |= {low - STEP, low - 2 * STEP}
        if best == high or math.isinf(logs[best]):
            more |= {high + STEP, high + 2 * STEP}
    return sorted(more)


STUDY = Study("sweep", pieces, run)
