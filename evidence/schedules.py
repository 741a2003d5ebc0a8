"""Study "schedules": a batch that follows the noise scale, beside constant batches and fixed ramps, at equal units.

Every training of a task sees the same number of units, and its rate falls to 0 over them. The adaptive schedule runs
in an ordinary loop with a probe that measures every step. Fixed ramps then get as many steps as it took, which nobody
could know before. What is compared is the held-out loss at the end, seed by seed.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import sonde
from evidence.replicas import Replicas, orthogonal
from evidence.tasks import MUON_MOMENTUM, Task, make_optimizers, task
from evidence.training import Training
from evidence.work import Arguments, Study
from sonde.decision.rate import rate_factor
from sonde.schedule.batch_schedule import BatchSchedule

START, LARGEST, MICRO = 8, 64, 4
"""Units: of the first steps, of the largest ones, and of a micro-batch where a probe measures."""
CONSTANT = (8, 16, 32, 64)
UNITS = {"regression": 4_096, "mlp": 4_096, "lm": 2_048, "convnet": 4_096}
WARM_UP = 0.02
"""Part of the units over which the rate rises."""
OFFSETS = (-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5)
"""Powers of 2 by which the rates of the sweep, which were constant, are tried for one that falls."""
N_PILOTS, FIRST_PILOT, N_SEEDS = 2, 1_000, 10

RATIOS = (0.5, 1.0)
"""Batch over B_simple that the adaptive schedule aims at; the first is the default of `sonde.BatchSchedule`."""
ORDER = (("mlp", "regression", "lm"), ("adamw", "sgd", "muon"))

Plan = Callable[[int], tuple[int, float]]
"""From the units seen so far to the batch and the learning rate of the next step."""


@dataclass(frozen=True)
class Setting:
    """What all trainings that are compared share.

    Attributes:
        task: what is trained.
        kind: of optimizer.
        units: of a training.
        offset: power of 2 by which the rates of the sweep are multiplied.
    """

    task: Task
    kind: str
    units: int
    offset: float = 0.0

    @property
    def is_sgd(self) -> bool:
        """Whether steps are as large as gradients, with momentum or without."""
        return self.kind.startswith("sgd")

    def tuned(self, batch: float) -> float:
        """The best rate of a batch."""
        return self.task.rates[self.kind].at(batch) * math.exp2(self.offset)

    def usual(self, batch: float) -> float:
        """The best rate of the first batch, carried over by the usual rule."""
        return self.tuned(START) * rate_factor("linear" if self.is_sgd else "sqrt", batch, START)

    def decay(self, done: int, batch: float) -> float:
        """Part of the rate in the middle of a step: it rises, then falls to 0 on a straight line."""
        part = (done + batch / 2) / self.units
        return min(part / WARM_UP, (1 - part) / (1 - WARM_UP))


def constant(setting: Setting, batch: int) -> Plan:
    """One batch, at its best rate."""
    return lambda done: (batch, setting.tuned(batch) * setting.decay(done, batch))


def staged(setting: Setting, batch_at: Callable[[int], int], rate: Callable[[float], float]) -> Plan:
    """The batch follows the units, the rate follows the batch."""
    return lambda done: ((batch := batch_at(done)), rate(batch) * setting.decay(done, batch))


def doubling(units: float) -> Callable[[int], int]:
    """A batch that doubles after each so many units."""
    return lambda done: min(START * 2 ** int(done / units), LARGEST)


def late_switch(units: float) -> Callable[[int], int]:
    """The first batch for so many units, the largest one from then on.

    Reference:
        Wang et al. 2026, arXiv:2602.14208.
    """
    return lambda done: START if done < units else LARGEST


def seesaw(setting: Setting, batch: int) -> Plan:
    """Where the rate would halve, it is divided by √2 and the batch is doubled; for SGD, the rate stays.

    Reference:
        Meterez et al. 2025, arXiv:2510.14717.
    """
    per_halving = 1.0 if setting.is_sgd else math.sqrt(0.5)

    def plan(done: int) -> tuple[int, float]:
        left = 1 - done / setting.units
        n_halvings = int(math.log2((1 - WARM_UP) / left)) if left < 1 - WARM_UP else 0
        now = batch * 2**n_halvings
        rising = min((done + now / 2) / setting.units / WARM_UP, 1.0)
        return now, setting.tuned(batch) * per_halving**n_halvings * rising

    return plan


def batches_of(plan: Plan, units: int) -> list[int]:
    """The batch of each step; the last one has what is left."""
    done, batches = 0, list[int]()
    while done < units:
        batches.append(min(plan(done)[0], units - done))
        done += batches[-1]
    return batches


def of_steps(ramp: Callable[[float], Callable[[int], int]], n_steps: int, units: int) -> Callable[[int], int]:
    """The ramp of a family that takes so many steps. The longer its parameter, the more steps it takes."""
    low, high = 1.0, float(units)
    for _ in range(40):
        middle = math.sqrt(low * high)
        n = len(batches_of(lambda done: (ramp(middle)(done), 0.0), units))  # noqa: B023 - called at once
        low, high = (middle, high) if n < n_steps else (low, middle)
    return ramp(high)


def train(setting: Setting, plan: Plan, seeds: Sequence[int], offsets: Sequence[float] = (0.0,)) -> list[list[float]]:
    """Trainings whose batches do not depend on what is measured, all at once.

    Returns:
        Held-out losses at the end, [seeds][offsets].
    """
    replicas, done = Replicas(setting.task, setting.kind, seeds, [2.0**offset for offset in offsets]), 0
    while done < setting.units:
        batch, rate = plan(done)
        batch = min(batch, setting.units - done)
        replicas.step(batch, rate)
        done += batch
    losses: list[list[float]] = replicas.held_out_losses().tolist()
    return losses


def best_offset(losses: Sequence[Sequence[float]]) -> float:
    """The offset of the rates whose losses are least on average; losses: [seeds][offsets]."""
    means = [statistics.fmean(of_one) for of_one in zip(*losses, strict=True)]
    return OFFSETS[min(range(len(OFFSETS)), key=lambda k: means[k] if math.isfinite(means[k]) else math.inf)]


def adaptive(setting: Setting, seed: int, ratio: float) -> tuple[list[int], float]:
    """One training in an ordinary loop, whose batch follows what a probe measures in every step.

    Its rate is what a user gets who has tuned that of the first batch: the usual rule carries it over to others.

    Args:
        setting: of the training.
        seed: of weights and data.
        ratio: batch over B_simple that is aimed at.

    Returns:
        The batch of each step, and the held-out loss at the end.
    """
    training = Training(setting.task.name, setting.kind, START, seed)
    training.optimizers = [
        MuonInFloat32(optimizer.param_groups[0]["params"]) if isinstance(optimizer, torch.optim.Muon) else optimizer
        for optimizer in make_optimizers(setting.kind, training.model, 1.0)
    ]
    groups = [(group, group["lr"]) for optimizer in training.optimizers for group in optimizer.param_groups]
    batches, unit, most = list[int](), setting.task.unit, LARGEST // MICRO
    options: dict[str, Any] = {"per_example": "never", "groups": None, "every": 1, "verbose": False}
    with sonde.attach(training.model, training.optimizers, unit=unit, **options) as probe:
        schedule = BatchSchedule(probe, smallest=START // MICRO, largest=most, ratio=ratio, verbose=False)
        while left := setting.units - sum(batches):
            batches.append(min(schedule.micro_batches * MICRO, left))
            for group, at_rate_1 in groups:  # 1 − β for SGD, whose rates are effective ones
                group["lr"] = at_rate_1 * setting.usual(batches[-1]) * setting.decay(setting.units - left, batches[-1])
            training.step(batches[-1], probe, n_pieces=batches[-1] // MICRO)
    return batches, training.held_out()


class MuonInFloat32(torch.optim.Optimizer):
    """Muon as `Replicas` computes it, so that arms differ in nothing else; torch's own has 8 bits on a CPU."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step along the orthogonal matrix that is nearest to Nesterov's average of the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                first = self.state[parameter].setdefault("first", torch.zeros_like(parameter))
                first.lerp_(parameter.grad, 1 - MUON_MOMENTUM)
                update = orthogonal(parameter.grad.lerp(first, MUON_MOMENTUM)[None])[0]
                parameter.sub_(update, alpha=group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def grown(batches: Sequence[int]) -> dict[str, int]:
    """Units that had been seen when each batch came for the first time.

    Example:
        >>> grown([8, 8, 16, 16])
        {'8': 0, '16': 16}
    """
    seen = [*itertools.accumulate(batches, initial=0)]
    return {str(batch): seen[batches.index(batch)] for batch in dict.fromkeys(batches)}


def pieces(smoke: bool) -> Sequence[Arguments]:
    """Every task with every optimizer, in an order that is balanced wherever it is cut."""
    if smoke:
        return [{"task_name": "regression", "kind": "sgd", "units": 512, "n_pilots": 2, "n_seeds": 3}]
    names, kinds = ORDER
    cases = [(name, kinds[(k + shift) % 3]) for shift in range(3) for k, name in enumerate(names)]
    cases += [("convnet", kind) for kind in kinds] + [(name, "sgd-0.9") for name in UNITS]
    of_all = {"n_pilots": N_PILOTS, "n_seeds": N_SEEDS}
    return [{"task_name": name, "kind": kind, "units": UNITS[name]} | of_all for name, kind in cases]


def fixed_arm(setting: Setting, plan: Plan, pilots: Sequence[int], seeds: Sequence[int]) -> dict[str, Any]:
    """An arm whose batches do not depend on what is measured, at its best rates."""
    offset = best_offset(train(setting, plan, pilots, OFFSETS))
    losses = [loss for (loss,) in train(setting, plan, seeds, [offset])]
    return {"steps": len(batches_of(plan, setting.units)), "losses": losses, "offset": offset}


def adaptive_arm(setting: Setting, ratio: float, seeds: Sequence[int]) -> dict[str, Any]:
    """The arm whose batches each training chooses by itself."""
    found = [adaptive(setting, seed, ratio) for seed in seeds]
    arm = {"steps": [len(batches) for batches, _ in found], "losses": [loss for _, loss in found]}
    return arm | {"offset": setting.offset, "grown": [grown(batches) for batches, _ in found]}


def of_equal_steps(setting: Setting, n_steps: int) -> dict[str, Plan]:
    """What takes about as many steps without measuring."""
    units = setting.units
    ramps = {"doubling": doubling, "late switch": late_switch}
    plans = {name: staged(setting, of_steps(ramp, n_steps, units), setting.tuned) for name, ramp in ramps.items()}
    first = min(range(MICRO, 2 * LARGEST), key=lambda b: abs(len(batches_of(seesaw(setting, b), units)) - n_steps))
    constants = {"constant, equal steps": constant(setting, math.ceil(units / n_steps))}
    return plans | {"Seesaw": seesaw(setting, first)} | constants


def run(task_name: str, kind: str, units: int, n_pilots: int, n_seeds: int) -> Mapping[str, Any]:
    """All arms of one task and optimizer.

    The adaptive schedule has the rate that is best for its first batch. Each other arm has the best of eight rates for
    itself. Rates are chosen on other seeds.

    Returns:
        Of each arm its steps, its held-out losses by seed, and the offset of its rates; of the adaptive one also the
        units at which each training had each of its batches for the first time. "of_ratio" has, by ratio, the adaptive
        arm and those of equal steps.
    """
    pilots, seeds = range(FIRST_PILOT, FIRST_PILOT + n_pilots), range(n_seeds)
    plain = Setting(task(task_name), kind, units)
    half = replace(plain, units=units // 2)
    arms = {f"constant {batch}": fixed_arm(plain, constant(plain, batch), pilots, seeds) for batch in CONSTANT}
    arms["half of the units"] = fixed_arm(half, constant(half, START), pilots, seeds)
    tuned, of_ratio = replace(plain, offset=arms[f"constant {START}"]["offset"]), dict[str, Any]()
    for ratio in RATIOS:
        measured = adaptive_arm(tuned, ratio, seeds)
        plans = of_equal_steps(plain, round(statistics.fmean(measured["steps"])))
        fixed = {name: fixed_arm(plain, plan, pilots, seeds) for name, plan in plans.items()}
        of_ratio[f"{ratio:g}"] = {"adaptive": measured} | fixed
    return {"arms": arms, "of_ratio": of_ratio}


STUDY = Study("schedules", pieces, run)
