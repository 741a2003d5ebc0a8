"""Advice in the terminal: sentences and tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sonde.batch_size.stats.next_batch import HOUR, Advice
from sonde.batch_size.stats.proxy import Range
from sonde.batch_size.stats.rate_row import RateRow
from sonde.wording import number

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
        known, factor, now = logged.scopes[scope][0], advice.factor, advice.present
        console.print(
            f"\n{scope.capitalize()}: costs of what {number(now.steps.high, 6)} steps of "
            f"{number(now.batch, 6)} learn.\n"
            f"B_simple {known.in_words(unit)}, times {number(factor.median, 2)} [{number(factor.low, 2)} – "
            f"{number(factor.high, 2)}]: B_crit {_critical(advice.critical)}"
        )
        console.print(_table(advice, unit))
    if found.batch is not None:
        console.print(f"To set a batch of {number(found.batch, 6)} {unit} ({found.trainer}):")
        for line in found.how:
            console.print(f"  {line}", soft_wrap=True)
        if not found.rates:
            console.print("The rate to go with it is not known: the log does not say the optimizer's settings.")
    for row in found.rates:
        if row.settings:
            console.print(f"\n{row.optimizer}")
            console.print(_rate_table(row))
            console.print(f"It holds {row.holds} ({row.source}).")
        else:
            console.print(f"\n{row.optimizer}: the rate is not known: {row.holds}.")
    for note in found.notes:
        console.print(f"\n{note}")


def _table(advice: Advice, unit: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("batch", "ranks × each", "steps", unit):
        table.add_column(name, justify="right")
    timed, priced = advice.present.seconds is not None, advice.present.money is not None
    for name in ["time"] * timed + ["money"] * priced:
        table.add_column(name, justify="right")
    for plan in advice.plans:
        mark = "now  " if plan is advice.present else "best  " if plan is advice.best else ""
        cells = [f"{mark}{number(plan.batch, 6)}", f"{plan.ranks} × {plan.accumulation}"]
        cells += [_cell(plan.steps), _cell(plan.units)]
        cells += [_cell(plan.seconds, *_time_unit(plan.seconds))] if plan.seconds is not None else []
        cells += [_cell(plan.money)] if plan.money is not None else []
        table.add_row(*cells, style="bold" if mark else "")
    return table


def _critical(known: Range) -> str:
    ends = f"{number(known.low)} – {'∞' if math.isinf(known.high) else number(known.high)}"
    return f"[{ends}]" if known.middle is None else f"{number(known.middle)} [{ends}]"


def _cell(known: Range, of: float = 1.0, unit: str = "") -> str:
    """A cost in two lines, its middle and its range, in a unit of so many."""
    middle = known.high if known.low == known.high else known.middle
    shown = [] if middle is None else [f"{_short(middle / of)}{unit}"]
    if known.low != known.high:
        shown.append(f"{_short(known.low / of)}–{_short(known.high / of)}{'' if shown else unit}")
    return "\n".join(shown)


def _short(value: float) -> str:
    """With three digits, also of large numbers."""
    return number(float(f"{value:.3g}"), 3) if math.isfinite(value) else "∞"


def _time_unit(seconds: Range) -> tuple[float, str]:
    """The unit that a time is shown in."""
    longest = seconds.high if math.isfinite(seconds.high) else seconds.low
    return (1.0, " s") if longest < 120 else (60.0, " min") if longest < 2 * HOUR else (HOUR, " h")


def _rate_table(row: RateRow) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("setting", "now", "then", "rule"):
        table.add_column(name)
    for setting in row.settings:
        values = ("–" if value is None else f"{value:.4g}" for value in (setting.now, setting.then))
        table.add_row(setting.name, *values, setting.rule)
    return table
