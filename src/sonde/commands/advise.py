"""`sonde advise RUN`: the next batch size, its learning rate, and how to set both. It needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import Positional, arg

from sonde.commands.branch_result import print_json, print_table
from sonde.decision.decide import Advice, Aim, Decision, Wanted, decide
from sonde.decision.kept_trial import TRIAL_NAME, trial_text
from sonde.decision.law import Range
from sonde.decision.plans import HOUR, Plan
from sonde.decision.pool import pool
from sonde.decision.rate import RateRow
from sonde.decision.trainers import SET_THEIR_RATES
from sonde.evidence.answer import Row
from sonde.evidence.shell_run import terminated_as_interrupted
from sonde.runs.facts import facts_of_runs
from sonde.runs.reader import read_run
from sonde.runs.report.page import write_in_one_step
from sonde.runs.run import Run
from sonde.wording import number, units

USAGE = "sonde advise RUN --try -- python train.py --batch {batch} --out {out}"


@dataclass(frozen=True)
class AdviseOptions:
    """Say which batch size to take next, what it saves, which learning rate goes with it, and how to set it.

    Attributes:
        runs: Folder of the run, or its records.jsonl. Several runs of one model give one decision.
        aim: balanced: nearly the least time, with as few units as that allows. fastest: the least time. cheapest: the
            least time of all ranks together.
        budget: The most that the training may cost. The fastest batch that keeps it is taken.
        cost_per_hour: Of all ranks of this run together, in any currency.
        units_per_second: Throughput of all ranks of this run together.
        ranks_at_most: Data-parallel ranks that the next run may use.
        least: The smallest batch that the loss itself needs, as where advantages are normalised in each batch.
        batch: Say how to set this batch, in place of the best one.
        trainer: The trainer, such as transformers or Megatron.
        try_: Time the steps of the script after the two dashes at some sizes of {batch}, or {micro_batch}: sonde advise
            RUN --try -- python train.py --batch {batch} --out {out}. It takes a minute or two. What was measured is
            kept with the log. The script may overwrite its own checkpoints: to keep them, have it save to {out}, a
            temporary folder.
        json: Print JSON.
    """

    runs: Positional[tuple[Path, ...]]
    aim: Aim = "balanced"
    budget: Annotated[float | None, arg(metavar="MONEY", help_behavior_hint="(optional)")] = None
    cost_per_hour: Annotated[float | None, arg(metavar="MONEY", help_behavior_hint="(optional)")] = None
    units_per_second: Annotated[float | None, arg(metavar="N", help_behavior_hint="(default: as logged)")] = None
    ranks_at_most: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: as many as it had)")] = None
    least: Annotated[float | None, arg(metavar="UNITS", help_behavior_hint="(default: any)")] = None
    batch: Annotated[float | None, arg(metavar="UNITS", help_behavior_hint="(optional)")] = None
    trainer: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: as logged)")] = None
    try_: Annotated[bool, arg(name="try")] = False
    json: bool = False


def run_advise(options: AdviseOptions, command: Sequence[str] = ()) -> int:
    """Print the decision.

    Args:
        options: of the command line.
        command: of the script to try, with placeholders.

    Returns:
        The exit status.

    Raises:
        ValueError: for a log without readings, options outside their range, or bounds that contradict each other.
    """
    wanted = Wanted(**{each.name: getattr(options, each.name) for each in dataclasses.fields(Wanted)})
    runs = [read_run(path) for path in options.runs]
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise ValueError("a log is given twice, and would count twice: give each once")
    if options.try_ or command:
        _try(runs, options, command)
    found = decide(pool(facts_of_runs(runs)), wanted, logs=options.runs)
    if found.kind != "time":
        found = dataclasses.replace(found, command="")  # this is it
    remarks = " ".join(f"The log of {run.name}: {'; '.join(run.remarks)}." for run in runs if run.remarks)
    if options.json:
        print_json(vars(found) | {"remarks": remarks})
    else:
        _show(found, remarks, Console(highlight=False, markup=False, emoji=False))
    return 0


def _try(runs: Sequence[Run], options: AdviseOptions, command: Sequence[str]) -> None:
    """Time the steps of a script, and keep the time curve beside the log of the run that is gone on from.

    Raises:
        ValueError: for --try without a script, or the other way round, and a script that cannot be tried.
    """
    if not (options.try_ and command):
        raise ValueError(f"--try goes with a script after two dashes: {USAGE}")
    from sonde.commands.trial.start import check_command, sizes_of, try_sizes

    check_command(command)
    all_facts = facts_of_runs(runs)
    facts = pool(all_facts)
    if facts.why_none:
        raise ValueError(f"there is nothing to try yet: {facts.why_none}")
    critical = next(iter(facts.scopes.values())).critical
    sizes = sizes_of(facts, critical, command)
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    with terminated_as_interrupted():
        curve = try_sizes(command, sizes, unit=facts.unit, ranks=facts.ranks, say=console.print)
    base = next(run for run, each in zip(runs, all_facts, strict=True) if each.name == facts.name)
    write_in_one_step(base.path.parent / TRIAL_NAME, trial_text(curve, facts))


# In the terminal.


def _show(found: Decision, remarks: str, console: Console) -> None:
    """Print the decision, then tables of costs, then how to set the batch and its rate, then what it rests on."""
    unit = found.facts.unit
    console.print(found.sentence, style="bold")
    console.print(found.reason)
    if found.wait:
        console.print(f"To know the noise scale better, {found.wait}.")
    if (advice := found.leading) is not None:
        name, steps, now = next(iter(found.advice)), advice.scope.steps, advice.present
        console.print(
            f"\n{name.capitalize()}: costs of what {number(steps, 6)} steps of {units(now.whole_batch, unit)} learn"
        )
        print_table(_cost_rows(advice, found, unit), console, right=range(6))
    for change in found.changes:
        of = f"{change.scope}, {found.trainer}" if len(found.changes) > 1 else found.trainer
        console.print(f"\nTo set a batch of {units(change.plan.whole_batch, unit)} ({of}):")
        for line in change.how:
            console.print(f"  {line}", soft_wrap=True)
        if not change.rates and found.trainer not in SET_THEIR_RATES:
            console.print("The rate to go with it is not known: the log does not say the optimizer's settings.")
        for row in change.rates:
            console.print(f"\n{row.optimizer}, for a batch of {units(row.batch, unit)}")
            if row.settings:
                print_table(_rate_rows(row), console)
            console.print(row.words)
    for note in (*filter(None, [remarks]), *found.notes):
        console.print(f"\n{note}")
    if found.command:
        console.print(f"\nNext: {found.command}", soft_wrap=True)


_TIMES = ((1.0, "s"), (60.0, "min"), (HOUR, "h"), (24 * HOUR, "days"))
"""Units of time, in seconds: a table has the first one that keeps its numbers below 120."""


def _cost_rows(advice: Advice, found: Decision, unit: str) -> Iterator[Row]:
    """The plans of one scope. The last column says how their times are known."""
    plans, now = advice.plans, advice.present
    timed, priced = now.seconds is not None, now.money is not None
    longest = max((plan.seconds.high for plan in plans if plan.seconds is not None), default=0.0)
    second, in_unit = next((size, name) for size, name in _TIMES if longest < 120 * size or size > HOUR)
    time = f"time, {in_unit}" if timed else "time, times now"
    yield "batch", "ranks × micro-batches", "steps", unit, time, *["money"] * priced, "time is"
    for plan in plans:
        seconds = plan.time if plan.seconds is None else plan.seconds.times(1 / second)
        money = [] if plan.money is None else [_cell(plan.money)]
        size = f"{_mark(plan, advice, found)}{plan.whole_batch:,}"
        split = f"{plan.ranks} × {plan.accumulation} × {plan.micro_batch}"
        yield size, split, _cell(plan.steps), _cell(plan.units), _cell(seconds), *money, plan.basis


def _mark(plan: Plan, advice: Advice, found: Decision) -> str:
    if plan is advice.present:
        return "now  "
    if plan is advice.best:
        return "best  "
    if plan is advice.maybe:
        return "try  "
    return "set  " if plan in [change.plan for change in found.changes] else ""


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
