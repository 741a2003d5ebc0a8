"""Advice in the terminal: sentences and tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console

from sonde.batch_size.stats.next_batch import HOUR, Advice
from sonde.batch_size.stats.proxy import Range
from sonde.batch_size.stats.rate_row import RateRow
from sonde.commands.branch_result import print_table
from sonde.commands.trainer_flags import SET_THEIR_RATES
from sonde.evidence.answer import Row
from sonde.wording import count, number

if TYPE_CHECKING:
    from sonde.commands.advise import Answer


def show(found: Answer, console: Console) -> None:
    """Print sentences, then tables of costs, then how to set the batch and its rate, then what the numbers rest on.

    Args:
        found: what is advised.
        console: where to print.
    """
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
