"""The words of a decision: one sentence to act on, what it rests on, and the next command."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.decision.facts import FROM_HERE_ON, RUN_LIKE_THIS, Facts, Scope
from sonde.decision.law import Range
from sonde.decision.plans import Plan
from sonde.decision.proxy import PUBLISHED, factor_in_words
from sonde.decision.time_curve import nearly_whole
from sonde.wording import capital, in_units, number, percent, plural, units

if TYPE_CHECKING:
    from sonde.decision.decide import Advice, Kind

BADGES: Mapping[Kind, str] = {
    "wait": "No verdict yet",
    "keep": "Keep the batch",
    "larger": "Take a larger batch",
    "smaller": "Take a smaller batch",
    "reshape": "Take other micro-batches",
    "time": "Time it first",
}


def of_waiting(facts: Facts) -> tuple[str, str, str, str]:
    """The sentence, the reason, the next command and what to wait for, where nothing can be decided yet."""
    size = "" if facts.batch is None else f" on the batch of {units(nearly_whole(facts.batch), facts.unit)}"
    trains = "Train on" if facts.n_steps is not None else "Measure on"
    wait = facts.wait if facts.wait and facts.batch is not None else ""
    then = capital(wait) or (trains if facts.batch is not None else "Pass batch=")
    said = [capital(facts.why_none), *[then] * (facts.now.high != 0)]
    return f"No verdict yet{size}.", f"{'. '.join(said)}.", "", wait


def sentence(facts: Facts, advice: Mapping[str, Advice]) -> str:
    """What to do. Where there are two scopes, a second sentence joins the next run to what is left of this one."""
    (scope, lead), *rest = advice.items()
    here = rest[0][1] if rest else None
    this_run = f"the run {facts.name}" if facts.is_of_several else "this run"
    if lead.best is not None:
        begins = "Start the next run with" if scope == RUN_LIKE_THIS else "From here on, take"
        said = f"{begins} {_taken(lead, facts.unit)}"
        if here is None:
            return f"{said}."
        if here.best is None:
            return f"{said}. {capital(this_run)} itself is best finished as it is."
        if here.best.whole_batch == lead.best.whole_batch:
            return f"{said}. Change {this_run} too, from here on."
    elif lead.maybe is not None:
        said = f"Time it first: {_in_doubt(lead.maybe, lead.present, facts)}"
    else:
        size = units(lead.present.whole_batch, facts.unit) + (" in the next run" if here and here.best else "")
        said = f"Keep the batch of {size}: {_why_kept(lead, facts)}"
    if here is None or here.best is None:
        return f"{said}."
    return f"{said}. From here on in {this_run}, take {_taken(here, facts.unit)}."


def steps_to_train(plan: Plan, lead: Advice) -> Iterator[str]:
    """For how many steps another batch is to be trained: the middle of the range falls short in half of all runs."""
    if plan.whole_batch != lead.present.whole_batch and not math.isinf(plan.steps.high):
        steps, as_now = plural(math.ceil(plan.steps.high), "step"), plural(round(lead.scope.steps), "step")
        yield f"{steps} learn what {as_now} do now, at the upper end of the range: train that long, schedules too"


def without_rate(why: str) -> str:
    """That a rate is to be found by trying, and why; empty where a rule gives it."""
    return f" Try rates for it: {why}." if why else ""


def _taken(advice: Advice, unit: str) -> str:
    """The plan to take, with its costs over those of the present plan, which are of as much training."""
    plan, now = advice.best, advice.present
    assert plan is not None
    size = f"a batch of {units(plan.whole_batch, unit)}"
    on = f" on {ranks(plan.ranks)}" if plan.ranks != now.ranks else ""
    if plan.whole_batch == now.whole_batch:
        micro = (
            f"the batch of {units(now.whole_batch, unit)} cut into micro-batches of {plan.micro_batch:,} in place of"
        )
        return f"{micro} {now.micro_batch:,}{on}: it takes {part_in_words(plan.time)} the time"
    steps, units_ratio = plan.steps.over(now.steps), plan.units.over(now.units)
    needs = f"{part_in_words(steps)} the steps and {part_in_words(units_ratio)}"
    takes = f"{'On ' + ranks(plan.ranks) + ', it' if on else 'It'} takes {part_in_words(plan.time)} the time"
    return f"{size}: it needs {needs} the {unit}. {takes}"


def _in_doubt(plan: Plan, now: Plan, facts: Facts) -> str:
    """A plan that is better or worse by what was not timed: other micro-batches, or the optimizer's update alone."""
    size = f"a batch of {units(plan.whole_batch, facts.unit)}"
    of_now = f" of {now.whole_batch:,}"
    if plan.whole_batch == now.whole_batch:
        size, of_now = f"{size} in micro-batches of {plan.micro_batch:,}", ""
    timed = [each.micro_batch for each in facts.curve.timings] if facts.curve else [now.micro_batch]
    first, second = part_in_words(plan.better), part_in_words(plan.worse)
    if min(timed) <= plan.micro_batch <= max(timed):
        is_first, is_second = "the optimizer's update takes much of a step", "it takes none"
        is_turned = plan.accumulation < now.accumulation
    else:
        is_first, is_second = "this device is not full", "it is"
        is_turned = plan.micro_batch < now.micro_batch
    if is_turned:
        first, second = second, first
    return f"{size} takes {first} the time{of_now} if {is_first}, and {second} that time if {is_second}"


def _why_kept(lead: Advice, facts: Facts) -> str:
    if not lead.may_be_better:
        return "no other saves a tenth of the time"
    low, high = lead.scope.critical.low, lead.scope.critical.high
    return f"no other is sure to be better while B_crit is only known to be {in_units(None, low, high, facts.unit)}"


def reason(facts: Facts, advice: Mapping[str, Advice]) -> str:
    """The noise scales, and the critical batch sizes that follow."""
    return " ".join(
        f"{capital(name)}, B_crit is {each.scope.critical.in_words(facts.unit)}: {_whence(each.scope, facts.unit)}."
        for name, each in advice.items()
    )


def _whence(scope: Scope, unit: str) -> str:
    """Where B_crit comes from."""
    known, factor = scope.known, scope.factor
    if factor is None:
        return "measured by branches"
    ends = f"{number(factor.low, 2)} – {number(factor.high, 2)}"
    of_study = ends if factor.median is None else f"{number(factor.median, 2)} [{ends}]"
    return f"the noise scale, {in_units(known.ratio, known.low, known.high, unit)}, times {of_study}"


def command(logs: Sequence[Path], facts: Facts, *, is_in_doubt: bool) -> str:
    """What to run next, to set what was decided, or to decide what is in doubt; empty without a log."""
    if not logs:
        return ""
    advise = f"sonde advise {shlex.join(map(str, logs))}"
    if not is_in_doubt:
        return advise
    launch = "python" if facts.ranks == 1 else f"torchrun --nproc-per-node {facts.ranks}"
    sizes = "--batch {batch}"
    if facts.curve is not None and facts.curve.is_of_trial:  # in which the script cut batches by itself
        sizes = "--micro-batch {micro_batch} --accumulation {accumulation}"
    return f"{advise} --try -- {launch} train.py {sizes} --out {{out}}"


def notes(facts: Facts, advice: Mapping[str, Advice], plan: Plan | None, ranks_at_most: int | None) -> Iterator[str]:
    """What the numbers rest on, in short: docs/advice.md has all of it."""
    (scope, lead), *_ = advice.items()
    yield from facts.notes
    if facts.batch_changed:
        yield "The batch changed during this run: advice is about what follows."
    if (factor := lead.scope.factor) is not None:
        yield factor_in_words(factor, facts.optimizer, facts.unit, from_here_on=scope == FROM_HERE_ON)
    if factor not in (None, PUBLISHED):
        yield (
            "Ranges of B_crit hold about 9 times in 10, where your training is like those of the study; steps of a "
            "single training scatter by a third beyond them. B_simple's 95 % interval is first made one of 90 %."
        )
    if facts.needs_batch:
        yield f"Micro-batches are not made smaller: {facts.needs_batch}."
    elif plan is not None and plan.batch < lead.present.batch:
        yield (
            f"A smaller batch is right only if the loss of one of the {facts.unit} does not depend on the others in "
            "its micro-batch. It does where advantages are normalised in each minibatch, with batch normalisation, and "
            "in contrastive losses: pass --least N, the smallest batch that such a loss needs."
        )
    if any(each.basis == "modelled" for each in lead.plans):
        yield "Times on other numbers of ranks are modelled: ranks wait for nothing."
    if any(each.basis == "bounds" for each in lead.plans):
        yield (
            "Two ends of a time are for a device that is not full, where a larger micro-batch takes as long, and for a "
            "full one, where it takes longer in proportion; or for all, and none, of a step that the optimizer's "
            "update may take. A trial tells which."
        )
    if facts.unit == "prompts":
        yield from _of_policies(facts)
    if ranks_at_most is None and facts.ranks == 1:
        yield "--ranks-at-most N says what more ranks would do, --batch N how to set a batch and its rate."


def _of_policies(facts: Facts) -> Iterator[str]:
    """What the study found of policies, and what this log says of prompts and completions."""
    if facts.completions_share is not None:
        yield (
            "Prompts or completions: twice the completions to each prompt would cut the noise of a step by "
            f"{percent(facts.completions_share / 2)}, twice the prompts by 50\N{NO-BREAK SPACE}%, both with twice the "
            "tokens."
        )
    yield "More prompts come first: groups of 16 completions needed 1.1 to 2.3 times the rollouts of groups of 4."
    yield "Reuse: with four updates on each batch, B_crit was 3 to 15 times as large, and the law does not hold."


# Parts of sentences.


def ranks(n: int) -> str:
    """A number of ranks."""
    return plural(n, "rank")


def part_in_words(known: Range) -> str:
    """A cost over the present one, as "68 % [62 – 75] of" or "1.4 [1.2 – 1.5] times".

    Example:
        >>> part_in_words(Range(0.68, 0.62, 0.75)), part_in_words(Range(None, 1.2, 2.0))
        ('68\N{NO-BREAK SPACE}% [62 – 75] of', '1.2 to 2 times')
    """
    is_part = (known.high if known.middle is None else known.middle) < 1.005
    low, middle, high = (
        None
        if end is None
        else number(end, 3 if 1 < end < 1.1 else 2)
        if not is_part
        else f"{100 * end:.0f}"
        if end >= 0.01
        else number(100 * end, 1)
        for end in (known.low, known.middle, known.high)
    )
    sign, of = ("\N{NO-BREAK SPACE}%", "of") if is_part else ("", "times")
    if low == high:
        return f"{high}{sign} {of}"
    return f"{low} to {high}{sign} {of}" if middle is None else f"{middle}{sign} [{low} – {high}] {of}"
