"""Answers of the study of reinforcement learning: what the critical batch follows, beside the noise of prompts."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from evidence.sums import PromptNoise
from evidence.work import Store

DRAWS = 200
"""Of the bootstrap over seeds."""
TRIED = torch.logspace(0, 6, 1201)
"""Critical batches."""
GROUP = 8
"""Completions of a prompt where samples are reused."""


@dataclass(frozen=True)
class Trend:
    """The critical batch against another number, such as completions to a prompt.

    Attributes:
        critical: by this number: N_crit in rollouts, with its 95 % interval.
        slope: of the log of N_crit over the log of the number.
        low: lower end of its 95 % interval, from a bootstrap over seeds.
        high: upper end.
    """

    critical: Mapping[int, tuple[float, float, float]]
    slope: float
    low: float
    high: float


Sweep = Sequence[tuple[float, Sequence[Sequence[float | None]]]]
"""Of each batch: its rollouts, and the steps to the target, [rates, seeds]. Seeds begin with the same weights."""


def trend(sweeps: Mapping[int, Sweep], *, draws: int = DRAWS) -> Trend:
    """Fit the critical batch of each sweep, and how it follows the number that sweeps differ in."""
    rng = random.Random(0)
    n_seeds = min(len(steps[0]) for sweep in sweeps.values() for _, steps in sweep)
    found = {x: critical(sweep, range(n_seeds)) for x, sweep in sweeps.items()}
    again = []
    for _ in range(draws):
        seeds = rng.choices(range(n_seeds), k=n_seeds)
        again.append({x: critical(sweep, seeds) for x, sweep in sweeps.items()})
    ends = {x: _middle([drawn[x] for drawn in again]) for x in sweeps}
    return Trend({x: (found[x], *ends[x]) for x in sweeps}, _slope(found), *_middle([*map(_slope, again)]))


def critical(sweep: Sweep, seeds: Sequence[int]) -> float:
    """N_crit of one sweep, each batch at its best rate: of all that are tried, that of the least squares of logs."""
    needed = {rollouts: rollouts * fewest(steps, seeds) for rollouts, steps in sweep}
    known = {rollouts: math.log(units) for rollouts, units in needed.items() if math.isfinite(units)}
    rest = torch.tensor([*known.values()]) - (torch.tensor([*known]) / TRIED[:, None]).log1p()
    return float(TRIED[rest.var(1).argmin()])


def fewest(steps: Sequence[Sequence[float | None]], seeds: Sequence[int]) -> float:
    """The median over seeds at the rate where it is least: a policy that is stuck for ever does not spoil it."""
    return min(statistics.median([math.inf if row[k] is None else row[k] or 1e-3 for k in seeds]) for row in steps)


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """Ends of the middle 95 %."""
    ordered = sorted(values)
    return ordered[int(0.025 * len(ordered))], ordered[-1 - int(0.025 * len(ordered))]


def _slope(critical: Mapping[int, float]) -> float:
    x, y = ([math.log(value) for value in values] for values in (critical.keys(), critical.values()))
    return statistics.linear_regression(x, y).slope


def sweeps(store: Store) -> dict[tuple[str, str, str], dict[int, Sweep]]:
    """By reward, optimizer and what sweeps differ in, "group" or "reuse": its sweeps."""
    found: dict[tuple[str, str, str], dict[int, list[tuple[float, Sequence[Sequence[float | None]]]]]] = {}
    for done in store.read("rl"):
        a, point = done.arguments, (done.arguments["rollouts"], done.result["steps"])
        if a["reuse"] == 1:
            found.setdefault((a["reward"], a["optimizer"], "group"), {}).setdefault(a["group"], []).append(point)
        if a["group"] == GROUP:
            found.setdefault((a["reward"], a["optimizer"], "reuse"), {}).setdefault(a["reuse"], []).append(point)
    return {key: {x: sorted(s, key=lambda p: p[0]) for x, s in of.items() if len(s) > 2} for key, of in found.items()}


def averages(store: Store) -> dict[tuple[str, str], dict[str, float]]:
    """By reward and optimizer: means over trainings and their points of each part of the noise."""
    found = {}
    for done in store.read("rl-noise"):
        points = [point for training in done.result["trainings"] for point in training]
        key = done.arguments["reward"], done.arguments["optimizer"]
        if points:  # a training may be too short for a reading
            found[key] = {name: statistics.fmean(point[name] for point in points) for name in points[0]}
    return found


def critical_batches(store: Store, draws: int = DRAWS) -> list[list[str]]:
    """The critical batch of each sweep in rollouts, with what it follows; B_simple averaged over a run beside it."""
    rows = [
        ["reward", "optimizer", "against", "N_crit in rollouts at each", "exponent", "B_simple × group", "exponent"]
    ]
    noise = averages(store)
    for (reward, optimizer, what), found in sweeps(store).items():
        if len(found) < 2:
            continue
        line = trend(found, draws=draws)
        cells = [f"{x}: {c:.0f} [{low:.0f}, {high:.0f}]" for x, (c, low, high) in line.critical.items()]
        row = [reward, optimizer, what, ", ".join(cells), f"{line.slope:.2f} [{line.low:.2f}, {line.high:.2f}]"]
        simple = {}
        if what == "group" and (reward, optimizer) in noise:
            simple = {x: x * PromptNoise(**noise[reward, optimizer]).b_simple(x) for x in found}
        row += [", ".join(f"{x}: {b:.0f}" for x, b in simple.items()), f"{_slope(simple):.2f}" if simple else ""]
        rows.append(row)
    return rows


def rollouts_needed(store: Store, draws: int = DRAWS) -> list[list[str]]:
    """Rollouts until the target at each batch, at its best rate: medians over seeds, with 95 % intervals."""
    rows: list[list[str]] = []
    rng = random.Random(0)
    for (reward, optimizer, what), found in sweeps(store).items():
        batches = sorted({batch for sweep in found.values() for batch, _ in sweep})
        head = ["reward", "optimizer", "against", *(f"{batch} a step" for batch in batches)]
        rows = rows or [head]
        for x, sweep in sorted(found.items()):
            cells = {}
            for batch, steps in sweep:
                seeds = range(len(steps[0]))
                drawn = [fewest(steps, rng.choices(seeds, k=len(seeds))) for _ in range(draws)]
                low, high = (f"{batch * end:,.0f}" for end in _middle(drawn))
                cells[batch] = f"{batch * fewest(steps, seeds):,.0f} [{low}, {high}]"
            rows.append([reward, optimizer, f"{what} {x}", *(cells.get(batch, "–") for batch in batches)])
    return rows or [[]]


def prompt_noises(store: Store) -> list[list[str]]:
    """The completions' share of tr Σ averaged over a run, exactly, and sonde's over it at single points."""
    rows = [
        [
            "reward",
            "optimizer",
            "group",
            "share of completions",
            "sonde's over the exact one",
            "B_simple in its interval",
        ]
    ]
    noise = averages(store)
    for done in store.read("rl-noise"):
        reward, optimizer = done.arguments["reward"], done.arguments["optimizer"]
        if (reward, optimizer) not in noise:
            continue
        average, first = PromptNoise(**noise[reward, optimizer]), done.result["trainings"][0]
        for group in sorted({r["group"] for r in done.result["readings"]}):
            ratios, inside = [], []
            for r in (r for r in done.result["readings"] if r["group"] == group):
                exact = PromptNoise(**first[r["point"]])
                ratios.append(f"{r['completions_share'] / exact.completions_share(group):.2f}")
                inside.append((r["low"] or 0.0) <= exact.b_simple(group) <= (r["high"] or math.inf))
            share = f"{average.completions_share(group):.0%}"
            rows.append([reward, optimizer, str(group), share, ", ".join(ratios), f"{sum(inside)} of {len(inside)}"])
    return rows
