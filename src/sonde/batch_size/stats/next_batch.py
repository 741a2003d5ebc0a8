"""Which batch size to take next: what each costs in steps, units, time and money, and the best for an aim."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sonde.batch_size.stats.critical_batch import Kind, batch_kind, relative_steps
from sonde.batch_size.stats.proxy import Range
from sonde.wording import number, plural

Aim = Literal["balanced", "fastest", "cheapest"]
WORTH = 0.9
"""A change is worth its trouble if it leaves no more than this part of what is to be saved."""
_SMALLEST, _LARGEST = -6, 10
"""Batches that are considered, as powers of two over the present one."""
_SHOWN = 4.0
"""Batches further from B_crit than so many times are not considered, where the aim does not ask for them."""
_NEAR, _TRIED = 50, 4000
"""Batches that are tried on each side of one that ranks cannot share, and numbers that are tried as divisors."""
HOUR = 3600.0


@dataclass(frozen=True)
class Present:
    """A training as it is.

    Attributes:
        batch: units of one optimizer step.
        steps: optimizer steps, for which others are sought that learn as much.
        pieces: micro-batches of one step on all data-parallel ranks.
        ranks: data-parallel ranks.
        units_per_second: on all of them; None where it is not known.
        cost_per_hour: of all of them; None where it is not known.
        ranks_at_most: how many there may be.
    """

    batch: float
    steps: float
    pieces: float = 1.0
    ranks: int = 1
    units_per_second: float | None = None
    cost_per_hour: float | None = None
    ranks_at_most: int = 1


@dataclass(frozen=True)
class Plan:
    """The same training at one batch size.

    Attributes:
        batch: units of one optimizer step.
        ranks: data-parallel ranks that it uses.
        accumulation: micro-batches that each rank takes one after the other in a step.
        micro_batch: units of each.
        steps: optimizer steps.
        units: of all steps.
        rank_steps: micro-batches that all ranks take together, which the price follows.
        seconds: of training; None where throughput is not known.
        money: None where throughput or price is not known.
    """

    batch: float
    ranks: int
    accumulation: int
    micro_batch: int
    steps: Range
    units: Range
    rank_steps: Range
    seconds: Range | None
    money: Range | None

    @property
    def whole_batch(self) -> int:
        """The batch that can be set: the present one, as logged, may be an average."""
        return self.accumulation * self.ranks * self.micro_batch


@dataclass(frozen=True)
class Advice:
    """Which batch size to take.

    Attributes:
        kind: of the verdict on the present batch.
        critical: the critical batch size that all costs rest on.
        plans: the batch sizes that were considered, by size.
        present: the plan of the batch as it is.
        best: the one to take; None where no change is worth it.
        elsewhere: one near B_crit that saves neither time nor money on the ranks that there are; None where `best` is
            not, or the present batch may be right.
        reason: why no change is worth it; empty where one is.
    """

    kind: Kind
    critical: Range
    plans: tuple[Plan, ...]
    present: Plan
    best: Plan | None
    elsewhere: Plan | None
    reason: str


def advise_batch(
    present: Present,
    critical: Range,
    *,
    aim: Aim = "balanced",
    budget: float | None = None,
    batch: float | None = None,
) -> Advice:
    """What other batch sizes would cost, and the best of them.

    Args:
        present: the training as it is.
        critical: the critical batch size.
        aim: "balanced" for as few steps and units as can be had together, near the critical batch size, among batches
            that save time or money; "fastest" for the shortest time; "cheapest" for the least time of all ranks
            together.
        budget: the most that the training may cost. The fastest of the batches that keep it for certain is taken.
        batch: one that is considered too.

    Raises:
        ValueError: for an aim that needs a throughput or a price that is not known, and a budget that no batch keeps.

    Reference:
        The law S = S_min (1 + B_crit/B): McCandlish et al. 2018, arXiv:1812.06162, equation 2.11.
    """
    kind = batch_kind(present.batch, critical)
    # Where the middle is not known, the end that is nearer to the present batch is certain.
    middle = critical.middle if critical.middle is not None else critical.high if kind == "too_large" else critical.low
    is_balanced = aim == "balanced" and budget is None
    sizes = {*_candidates(present, middle, is_balanced=is_balanced), batch or present.batch}
    by_batch = {plan.batch: plan for plan in (plan_of(present, size, critical) for size in sizes)}
    plans = tuple(by_batch[size] for size in sorted(by_batch))
    now = next(plan for plan in plans if plan.batch == present.batch)
    if aim == "fastest" and present.units_per_second is None:
        raise ValueError("the fastest batch needs the throughput, which the log lacks: pass --units-per-second")
    elsewhere = None
    if budget is not None:
        best = _best(_within(budget, plans), now, lambda plan: _time(plan).high)
        reason = "it is the fastest that keeps the budget"
    elif aim != "balanced":
        wanted: Callable[[Plan], Range] = _time if aim == "fastest" else lambda plan: plan.rank_steps
        safe = [plan for plan in plans if wanted(plan).high <= wanted(now).high]
        best = _best(safe, now, lambda plan: wanted(plan).likely)
        reason = f"no other batch is sure to be {aim[:-3]}er by a tenth"
    elif kind in ("too_small", "too_large"):
        nearest = sorted(plans, key=lambda plan: abs(math.log(plan.batch / middle)))
        nearer = nearest[: nearest.index(now)]
        best = next((plan for plan in nearer if _is_worth_it(plan, now, plans)), None)
        elsewhere = nearest[0] if best is None and nearer else None
        reason = "it is about right" if elsewhere is None else _PAYS[kind]
    else:
        best, reason = None, "it is about right" if kind == "about_right" else "no other is sure to be better"
    return Advice(kind, critical, plans, now, best, elsewhere, "" if best else reason)


_PAYS: dict[Kind, str] = {
    "too_small": "it saves time only on more ranks, or where larger micro-batches take hardly more time",
    "too_large": "it saves time only where smaller micro-batches take less time, as on a busy device",
}
"""Where a batch near B_crit pays that saves nothing on the ranks that there are."""


def _is_worth_it(plan: Plan, now: Plan, plans: Sequence[Plan]) -> bool:
    """Whether a plan saves a tenth of the time, or of the time of all ranks together, and no other beats it in both."""

    def costs(each: Plan) -> tuple[float, float]:
        return _time(each).likely, each.rank_steps.likely

    time, of_ranks = costs(plan)
    is_beaten = any(other_time < time and other < of_ranks for other_time, other in map(costs, plans))
    return not is_beaten and (time <= WORTH * costs(now)[0] or of_ranks <= WORTH * costs(now)[1])


def _candidates(present: Present, middle: float, *, is_balanced: bool) -> list[float]:
    """Powers of two times the present batch: near B_crit; for other aims, from one micro-batch to one on each rank."""
    batch, of_piece = present.batch, present.batch / present.pieces
    reached = [batch / 2, batch * 2]
    if 0 < middle < math.inf:
        reached += [middle / _SHOWN, middle * _SHOWN]
    if not is_balanced:
        reached += [of_piece, of_piece * present.ranks_at_most]
    low, high = min(reached), max(reached)
    sizes = (batch * 2.0**k for k in range(_SMALLEST, _LARGEST + 1))
    return [size for size in sizes if size == batch or (low <= size <= high and size >= 1)]


def plan_of(present: Present, batch: float, critical: Range) -> Plan:
    """What a training costs at another batch size, if it learns as much.

    Micro-batches stay as large as they are, or become up to half as small where that lets more ranks share the batch. A
    micro-batch takes the same time on any number of ranks: ranks wait for nothing, and the optimizer's step takes no
    time. So a step takes as long as its accumulation. A smaller micro-batch takes as long as a larger one: a device is
    not faster with less to do.

    Args:
        present: the training as it is.
        batch: units of one optimizer step, instead. The plan has the nearest batch that ranks can share.
        critical: the critical batch size.
    """
    micro, pieces = max(round(present.batch / present.pieces), 1), present.pieces * (batch / present.batch)
    whole = micro * round(pieces)
    # A logged batch is an average, which short batches have lowered a little, and so are its multiples.
    if batch != present.batch and not (pieces.is_integer() and abs(whole - batch) < 0.05 * batch):
        whole = max(round(batch), 1)
    accumulation, ranks, micro = split = _split(whole, micro, present.ranks_at_most)
    batch = batch if batch == present.batch else math.prod(split)
    steps = _in_order(critical, lambda c: present.steps * relative_steps(batch, present.batch, c))
    rank_steps, seconds, money = steps.times(accumulation * ranks), None, None
    if present.units_per_second:
        seconds_of_piece = present.batch / present.units_per_second * present.ranks / present.pieces
        seconds = steps.times(accumulation * seconds_of_piece)
        if present.cost_per_hour is not None:
            money = rank_steps.times(seconds_of_piece / HOUR * present.cost_per_hour / present.ranks)
    return Plan(batch, ranks, accumulation, micro, steps, steps.times(batch), rank_steps, seconds, money)


def _split(batch: int, micro: int, ranks_at_most: int) -> tuple[int, int, int]:
    """Accumulation, ranks and micro-batch of a batch; of the nearest one, if it cannot be split well.

    A split is good if its accumulation is at most twice as long as it would be if all numbers divided; that of another
    batch must be better. The shortest accumulation is taken, with the fewest ranks.
    """
    of_all = micro * min(ranks_at_most, math.ceil(batch / micro))
    near = (size for off in range(_NEAR) for size in (batch - off, batch + off) if size > 0)
    for size in (*near, of_all * math.ceil(batch / of_all)):  # which can always be split
        largest = min(micro, size)
        micros = [n for n in range(largest, (largest - 1) // 2, -1)[:_TRIED] if size % n == 0]
        splits = [(size // n // ranks, ranks, n) for n in micros for ranks in [_divisor(size // n, ranks_at_most)]]
        if splits and min(splits)[0] <= (2 if size == batch else 1.25) * math.ceil(size / largest / ranks_at_most):
            break
    return min(splits)


def _divisor(number: int, most: int) -> int:
    """The largest divisor that is at most so much; 1 if none is near that."""
    return next((n for n in range(min(most, number), 0, -1)[:_TRIED] if number % n == 0), 1)


def _in_order(critical: Range, cost: Callable[[float], float]) -> Range:
    """A cost, which rises or falls with the critical batch size, between its values at both ends."""
    low, high = sorted((cost(critical.low), cost(critical.high)))
    return Range(None if critical.middle is None else cost(critical.middle), low, high)


def _time(plan: Plan) -> Range:
    """In micro-batches: each takes the same time on any number of ranks."""
    return plan.steps.times(plan.accumulation)


def _best(allowed: Sequence[Plan], now: Plan, cost: Callable[[Plan], float]) -> Plan | None:
    """The plan that costs least; None for the present one, if that is allowed and no other saves a tenth."""
    best = min(allowed, key=cost)
    return None if now in allowed and cost(best) > WORTH * cost(now) else best


def _within(budget: float, plans: Sequence[Plan]) -> list[Plan]:
    """The plans that cost at most so much at the worse end.

    Raises:
        ValueError: when prices are not known, or no plan does.
    """
    most = {plan.batch: plan.money.high for plan in plans if plan.money is not None}
    if not most:
        raise ValueError("a budget needs prices: pass --cost-per-hour, and --units-per-second if the log lacks it")
    if min(most.values()) > budget:
        least = number(min(most.values()))
        raise ValueError(f"no batch keeps the budget of {budget:g}: the cheapest costs up to {least}; raise --budget")
    return [plan for plan in plans if most[plan.batch] <= budget]


# In words.


def part_in_words(known: Range, present: float) -> str:
    """A cost over the present one, as "68 % [62 – 75] of" or "1.4 [1.2 – 1.5] times".

    Example:
        >>> part_in_words(Range(68.0, 62.0, 75.0), 100.0), part_in_words(Range(None, 120.0, 200.0), 100.0)
        ('68 % [62 – 75] of', '1.2 to 2 times')
    """
    ends = [end / present for end in (known.low, known.high)]
    middle = None if known.middle is None else known.middle / present
    above = (ends[1] if middle is None else middle) > 1
    low, high = (number(end, 2) if above else f"{100 * end:.0f}" for end in ends)
    words = "times" if above else "of"
    unit = "" if above else " %"
    if middle is None:
        return f"{low} to {high}{unit} {words}"
    shown = number(middle, 2) if above else f"{100 * middle:.0f}"
    return f"{shown}{unit} {words}" if low == high else f"{shown}{unit} [{low} – {high}] {words}"


def in_words(advice: Advice, unit: str) -> str:
    """What to do, in a sentence without its beginning and its end."""
    best, now, elsewhere = advice.best, advice.present, advice.elsewhere
    if best is not None:
        costs = [
            f"{part_in_words(cost, at_present.high)} the {name}"
            for name, cost, at_present in (("time", best.seconds, now.seconds), ("money", best.money, now.money))
            if cost is not None and at_present is not None
        ]
        ranks = plural(best.ranks, "rank") + (f" in place of {now.ranks:,}" if best.ranks < now.ranks else "")
        on_ranks = f". On {ranks}, it takes {' and '.join(costs)}" if costs else ""
        return f"try a batch of {number(best.batch, 4)} {unit}: it needs {_needs(best, now, unit)}{on_ranks}"
    kept = f"keep the batch of {number(now.batch, 4)} {unit}"
    if elsewhere is None:
        return f"{kept}: {advice.reason}"
    ranks, size, needs = plural(now.ranks, "rank"), number(elsewhere.batch, 4), _needs(elsewhere, now, unit)
    if elsewhere.batch < now.batch:
        return f"try a batch of {size} {unit}, or keep {number(now.batch, 4)}: it needs {needs}; {advice.reason}"
    return f"{kept} on {ranks}: {size} would need {needs}; {advice.reason}"


def in_short(unit: str, advised: Mapping[str, Advice]) -> str:
    """One sentence of advice, for the end of a run.

    Args:
        unit: plural name of the unit.
        advised: "for a run like this one" and "from here on".

    Example:
        >>> advice = advise_batch(Present(128, 1.0), Range(140.0, 110.0, 170.0))
        >>> in_short("rows", {RUN_LIKE_THIS: advice, FROM_HERE_ON: advice})
        'for a run like this one and from here on, keep the batch of 128 rows: it is about right'
    """
    said: dict[str, list[str]] = {}
    for scope, advice in advised.items():
        said.setdefault(in_words(advice, unit), []).append(scope)
    return "; ".join(f"{' and '.join(scopes)}, {text}" for text, scopes in said.items())


def _needs(plan: Plan, now: Plan, unit: str) -> str:
    """Steps and units of a plan over those of the present one."""
    steps, units = part_in_words(plan.steps, now.steps.high), part_in_words(plan.units, now.units.high)
    return f"{steps} the steps and {units} the {unit}"


def leading(advised: Mapping[str, Advice]) -> str:
    """What decides, of the run and of what follows: the first whose batch is too small or too large, or else is judged.

    Args:
        advised: at least one piece of advice, by what it is about.
    """
    return min(
        advised,
        key=lambda name: (advised[name].kind not in ("too_small", "too_large"), advised[name].kind == "unknown"),
    )


RUN_LIKE_THIS, FROM_HERE_ON = "for a run like this one", "from here on"
"""What advice is about."""
