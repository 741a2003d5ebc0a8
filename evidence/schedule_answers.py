"""What the study of schedules found: steps that each saves, and what it loses."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evidence.schedules import CONSTANT
from evidence.work import Store
from sonde.stats.intervals import student_t_quantile

Rows = list[list[str]]
MARGIN = 0.1
"""No loss, said before the trainings ran: as good as with at most this part of the units less."""
RAMPS = ("doubling", "late switch", "Seesaw", "constant, equal steps")
EXTREMES = (f"constant {CONSTANT[0]}", f"constant {CONSTANT[-1]}")
HALF = "half of the units"


@dataclass(frozen=True)
class Paired:
    """A difference over seeds.

    Attributes:
        mean: of the differences.
        low: lower end of its 95 % interval, by Student's t.
        high: upper end.
        values: the difference of each seed.
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

        A difference of losses counts as many units as move the loss of the smallest constant batch by as much: it is
        trained for all units and for half of them, and its loss falls in between with the log of the units.
        """
        halved = statistics.fmean(self.differences(HALF, f"constant {CONSTANT[0]}"))
        return paired([1 - 0.5 ** (difference / halved) for difference in self.differences(arm, other)])

    def differences(self, arm: str, other: str) -> list[float]:
        """Of the losses of each seed."""
        losses = (self.arms[name]["losses"] for name in (arm, other))
        return [math.inf if a is None else a - b for a, b in zip(*losses, strict=True)]

    @property
    def saved(self) -> Paired:
        """Part of the best constant batch's steps that the adaptive schedule does without."""
        return paired([1 - steps / self.steps(self.best_constant) for steps in self.arms["adaptive"]["steps"]])

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
    extremes = [f"units lost by {name}, %" for name in EXTREMES]
    head = ["optimizer", "task", "best constant batch", "its steps", "adaptive steps", "fewer steps, %"]
    rows = [[*head, "units lost beside it, %", f"p of {MARGIN:.0%} or more", "with the usual rate", *extremes]]
    for case in cases(store):
        best = case.best_constant
        lost = case.lost("adaptive", best)
        row = [case.kind, case.task, best.split()[-1], f"{case.steps(best):.0f}", f"{case.steps('adaptive'):.0f}"]
        row += [case.saved.in_percent(), lost.in_percent(), f"{p_above([MARGIN - v for v in lost.values]):.2g}"]
        usual = "adaptive, usual rate"
        row.append(f"{case.steps(usual):.0f} steps, {case.lost(usual, best).in_percent()}")
        rows.append(row + [case.lost(name, best).in_percent() for name in EXTREMES])
    return rows


def beside_ramps(store: Store) -> Rows:
    """Units that each arm of as many steps as the adaptive schedule wastes beside it, with the p-value of none."""
    rows = [["optimizer", "task", "steps", *(f"units lost by {name}, %" for name in RAMPS)]]
    for case in cases(store):
        lost = [case.lost(name, "adaptive") for name in RAMPS]
        cells = [f"{each.in_percent()}, p = {each.p:.2g}" for each in lost]
        rows.append([case.kind, case.task, f"{case.steps('adaptive'):.0f}", *cells])
    return rows


def overall(store: Store) -> Rows:
    """The mean over cases, with its interval over cases: a further task is such a case."""
    known = cases(store)
    if len(known) < 3:
        return [[]]
    rows = [["what", "mean over cases, %", "cases", "of these above 0", "p"]]
    what: dict[str, list[float]] = {
        "fewer steps than the best constant batch": [case.saved.mean for case in known],
        "units lost beside the best constant batch": [case.lost("adaptive", case.best_constant).mean for case in known],
    }
    what |= {f"units lost by {arm} beside adaptive": [c.lost(arm, "adaptive").mean for c in known] for arm in RAMPS}
    for name, values in what.items():
        found = paired(values)
        rows.append([name, found.in_percent(), str(len(values)), str(sum(v > 0 for v in values)), f"{found.p:.2g}"])
    return rows
