"""Study "branched": critical batch sizes from branches at points of a training, and proxies at the same weights.

Point 1 is where the reference, a small batch at its best rate, comes to the last target. Some trainings of a language
model have points from near the beginning to far beyond: does the critical batch rise from near 0 to a plateau, as
Merrill et al. 2025, arXiv:2505.23971, found? The rate falls to 0 in each branch: at a constant one, the small models
hardly get better within a window, for all their noise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sonde
from evidence.single_steps import b_noise
from evidence.sweep import SURE
from evidence.tasks import OPTIMIZERS, TASKS, Units
from evidence.training import Training
from evidence.work import Arguments, Study
from sonde.decision.rate import DECAYED, FALLING, rate_factor, rule_in_words
from sonde.evidence.branches import Branch, Branches
from sonde.evidence.stats.loss_curves import Curve
from sonde.stats.intervals import RatioInterval

REFERENCE = 8
BATCHES = (8, 16, 32, 64, 128)
N_SEEDS, N_BRANCHES = 3, 5
"""Trainings, and branches of each batch size from each of their points."""
POINTS, FURTHER = (0.2, 0.5, 0.9), (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
WINDOW = 0.5
"""Units of a branch, as a part of those up to point 1."""
PACE = 1.15
"""A training is kept after each so many times more units."""
MOST_LENGTHS = 6
MICRO, LOOK = 4, 16
"""Units of a micro-batch: for B_simple at the weights of a point, and for single steps."""


def pieces(smoke: bool) -> Sequence[Arguments]:
    """Each training at three points; some of SGD with tuned rates besides; and far more points of a language model."""
    names = ("seed", "task_name", "kind", "rule", "points", "n_branches")
    cases: list[tuple[Any, ...]] = [
        (*case, rule, [*POINTS], N_BRANCHES)
        for case in itertools.product(range(N_SEEDS), TASKS, OPTIMIZERS)
        for rule in ("usual", "tuned")
        if rule == "usual" or case[2].startswith("sgd")
    ]
    cases += [(seed, "lm", kind, "usual", [*FURTHER], N_BRANCHES) for seed in range(5) for kind in ("adamw", "muon")]
    tiny = [(0, "regression", "sgd", "tuned", [0.5], 2), (0, "regression", "adamw", "usual", [0.5], 2)]
    return [dict(zip(names, case, strict=True)) for case in (tiny if smoke else cases)]


def run(task_name: str, kind: str, seed: int, rule: str, points: Sequence[float], n_branches: int) -> Mapping[str, Any]:
    """Train, then branch and measure at each point."""
    whole, kept = kept_trainings(Training(task_name, kind, REFERENCE, seed), max(points))
    found = []
    for point in points:
        start = min(kept, key=lambda training: abs(math.log(training.n_units / (point * whole))))
        of_point: dict[str, Any] = {"units": start.n_units, "held_out": start.held_out()}
        of_point["branches"] = branched(start, kind, rule, WINDOW * whole, n_branches).as_json()
        if rule == "usual":
            of_point |= proxies(start, kind, few=n_branches == 2)
        found.append(of_point)
    return {"units_to_last_target": whole, "points": found}


def kept_trainings(training: Training, last: float) -> tuple[int, list[Training]]:
    """Train up to a last point, and keep copies on the way.

    Returns:
        The units at point 1, and the copies.

    Raises:
        ValueError: if the training does not come to its last target.
    """
    kept, look, n_below, whole = list[Training](), 4, 0, math.inf
    while training.n_units < last * whole:
        training.step()
        if training.n_steps >= look:
            kept.append(training.kept())
            look = math.ceil(look * PACE)
        if math.isinf(whole) and training.n_steps % 8 == 0:
            n_below += training.held_out() <= training.task.targets[-1]
            whole = training.n_units if n_below >= SURE else math.inf
        if math.isinf(whole) and training.n_units > MOST_LENGTHS * training.task.length:
            raise ValueError(f"the loss is {training.held_out():.3g} after {training.n_units} units: tune the rate")
    return int(whole), kept


def branched(start: Training, kind: str, rule: str, units: float, n_branches: int) -> Branches:
    """Branches of several batch sizes from here, whose rate falls to 0."""
    rate, usual, units = (
        start.task.rates[kind],
        "linear" if kind.startswith("sgd") else "sqrt",
        max(units, 4 * BATCHES[-1]),
    )
    factors = {batch: rate_factor(usual, batch, REFERENCE) for batch in BATCHES}
    if rule == "tuned":
        factors = {batch: rate.at(batch) / rate.at(REFERENCE) for batch in BATCHES}
    branches = [
        Branch(batch, seed, _largest_rate(start) * factor, curve_of(start, batch, seed, units, factor))
        for batch, factor in factors.items()
        for seed in range(n_branches)
    ]
    in_words = rule_in_words(usual) if rule == "usual" else "learning rates from a table"
    return Branches(start.task.unit, REFERENCE, units, 0.2, in_words + FALLING, tuple(branches), loss="held-out loss")


def curve_of(start: Training, batch: int, seed: int, units: float, factor: float) -> Curve:
    """The loss of one branch, at the ends of trainings of several lengths: each one's rate falls to 0, linearly.

    Args:
        start: where it begins.
        batch: units of a step.
        seed: of its data.
        units: of the longest training.
        factor: its first rate, over the rate of `start`.
    """
    points = {0: start.held_out()}
    for part in DECAYED:
        training, n_steps = start.kept(), math.ceil(part * units / batch)
        training.data.manual_seed(seed)
        groups = [group for optimizer in training.optimizers for group in optimizer.param_groups]
        rates = [group["lr"] * factor for group in groups]
        for n in range(n_steps):
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * (1 - n / n_steps)
            training.step(batch)
        points[n_steps * batch] = training.held_out()
    return Curve(tuple(map(float, points)), tuple(points.values()))


def _largest_rate(training: Training) -> float:
    return max(float(group["lr"]) for optimizer in training.optimizers for group in optimizer.param_groups)


def proxies(start: Training, kind: str, few: bool) -> dict[str, Any]:
    """B_simple, and B_noise along the gradient and along the optimizer's direction, at the weights of a point."""
    training = start.kept()
    options: dict[str, Any] = {"sizes": (1, 4), "draws": 4} if few else {"sizes": (1, 3, 9, 27), "draws": 12}
    looks = batches_of(training, LOOK)
    found = {"B_noise": _numbers(b_noise(training, looks, own_direction=False, **options))}
    reading = sonde.measure(
        training.model,
        lambda model, units: training.task.loss(model(units[0]), units[1]),
        batches_of(training, MICRO),
        unit=training.task.unit,
        until=0.2,
        most_batches=60 if few else 1500,
        verbose=False,
    ).reading
    found["B_simple"] = [reading.b_simple, reading.low, reading.high]
    if not kind.startswith("sgd"):
        found["B_noise, own direction"] = _numbers(b_noise(training, looks, own_direction=True, **options))
    return found


def _numbers(interval: RatioInterval) -> list[float | None]:
    return [interval.ratio, interval.low, interval.high]


def batches_of(training: Training, n: int) -> Iterator[Units]:
    """Micro-batches without end."""
    while True:
        yield training.task.draw(n, training.data)


STUDY = Study("branched", pieces, run)
