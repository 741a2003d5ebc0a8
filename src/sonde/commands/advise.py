"""`sonde advise RUN`: the next batch size, its learning rate, and how to set both. It needs no torch."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import Positional, arg

from sonde.batch_size.stats.next_batch import HOUR, Advice, Aim, Plan, in_words, leading
from sonde.batch_size.stats.proxy import PUBLISHED, Range, factor_of
from sonde.batch_size.stats.rate_row import RateRow, rate_row
from sonde.commands.branch_result import print_table
from sonde.commands.trainer_flags import SET_THEIR_RATES, in_trainer, trainer_named
from sonde.evidence.answer import Row
from sonde.runs.advice import Logged, logged
from sonde.runs.reader import read_run
from sonde.runs.run import Run
from sonde.wording import count, number, percent, plural


@dataclass(frozen=True)
class AdviseOptions:
    """Say which batch size to take next, what it saves, which learning rate goes with it, and how to set it.

    Attributes:
        run: Folder of the run, or its records.jsonl.
        aim: balanced: as few steps and units as can be had together. fastest: the shortest time. cheapest: the least
            time of all ranks together.
        budget: The most that the training may cost. The fastest batch that keeps it is taken.
        cost_per_hour: Of all ranks of this run together, in any currency.
        units_per_second: Throughput of all ranks of this run together.
        ranks_at_most: Data-parallel ranks that the next run may use.
        batch: Say how to set this batch, in place of the best one.
        trainer: The trainer, such as transformers or Megatron.
        json: Print JSON.
    """

    run: Positional[Path]
    aim: Aim = "balanced"
    budget: Annotated[float | None, arg(metavar="MONEY", help_behavior_hint="(optional)")] = None
    cost_per_hour: Annotated[float | None, arg(metavar="MONEY", help_behavior_hint="(optional)")] = None
    units_per_second: Annotated[float | None, arg(metavar="N", help_behavior_hint="(default: as logged)")] = None
    ranks_at_most: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: as many as it had)")] = None
    batch: Annotated[float | None, arg(metavar="UNITS", help_behavior_hint="(optional)")] = None
    trainer: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: as logged)")] = None
    json: bool = False


@dataclass(frozen=True)
class Answer:
    """Everything that is advised.

    Attributes:
        logged: what the log says.
        words: a sentence for each thing that advice is about; none where it is too early.
        advice: the same, with all numbers.
        trainer: its name.
        batch: that `how` and `rates` are for; None where the present one is kept.
        how: to set it, in lines.
        rates: of each group of the optimizer.
        notes: what the numbers rest on.
    """

    logged: Logged
    words: Mapping[str, str]
    advice: Mapping[str, Advice]
    trainer: str
    batch: float | None
    how: tuple[str, ...]
    rates: tuple[RateRow, ...]
    notes: tuple[str, ...]


def run_advise(options: AdviseOptions) -> int:
    """Print the advice.

    Args:
        options: of the command line.

    Returns:
        The exit status.

    Raises:
        ValueError: for a log without readings, options outside their range, or bounds that contradict each other.
    """
    _check(options)
    run = read_run(options.run)
    found = answer(run, options)
    if options.json:
        text = json.dumps(dataclasses.asdict(found))  # JSON has no infinity: it becomes null
        sys.stdout.write(json.dumps(json.loads(text, parse_constant=lambda _: None), ensure_ascii=False) + "\n")
    else:
        _show(found, Console(highlight=False, markup=False, emoji=False))
    return 0


def answer(run: Run, options: AdviseOptions) -> Answer:
    """What to advise: of the same log and the same options, always the same.

    Args:
        run: as its log has it.
        options: of the command line.

    Raises:
        ValueError: as `run_advise`.
    """
    known = logged(
        run,
        units_per_second=options.units_per_second,
        cost_per_hour=options.cost_per_hour,
        ranks_at_most=options.ranks_at_most,
    )
    advised, unit = known.advised(aim=options.aim, budget=options.budget, batch=options.batch), known.unit
    trainer = trainer_named(options.trainer) if options.trainer else str(known.setup.get("trainer") or "plain loop")
    of_log = (f"The log: {'; '.join(run.remarks)}.",) if run.remarks else ()
    notes = (*of_log, *_notes(known, advised), *(_of_rl(run) if unit == "prompts" else ()))
    words = {scope: f"{scope.capitalize()}, {in_words(each, unit)}." for scope, each in advised.items()}
    if (chosen := _chosen(advised, options)) is None:
        return Answer(known, words, advised, trainer, None, (), (), notes)
    plan, critical = chosen
    batch = plan.whole_batch
    notes += tuple(_on_the_way(known, batch))
    groups = known.setup.get("optimizer_settings") or [] if known.optimizer else []
    has_rates = trainer not in SET_THEIR_RATES
    rates = tuple(rate_row(group, batch, known.present.batch, critical) for group in groups if has_rates)
    how = in_trainer(
        trainer,
        plan,
        unit=unit,
        present=known.present.batch,
        units_seen=known.units_seen,
        tokens=known.tokens,
        completions=run.probe("policy").setup.get("completions_per_prompt"),
    )
    if options.batch not in (None, batch):
        asked = f"{options.batch:,.15g} does not split well into ranks and micro-batches"
        how = (f"{asked}: this sets {count(batch)}", *how)
    return Answer(known, words, advised, trainer, batch, how, rates, notes)


def _check(options: AdviseOptions) -> None:
    for name in ("budget", "cost_per_hour", "units_per_second", "ranks_at_most", "batch"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be positive and finite, got {value:g}")
    if options.budget is not None and options.aim == "cheapest":
        raise ValueError("--budget takes the fastest batch that keeps it, got --aim cheapest: leave out one of the two")


def _chosen(advised: Mapping[str, Advice], options: AdviseOptions) -> tuple[Plan, Range] | None:
    """The batch to say more of, the user's or the best, and B_crit."""
    if not advised:
        return None
    advice = advised[leading(advised)]
    plan = advice.best
    if (asked := options.batch) is not None:
        plan = min(advice.plans, key=lambda each: abs(math.log(each.batch / asked)))
    return None if plan is None else (plan, advice.critical)


def _notes(logged: Logged, advised: Mapping[str, Advice]) -> Iterator[str]:
    """What the numbers rest on, in short: docs/advice.md has all of it."""
    if logged.batch_changed:
        yield "The batch changed during this run: advice is about what follows."
    if any(logged.scopes[name].factor == PUBLISHED for name in advised):
        which = "This optimizer, or this metric, was not in sonde's study"
        if not logged.optimizer:
            which = "The log does not say the optimizer (pass it to sonde.attach), or its options changed"
        yield f"{which}: B_crit is taken to be 0.1 to 20 B_simple. `sonde branch` measures it."
    elif advised and logged.unit != "prompts":  # of policies, the study has eight cases alone
        yield "Ranges hold about 9 times in 10, where your training is like those of the study of small tasks."
    if advised and logged.present.units_per_second is not None:
        most = plural(logged.present.ranks_at_most, "rank")
        yield f"Time: all rows, the present batch too, are on up to {most}, with perfect data parallelism."
    if any(advice.elsewhere for advice in advised.values()):
        yield "--ranks-at-most N says what more ranks would do, --batch N how to set a batch and its rate."


def _on_the_way(logged: Logged, batch: float) -> Iterator[str]:
    """Whether the batch should grow while a run trains, by what the study found with this optimizer."""
    present, optimizer = logged.present.batch, logged.optimizer
    if batch < 2 * present or factor_of(optimizer, logged.metric) is None or logged.unit == "prompts":
        return
    if optimizer == "SGD (β = 0)":
        ramp = ", ".join(number(present * 2**k, 4) for k in range(int(math.log2(batch / present)) + 1))
        yield f"A new run may grow: batches of {ramp}, each for the same number of {logged.unit}."
    else:
        yield f"A constant batch will do: in sonde's study with {optimizer}, one that grew was no better."


def _of_rl(run: Run) -> Iterator[str]:
    """What the study found of policies, and what this log says of prompts and completions."""
    last = next((r for r in reversed(run.policy) if r.metrics.get("gns_prompts/completions_share") is not None), None)
    if last is not None:
        share = percent((last.metrics["gns_prompts/completions_share"] or 0.0) / 2)
        yield (
            f"Prompts or completions: twice the completions to each prompt would cut the noise of a step by {share}, "
            "twice the prompts by 50\N{NO-BREAK SPACE}%, both with twice the tokens."
        )
    yield "More prompts come first: groups of 16 completions needed 1.1 to 2.3 times the rollouts of groups of 4."
    yield "Reuse: with four updates on each batch, B_crit was 3 to 15 times as large, and the law does not hold."


# In the terminal.


def _show(found: Answer, console: Console) -> None:
    """Print sentences, then tables of costs, then how to set the batch and its rate, then what the numbers rest on."""
    logged, unit = found.logged, found.logged.unit
    if logged.why_none:
        console.print(logged.why_none)
    for sentence in found.words.values():
        console.print(sentence, style="bold")
    for scope, advice in found.advice.items():
        known, factor, now = logged.scopes[scope].known, logged.scopes[scope].factor, advice.present
        times = f"{number(factor.low, 2)} – {number(factor.high, 2)}"
        times = f"{number(factor.median, 2)} [{times}]" if factor.median is not None else times
        console.print(
            f"\n{scope.capitalize()}: costs of what {number(now.steps.high, 6)} steps of "
            f"{number(now.batch, 6)} learn.\n"
            f"B_simple {known.in_words(unit)}, times {times}: B_crit {advice.critical.in_words(unit)}"
        )
        print_table(_cost_rows(advice, found, unit), console, right=range(6))
    if found.batch is not None:
        console.print(f"\nTo set a batch of {count(found.batch)} {unit} ({found.trainer}):")
        for line in found.how:
            console.print(f"  {line}", soft_wrap=True)
        if not found.rates and found.trainer not in SET_THEIR_RATES:
            console.print("The rate to go with it is not known: the log does not say the optimizer's settings.")
    for row in found.rates:
        console.print(f"\n{row.optimizer}, for a batch of {count(row.batch)} {unit}")
        if row.settings:
            print_table(_rate_rows(row), console)
        console.print(row.words)
    for note in found.notes:
        console.print(f"\n{note}")


_TIMES = ((1.0, "s"), (60.0, "min"), (HOUR, "h"), (24 * HOUR, "days"))
"""Units of time, in seconds: a table has the first one that keeps its numbers below 120."""


def _cost_rows(advice: Advice, found: Answer, unit: str) -> Iterator[Row]:
    now = advice.present
    kept = "now  " if now.ranks == found.logged.present.ranks else "same  "
    timed, priced = now.seconds is not None, now.money is not None
    longest = max((plan.seconds.high for plan in advice.plans if plan.seconds is not None), default=0.0)
    second, in_unit = next((size, unit) for size, unit in _TIMES if longest < 120 * size or size > HOUR)
    yield "batch", "ranks × each", "steps", unit, *[f"time, {in_unit}"] * timed, *["money"] * priced
    for plan in advice.plans:
        mark = kept if plan is now else "best  " if plan is advice.best else ""
        time = [] if plan.seconds is None else [_cell(plan.seconds.times(1 / second))]
        money = [] if plan.money is None else [_cell(plan.money)]
        mark = mark or ("set  " if plan.whole_batch == found.batch else "")
        size, ranks = f"{mark}{number(plan.batch, 6)}", f"{plan.ranks} × {plan.accumulation}"
        yield size, ranks, _cell(plan.steps), _cell(plan.units), *time, *money


def _cell(known: Range) -> str:
    """A cost in two lines, its middle and its range, with three digits, also of large numbers."""
    low, high = (number(float(f"{end:.3g}")) for end in (known.low, known.high))
    if known.low == known.high:
        return high
    if known.middle is None:
        return f"{low}–{high}"
    return f"{number(float(f'{known.middle:.3g}'))}\n{low}–{high}"


def _rate_rows(row: RateRow) -> Iterator[Row]:
    yield "setting", "this run", "next run", "rule"
    for setting in row.settings:
        now, then = ("–" if value is None else f"{value:.4g}" for value in (setting.now, setting.then))
        yield setting.name, now, then, setting.rule


COMMAND = (AdviseOptions, run_advise)
