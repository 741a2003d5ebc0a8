"""What branches show, in words and tables."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from sonde.evidence.branches import Branches, Proxy
from sonde.evidence.notices import notices, verdict
from sonde.evidence.stats.branched_batch import UnitsRatio
from sonde.stats.intervals import RatioInterval
from sonde.wording import count, estimate, interval, number, percent


def print_result(found: Branches, console: Console) -> None:
    """Print the critical batch size, each batch beside the reference, noise scales, and what was noticed.

    Args:
        found: branches, of which some may have failed.
        console: where to print.
    """
    console.print()
    for line in _headline(found):
        console.print(line)
    console.print()
    console.print(_batches(found))
    if found.proxies:
        console.print()
        console.print(_proxies(found))
    for sentence in notices(found):
        console.print(f"\n{sentence}")


def _headline(found: Branches) -> list[str]:
    critical, law, half = found.critical, found.law_critical, found.of_shorter().critical
    more = percent(found.tolerance)
    if critical.status == "unresolved":
        return [f"No critical batch size: {critical.reason}."]
    lines = [
        f"Critical batch size: {_words(critical)} {found.unit}. Such a batch needs {more} more {found.unit} than "
        f"batch {found.reference:g} for the same loss."
    ]
    if critical.reason:
        lines.append(f"Not more is known, since {critical.reason}.")
    if half.status == "unresolved":
        lines.append(f"Half of the {found.unit} alone would not show it: {half.reason}.")
    else:
        lines.append(f"The first half of the {found.unit} alone would say: {_words(half)}.")
    if law.status == "unresolved":
        lines.append(f"By the law 1 + B/B_crit, B_crit is not known: {law.reason}.")
    else:
        lines.append(f"By the law 1 + B/B_crit, B_crit is {_words(law)} {found.unit}.")
    return lines


def _words(value: RatioInterval) -> str:
    return estimate(value.status, value.ratio, value.low, value.high)


def _batches(found: Branches) -> Table:
    table = _table("batch", "rate", "units over the reference's", "", left=(3,))
    rates = {branch.batch: branch.rate for branch in found.branches}
    table.add_row(f"{found.reference:g}", _rate(rates.get(found.reference)), "1", "reference")
    for ratio in found.ratios:
        rate, said = _rate(rates[ratio.batch]), verdict(ratio, found.tolerance)
        table.add_row(f"{ratio.batch:g}", rate, _ratio(ratio), said)
    table.title = f"{count(found.units)} {found.unit} from the checkpoint, {found.rule}, by {found.loss}"
    return table


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.4g}"


def _ratio(ratio: UnitsRatio) -> str:
    if ratio.ratio is None:
        return "not known"
    if math.isinf(ratio.ratio):
        return "unbounded" if ratio.n_diverged else "not reached"
    return number(ratio.ratio) + (f" ({interval(ratio.low, ratio.high)})" if ratio.low else "")


def _proxies(found: Branches) -> Table:
    """Each noise scale, and its ratio to the measured B_crit."""
    law = found.law_critical.ratio
    table = _table("noise scale", "metric", found.unit, "over the measured B_crit", left=(0, 1))
    for proxy in found.proxies:
        over = number(proxy.value / law) if proxy.value and law else "not known"
        table.add_row(proxy.name, proxy.metric, _of_proxy(proxy), over)
    return table


def _of_proxy(proxy: Proxy) -> str:
    if proxy.value is not None:
        return f"{number(proxy.value)} ({interval(proxy.low, proxy.high)})"
    return interval(proxy.low, math.inf if proxy.high is None else proxy.high)


def _table(*titles: str, left: tuple[int, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), title_justify="left", title_style="")
    for k, title in enumerate(titles):
        table.add_column(title, justify="left" if k in left else "right")
    return table
