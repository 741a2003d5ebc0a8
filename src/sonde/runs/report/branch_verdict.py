"""What the page of branches says first, and the numbers of its tables."""

from __future__ import annotations

import math

from sonde.evidence.branches import Branches
from sonde.evidence.stats.branched_batch import UnitsRatio
from sonde.runs.report.verdicts import Tile, VerdictPanel
from sonde.stats.intervals import RatioInterval
from sonde.wording import count, estimate, interval, number, percent, plural

_LAW = "B_crit by these branches"


def branch_panel(branches: Branches) -> VerdictPanel:
    """What to do, the critical batch size, and what may change it."""
    found, unit, more = branches.critical, branches.unit, percent(branches.tolerance)
    kind, badge, detail = "unknown", "Not known yet", ""
    need = "Mend this first" if branches.mistake else "Run more branches"
    action, headline = f"{need}: {found.reason}.", "The critical batch size is not known yet."
    if found.low is not None:
        kind, badge = ("measured", "Measured") if found.status == "resolved" else ("unknown", "Only a lower bound")
        safe = count(math.floor(found.low))
        action = (
            f"A batch size of up to {safe} {unit} needs at most {more} more {unit} than the reference, "
            f"{number(branches.reference)}."
        )
        headline = f"The critical batch size is {in_words(found)} {unit}, at a tolerance of {more}."
        if found.reason:
            headline += f" {capital(found.reason)}."
        detail = _at_half(branches)
    basis = f"Judged from {count(len(branches.branches))} branches. Intervals hold with {percent(0.95)}."
    return VerdictPanel(kind, badge, action, headline, detail, basis, tuple(map(_tile, branches.ratios)))


def _at_half(branches: Branches) -> str:
    """The answer at half of the units, beside the whole."""
    whole, half = branches.critical, branches.of_shorter().critical
    if whole.low is None or whole.high is None or half.low is None or half.high is None:
        return f"Half of the {branches.unit} alone would not show it: {half.reason}."
    rest = "The answer depends on the length of the branches: train them longer, until it settles."
    if max(whole.low, half.low) <= min(whole.high, half.high):
        rest = "The two agree."
    return f"The first half of the {branches.unit} alone would say {in_words(half)}. {rest}"


def _tile(ratio: UnitsRatio) -> Tile:
    note = interval(ratio.low, ratio.high)
    if n := ratio.n_diverged or ratio.n_slow:
        note = f"{n} of {plural(len(ratio.logs), 'seed')}"
    return Tile(f"Batch size {number(ratio.batch)}", times(ratio).split(" (")[0], note)


def times(ratio: UnitsRatio) -> str:
    """A ratio of units with its interval, in words."""
    if ratio.n_diverged or ratio.n_slow:
        return "diverged" if ratio.n_diverged else "too slow to compare"
    if ratio.ratio is None:
        return number(None)
    within = "" if ratio.low is None else f" ({interval(ratio.low, ratio.high)})"
    return f"{number(ratio.ratio)}×{within}"


def capital(text: str) -> str:
    """The text with a capital letter first."""
    return text[:1].upper() + text[1:]


def in_words(of: RatioInterval) -> str:
    """A critical batch size or a noise scale, as far as it is known."""
    return estimate(of.status, of.ratio, of.low, of.high)


def noise_scales(branches: Branches) -> list[tuple[str, RatioInterval]]:
    """B_crit by the branches first, then each noise scale, by name."""
    rows = [(_LAW, branches.law_critical)]
    for proxy in branches.proxies:
        low, high = proxy.low, math.inf if proxy.high is None else proxy.high
        name = f"{proxy.name} ({proxy.metric})"
        if proxy.value is not None:
            rows.append((name, RatioInterval("resolved", low, high, ratio=proxy.value)))
        else:
            rows.append((name, RatioInterval("upper_bound" if low == 0 else "lower_bound", low, high)))
    return rows


def over_b_crit(scale: RatioInterval, law: RatioInterval) -> str:
    """A noise scale over the measured B_crit, in words. The range takes the far ends of both intervals."""
    if law.low is None or law.high is None or scale.low is None or scale.high is None:
        return number(None)
    low, high = scale.low / law.high, scale.high / law.low if law.low else math.inf
    if low == 0 and math.isinf(high):
        return number(None)
    if law.ratio is None or scale.ratio is None:
        return interval(low, high)
    return f"{number(scale.ratio / law.ratio)} ({interval(low, high)})"
