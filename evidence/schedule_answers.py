"""What the study of schedules found: steps that each saves, and what it loses."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evidence.schedules import CONSTANT
from evidence.tasks import OPTIMIZERS
from evidence.work import Store
from sonde.stats.intervals import student_t_quantile

Rows = list[list[str]]
MARGIN = 0.1
"""No loss, said before the trainings ran: as good as with at most this part of the units less."""
GOAL = 0.4
"""Part of the best constant batch's steps that a schedule is to save at no loss."""
CERTAIN = 0.01
"""Two arms differ where the p-value of no difference is below this."""
RAMPS = ("doubling", "late switch", "Seesaw", "constant, equal steps")
EXTREMES = (f"constant {CONSTANT[0]}", f"constant {CONSTANT[-1]}")
HALF = "half of the units"
MOST_HALVINGS = 3.0
"""Of the units, in a seed's difference: more is far from what was measured."""


@dataclass(frozen=True)
class Paired:
    """A difference over seeds.

    Attributes:
        mean: of the differences.
        low: lower end of its 95 % interval, by Student's t.
        high: upper end.
        values: the difference of each seed; of units, in halvings.
    """

    mean: float
    low: float
    high: float
    values: tuple[float, ...]

    @property
    def p(self) -> float:
        """Two-sided p-value of no difference."""
        return min(1.0, 2 * min(p_above(self.values), p_above([-v for v in self.values])))

    def in_percent(self) -> str:
        """The mean and its interval."""
        return f"{100 * self.mean:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}]"


def paired(values: Sequence[float]) -> Paired:
    """The mean of differences with its interval.

    Example:
        >>> found = paired([1.0, 2.0, 3.0])
        >>> found.mean, round(found.low, 2), round(found.high, 2)
        (2.0, -0.48, 4.48)
    """
    mean = statistics.fmean(values)
    reach = student_t_quantile(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Paired(mean, mean - reach, mean + reach, tuple(values))


def p_above(values: Sequence[float]) -> float:
    """One-sided p-value of a mean of 0 or less: the part of all choices of signs that give as large a sum.

    Example:
        >>> p_above([1.0, 2.0, 3.0, 4.0])
        0.0625
    """
    total = sum(values) - 1e-12
    sums = (
        sum(s * v for s, v in zip(signs, values, strict=True))
        for signs in itertools.product((1, -1), repeat=len(values))
    )
    return sum(found >= total for found in sums) / math.exp2(len(values))


@dataclass(frozen=True)
class Case:
    """All arms of one task and optimizer at one ratio.

    Attributes:
        task: its name.
        kind: of optimizer.
        ratio: batch over B_simple that the adaptive schedule aims at.
        arms: steps and losses by name.
    """

    task: str
    kind: str
    ratio: str
    arms: dict[str, Any]

    def steps(self, arm: str) -> float:
        """Mean over seeds."""
        found = self.arms[arm]["steps"]
        return statistics.fmean(found) if isinstance(found, list) else float(found)

    def lost(self, arm: str, other: str) -> Paired:
        """Units that an arm wastes beside another, as a part of all units; below 0 where its loss is lower.

        A difference of losses counts as many halvings of the units as move the loss of the smallest constant batch by
        as much: it is trained for all units and for half of them. The mean over seeds is that of halvings. A seed
        counts at most 3 of them, so that one training that fails does not hide all others.
        """
        halved = statistics.fmean(self.differences(HALF, f"constant {CONSTANT[0]}"))
        halvings = [difference / halved for difference in self.differences(arm, other)]
        found = paired([min(max(each, -MOST_HALVINGS), MOST_HALVINGS) for each in halvings])
        mean, low, high = (1 - 0.5**end for end in (found.mean, found.low, found.high))
        return Paired(mean, low, high, found.values)

    def differences(self, arm: str, other: str) -> list[float]:
        """Of the losses of each seed."""
        losses = (self.arms[name]["losses"] for name in (arm, other))
        return [math.inf if a is None else a - b for a, b in zip(*losses, strict=True)]

    @property
    def saved(self) -> Paired:
        """Part of the best constant batch's steps that the adaptive schedule does without."""
        return paired([1 - steps / self.steps(self.best_constant) for steps in self.arms["adaptive"]["steps"]])

    @property
    def reaches_goal(self) -> bool:
        """Whether the adaptive schedule saves enough steps at no loss."""
        return self.saved.mean >= GOAL and self.lost("adaptive", self.best_constant).mean <= MARGIN

    @property
    def best_constant(self) -> str:
        """The largest constant batch that loses at most the margin beside the best one."""
        names = [f"constant {batch}" for batch in CONSTANT]
        known = [name for name in names if None not in self.arms[name]["losses"]]
        best = min(known, key=lambda name: statistics.fmean(self.arms[name]["losses"]))
        return [name for name in known if self.lost(name, best).mean <= MARGIN][-1]


def cases(store: Store) -> list[Case]:
    """All that were done, ratio by ratio."""
    found = [
        Case(done.arguments["task_name"], done.arguments["kind"], ratio, done.result["arms"] | arms)
        for done in store.read("schedules")
        for ratio, arms in done.result["of_ratio"].items()
    ]
    return sorted(found, key=lambda case: (case.ratio, case.kind, case.task))


def beside_constant(store: Store) -> Rows:
    """Steps that the adaptive schedule saves beside the best constant batch, and what it loses."""
    head = ["ratio", "optimizer", "task", "best constant batch", "its steps", "adaptive steps", "fewer steps, %"]
    head += ["units lost beside it, %", f"p of {MARGIN:.0%} or more"]
    rows = [[*head, *(f"units lost by {name}, %" for name in EXTREMES)]]
    for case in cases(store):
        best = case.best_constant
        lost = case.lost("adaptive", best)
        row = [case.ratio, case.kind, case.task, best.split()[-1], f"{case.steps(best):.0f}"]
        row += [f"{case.steps('adaptive'):.0f}", case.saved.in_percent(), lost.in_percent()]
        row.append(f"{p_above([-math.log2(1 - MARGIN) - v for v in lost.values]):.2g}")
        rows.append(row + [case.lost(name, best).in_percent() for name in EXTREMES])
    return rows


def equal_steps(store: Store) -> Rows:
    """Units that each arm of as many steps as the adaptive schedule loses beside the best constant batch."""
    rows = [["ratio", "optimizer", "task", "steps", *(f"units lost by {name}, %" for name in ("adaptive", *RAMPS))]]
    for case in cases(store):
        lost = [case.lost(name, case.best_constant).in_percent() for name in ("adaptive", *RAMPS)]
        rows.append([case.ratio, case.kind, case.task, f"{case.steps('adaptive'):.0f}", *lost])
    return rows


def beside_ramps(store: Store) -> Rows:
    """Units that each arm of as many steps as the adaptive schedule wastes beside it, with the p-value of none."""
    rows = [["ratio", "optimizer", "task", *(f"units lost by {name}, %" for name in RAMPS)]]
    for case in cases(store):
        lost = [case.lost(name, "adaptive") for name in RAMPS]
        rows.append([case.ratio, case.kind, case.task, *(f"{e.in_percent()}, p = {e.p:.2g}" for e in lost)])
    return rows


def overall(store: Store) -> Rows:
    """Means over cases, with their interval over cases: a further task is such a case."""
    head = ["ratio", "optimizer", "cases", "fewer steps than the best constant batch, %", "units lost beside it, %"]
    head += [f"cases of {GOAL:.0%} fewer steps at no loss"]
    head += [*(f"units lost by {name} beside adaptive, %" for name in RAMPS), "cases where one of these is better"]
    rows, known = [head], cases(store)
    for ratio, kind in itertools.product(sorted({case.ratio for case in known}), ("all", *OPTIMIZERS)):
        some = [case for case in known if case.ratio == ratio and kind in ("all", case.kind)]
        if len(some) < 3:
            continue
        row = [ratio, kind, str(len(some)), paired([case.saved.mean for case in some]).in_percent()]
        row.append(paired([case.lost("adaptive", case.best_constant).mean for case in some]).in_percent())
        row.append(str(sum(case.reaches_goal for case in some)))
        lost = {name: [case.lost(name, "adaptive") for case in some] for name in RAMPS}
        for of_one in lost.values():
            better, worse = (sum(each.p < CERTAIN and sign * each.mean > 0 for each in of_one) for sign in (-1, 1))
            mean = paired([each.mean for each in of_one])
            row.append(f"{mean.in_percent()}; better in {better}, worse in {worse}")
        is_better = [any(e.p < CERTAIN and e.mean < 0 for e in of_case) for of_case in zip(*lost.values(), strict=True)]
        rows.append([*row, str(sum(is_better))])
    return rows
