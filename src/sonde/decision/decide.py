"""The decision: keep the batch, take another one, time it first, or wait. One function for all who speak of it.

    facts → B_crit, for each scope → plans → advice for each scope → one decision, its reason and its next command

The exit line of a run, the report, `sonde watch`, `advise`, `compare` and `branch` print what `decide` returns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sonde.decision import words
from sonde.decision.facts import RUN_LIKE_THIS, Facts, Scope
from sonde.decision.law import Range
from sonde.decision.plans import Plan, Present, plan_of, plans_of
from sonde.decision.rate import RateRow, rate_row, why_no_rule
from sonde.decision.time_curve import TimeCurve, Timing
from sonde.decision.trainers import SET_THEIR_RATES, in_trainer, trainer_named
from sonde.wording import number

Kind = Literal["wait", "keep", "larger", "smaller", "reshape", "time"]
"""Nothing can be said yet; no other is sure to be better; another batch; the same in other micro-batches; a trial of a
minute decides."""
Aim = Literal["balanced", "fastest", "cheapest"]
WORTH = 0.9
"""A change is worth its trouble if it leaves no more than this part of the time."""
_AS_FAST = 1.25
"""Of batches that take so many times the least time at most, the smallest is taken: it needs the fewest units, and asks
least of the law and of the rule of the rate."""
_FEWEST_LEFT = 30
"""Steps that a training must keep: a warm-up, and the averages of an optimizer, take some of them."""
_BEYOND = 1.5
"""A larger batch is worth more ranks up to so many times B_crit."""


@dataclass(frozen=True)
class Wanted:
    """What the user wants, and has.

    Attributes:
        aim: "balanced": nearly the least time, with as few units as that allows. "fastest": the least time. "cheapest":
            the least time of all ranks together.
        budget: the most that a whole training may cost.
        cost_per_hour: of all ranks of this run together.
        units_per_second: of all ranks of this run together; None: as logged.
        ranks_at_most: of the next run; None: as many as this one had.
        least: of the next run's batch, as the loss itself may need; None: any.
        batch: say how to set this batch; None: the one that is decided on.
        trainer: its name; None: as logged.
    """

    aim: Aim = "balanced"
    budget: float | None = None
    cost_per_hour: float | None = None
    units_per_second: float | None = None
    ranks_at_most: int | None = None
    least: float | None = None
    batch: float | None = None
    trainer: str | None = None

    def __post_init__(self) -> None:
        for name in ("budget", "cost_per_hour", "units_per_second", "ranks_at_most", "least", "batch"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} must be positive and finite, got {value:g}")
        if self.budget is not None and self.aim == "cheapest":
            raise ValueError("--budget takes the fastest batch that keeps it, got --aim cheapest: leave out one of two")
        if self.trainer is not None:
            trainer_named(self.trainer)


@dataclass(frozen=True)
class Advice:
    """What to do in one scope.

    Attributes:
        scope: what is known of B_crit.
        plans: all batches that were considered, by size.
        present: the plan of the batch as it is.
        best: the plan to take; None where no other is sure to be better.
        maybe: the plan that is better if the device is not full; None where `best` is not, or there is no such plan.
    """

    scope: Scope
    plans: tuple[Plan, ...]
    present: Plan
    best: Plan | None
    maybe: Plan | None

    @property
    def may_be_better(self) -> bool:
        """Whether another batch is better if B_crit lies at one end of its range."""
        return any(plan.time.low <= WORTH for plan in self.plans if plan is not self.present)


@dataclass(frozen=True)
class Change:
    """A batch to set.

    Attributes:
        scope: that it is for.
        plan: of it.
        how: the trainer is told, in lines.
        rates: of each group of the optimizer.
    """

    scope: str
    plan: Plan
    how: tuple[str, ...]
    rates: tuple[RateRow, ...]


@dataclass(frozen=True)
class Decision:
    """What to do with the batch size.

    Attributes:
        kind: of decision.
        badge: it, in two or three words.
        sentence: it, with what it saves; a second sentence joins it to what is left of this run.
        reason: the noise scale and the critical batch size that it rests on.
        command: what to run next; empty where nothing is to be run.
        wait: what would make the noise scale known better; empty where that would change nothing.
        facts: of the training.
        advice: for a run like this one, and from here on, as far as they are known.
        trainer: its name.
        changes: what to set, for the next run, and for what is left of this one where that is another batch; none where
            the batch is kept.
        notes: what the numbers rest on.
    """

    kind: Kind
    badge: str
    sentence: str
    reason: str
    command: str
    wait: str
    facts: Facts
    advice: Mapping[str, Advice]
    trainer: str
    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    @property
    def leading(self) -> Advice | None:
        """The advice for a run like this one, or from here on where its average is not known; None where one waits."""
        return next(iter(self.advice.values()), None)


def decide(facts: Facts, wanted: Wanted | None = None, *, logs: Sequence[Path] = ()) -> Decision:
    """What to do with the batch size of a training.

    Another batch is decided on if it takes less time at both ends of what is known, of B_crit and of the time of a
    step. If only the time of a step is in doubt, a trial decides.

    Args:
        facts: of the training; of several logs, as `pool` has joined them.
        wanted: by the user.
        logs: folders of the logs, for the next command; without one, there is none.

    Raises:
        ValueError: for an aim or a budget that needs what is not known, and a budget that no batch keeps.

    Example:
        >>> from sonde.stats.intervals import RatioInterval
        >>> known = RatioInterval("resolved", 330.0, 520.0, ratio=410.0)
        >>> decide(Facts("images", 64.0, known, optimizer="SGD (β = 0.9)"), Wanted(ranks_at_most=8)).sentence
        'From here on, take a batch of 512 images: it needs 24\N{NO-BREAK SPACE}% [15 – 43] of the steps and 2 \
[1.2 – 3.5] times the images. On 8 ranks, it takes 24\N{NO-BREAK SPACE}% [15 – 43] of the time.'
    """
    wanted = wanted or Wanted()
    trainer = trainer_named(wanted.trainer) if wanted.trainer else facts.trainer or "plain loop"
    if wanted.least is not None and facts.batch is not None and facts.batch < wanted.least:
        raise ValueError(
            f"--least {wanted.least:g} is more than the batch of this run, {number(facts.batch)}: start again with "
            "what the loss needs, and measure that"
        )
    if facts.why_none:
        said = words.of_waiting(facts)
        return Decision("wait", words.BADGES["wait"], *said, facts, {}, trainer, (), ())
    advice = {
        name: _advise(facts, scope, wanted)
        for name, scope in facts.scopes.items()
        if wanted.budget is None or name == RUN_LIKE_THIS
    }
    if not advice:
        why = "its batch changed" if facts.batch_changed else "its average noise scale is not known"
        raise ValueError(f"--budget is for a whole run like this one, and {why}: leave it out")
    lead = next(iter(advice.values()))
    changes = tuple(_changes(facts, advice, wanted.batch, trainer))
    kind = _kind(lead)
    return Decision(
        kind,
        words.BADGES[kind],
        words.sentence(facts, advice) + _of_rate(facts, trainer, advice),
        words.reason(facts, advice),
        words.command(logs, facts, is_in_doubt=kind == "time") if changes or kind == "time" else "",
        facts.wait if kind == "keep" and lead.may_be_better else "",
        facts,
        advice,
        trainer,
        changes,
        tuple(words.notes(facts, advice, changes[0].plan if changes else None, wanted.ranks_at_most)),
    )


def _changes(facts: Facts, advice: Mapping[str, Advice], asked: float | None, trainer: str) -> Iterator[Change]:
    """What to set, for each scope that takes another batch than those before; or the batch that the user asks about."""
    sizes = {0}
    for scope, found in advice.items():
        plan = found.best
        if asked is not None:
            plan = min(found.plans, key=lambda each: abs(math.log(each.batch / asked)))
        if plan is not None and plan.whole_batch not in sizes:
            sizes.add(plan.whole_batch)
            how = (*_how(facts, trainer, plan, asked), *words.steps_to_train(plan, found))
            yield Change(scope, plan, how, _rates(facts, trainer, plan, found.scope))
        if asked is not None:
            return


def _advise(facts: Facts, scope: Scope, wanted: Wanted) -> Advice:
    """The plans of a scope, and the best for what the user wants."""
    present, critical = _present(facts, scope, wanted), scope.critical
    plans = plans_of(present, critical)
    now = next(plan for plan in plans if plan.batch == present.batch)
    others = [plan for plan in plans if plan is not now]
    # A batch that the user asks about has a row, and is no candidate.
    asked = None if wanted.batch is None else plan_of(present, wanted.batch, critical, exact=True)
    if asked is not None and asked.batch not in {plan.batch for plan in plans}:
        plans = tuple(sorted((*plans, asked), key=lambda plan: plan.batch))
    again = plan_of(present, now.whole_batch, critical)  # the same batch, in other micro-batches or on other ranks
    if again is not None and again.whole_batch == now.whole_batch:
        others.append(again)
    others = [plan for plan in others if plan.batch >= (wanted.least or 0) and plan.steps.likely >= _FEWEST_LEFT]
    if wanted.aim == "fastest" and not present.has_clock:
        raise ValueError("the fastest batch needs the throughput, which the log lacks: pass --units-per-second")
    if wanted.budget is not None:
        within = _within(wanted.budget, [*others, now])
        fastest = min(within, key=lambda plan: plan.time.likely)
        return Advice(scope, plans, now, None if fastest is now else fastest, None)
    # At the worse end of the time of a step: what is better there is better at the other, too.
    costs = {plan: plan.worse.times(plan.ranks / now.ranks if present.by_rank_time else 1.0) for plan in others}
    best = _smallest_of_fast({plan: cost.likely for plan, cost in costs.items() if _is_better(cost)}, wanted.aim)
    if best is not None:
        plans = plans if best in plans else tuple(sorted((*plans, best), key=lambda plan: plan.batch))
        return Advice(scope, plans, now, best, None)
    # Only the time of a step is in doubt: a device that is not full favours a larger batch, a full one a smaller.
    in_doubt = [plan for plan in others if plan.basis == "bounds"]
    maybe = {plan: plan.better.likely for plan in in_doubt if _is_better(plan.better)}
    larger = {plan: cost for plan, cost in maybe.items() if plan.batch >= now.batch}
    return Advice(scope, plans, now, None, _smallest_of_fast(larger or maybe, wanted.aim))


def _is_better(cost: Range) -> bool:
    """Whether a cost over the present one is below 1 at both ends, and saves a tenth."""
    return cost.high < 1 and cost.likely <= WORTH


def _smallest_of_fast(costs: Mapping[Plan, float], aim: Aim) -> Plan | None:
    """The best of plans that are all better than the present one, by their costs; None if there is none."""
    most = (_AS_FAST if aim == "balanced" else 1.0) * min(costs.values(), default=0.0)
    return min((plan for plan, cost in costs.items() if cost <= most), key=lambda plan: plan.batch, default=None)


def _present(facts: Facts, scope: Scope, wanted: Wanted) -> Present:
    """The training as it is. Without a clock, one of its steps takes 1."""
    is_balanced = wanted.aim == "balanced" and wanted.budget is None
    micro, accumulation, ranks = facts.micro_batch, facts.accumulation, facts.ranks
    curve, batch = facts.curve or TimeCurve((Timing(micro, accumulation, ranks, 1.0),)), facts.batch or 1.0
    has_clock = facts.curve is not None or wanted.units_per_second is not None
    if wanted.units_per_second is not None:
        now, _ = curve.of_step(micro, accumulation, ranks)
        curve = curve.times(batch / wanted.units_per_second / now.likely)
    if wanted.cost_per_hour is not None and not has_clock:
        raise ValueError("--cost-per-hour needs the throughput, which the log lacks: pass --units-per-second too")
    return Present(
        batch=batch,
        steps=scope.steps,
        micro_batch=micro,
        accumulation=accumulation,
        ranks=ranks,
        ranks_at_most=wanted.ranks_at_most or ranks,
        curve=curve,
        has_clock=has_clock,
        cost_per_hour=wanted.cost_per_hour,
        least_micro_batch=micro if facts.needs_batch else 0.0,
        # Far beyond B_crit, more ranks bring less than they cost.
        most_on_more_ranks=_BEYOND * scope.critical.likely if is_balanced else math.inf,
        by_rank_time=wanted.aim == "cheapest",
    )


def _within(budget: float, plans: Sequence[Plan]) -> list[Plan]:
    """The plans that cost at most so much at the worse end.

    Raises:
        ValueError: when prices are not known, or no plan does.
    """
    priced = [plan for plan in plans if plan.money is not None]
    if not priced:
        raise ValueError("a budget needs prices: pass --cost-per-hour, and --units-per-second if the log lacks it")
    least = min(plan.money.high for plan in priced if plan.money is not None)
    if least > budget:
        raise ValueError(
            f"no batch keeps the budget of {budget:g}: the cheapest costs up to {number(least)}; raise --budget"
        )
    return [plan for plan in priced if plan.money is not None and plan.money.high <= budget]


def _kind(lead: Advice) -> Kind:
    if (best := lead.best) is not None:
        if best.whole_batch == lead.present.whole_batch:
            return "reshape"
        return "larger" if best.batch > lead.present.batch else "smaller"
    return "keep" if lead.maybe is None else "time"


def _how(facts: Facts, trainer: str, plan: Plan, asked: float | None) -> tuple[str, ...]:
    how = in_trainer(trainer, plan, unit=facts.unit, tokens=facts.tokens, completions=facts.completions)
    if asked in (None, plan.whole_batch):
        return how
    said = f"{asked:,.15g} does not split well into ranks and micro-batches: this sets {plan.whole_batch:,}"
    return (said, *how)


def _of_rate(facts: Facts, trainer: str, advice: Mapping[str, Advice]) -> str:
    """That the advised batch needs a rate that no rule gives; empty where one does."""
    others = [each.best for each in advice.values() if each.best and each.best.whole_batch != each.present.whole_batch]
    if not others or trainer in SET_THEIR_RATES:
        return ""
    why = [why for group in facts.settings if (why := why_no_rule(group))] or [""] * bool(facts.optimizer)
    return words.without_rate(next(iter(why), "the log does not say the optimizer"))


def _rates(facts: Facts, trainer: str, plan: Plan, scope: Scope) -> tuple[RateRow, ...]:
    """What the optimizer needs with the plan's batch; nothing where the trainer sees to that, or it is not known."""
    if trainer in SET_THEIR_RATES or not facts.optimizer:
        return ()
    batch, critical = facts.batch or 1.0, scope.critical
    return tuple(rate_row(group, plan.whole_batch, batch, critical) for group in facts.settings)
