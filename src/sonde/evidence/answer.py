"""What branches show, in words: the same sentences and rows for the console and for the page."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sonde.evidence.branches import Branches
from sonde.evidence.stats.branched_batch import UnitsRatio
from sonde.stats.intervals import RatioInterval
from sonde.wording import capital, count, interval, number, percent

Row = tuple[str, ...]


def headline(found: Branches) -> str:
    """The critical batch size, as far as it is known."""
    critical, doubt = found.critical, " and ".join(f"{{{name}}}" for name in found.unverified)
    if critical.status == "unresolved":
        return f"The critical batch size is not known yet{doubt and f', nor whether the script uses {doubt}'}."
    first = f"If the script uses {doubt} as given, which is not known, the" if doubt else "The"
    known = f"{first} critical batch size is {critical.in_words} {found.unit}, at a tolerance of"
    return f"{known} {percent(found.tolerance)}." + (f" {capital(critical.reason)}." if critical.reason else "")


def advice(found: Branches) -> str:
    """Which batch sizes will do, or what is missing."""
    critical, unit = found.critical, found.unit
    if found.mistake:
        return f"Mend this first: {critical.reason}."
    is_whole = all(branch.state == "finished" for branch in found.branches)
    first = "" if is_whole else "Mend or repeat the branches that did not finish."
    if found.unverified:
        return first or "See first whether the script uses what it is given: if not, the table is of something else."
    if critical.low is None:
        return first or f"Run more branches. {capital(critical.reason)}."
    return (
        f"{first} A batch size of up to {count(math.floor(critical.low))} {unit} needs at most "
        f"{percent(found.tolerance)} more {unit} than the reference, {number(found.reference)}."
    ).strip()


def at_half(found: Branches) -> str:
    """The answer at half of the units, beside the whole; empty where nothing is known of the whole."""
    whole, half = found.critical, found.of_shorter().critical
    if whole.low is None or whole.high is None:
        return ""
    if half.low is None or half.high is None:
        return f"Half of the {found.unit} alone would not show it. {capital(half.reason)}."
    rest = "The answer depends on the length of the branches: train them longer, until it settles."
    if max(whole.low, half.low) <= min(whole.high, half.high):
        rest = "The two agree."
    return f"The first half of the {found.unit} alone would say {half.in_words}. {rest}"


def batch_rows(found: Branches) -> Iterator[Row]:
    """Each batch size beside the reference. The first row is the head."""
    yield "batch size", "rate", f"{found.unit} over the reference's", "finished", "verdict"
    ratios = {ratio.batch: ratio for ratio in found.ratios}
    for batch in sorted({b.batch for b in found.branches}):
        own = [b for b in found.branches if b.batch == batch]
        rate = next((f"{b.rate:.4g}" for b in own if b.rate is not None), "–")
        done = f"{sum(b.state == 'finished' for b in own)} of {len(own)}"
        ratio = ratios.get(batch)
        said = ("1", "reference") if ratio is None else (times(ratio), verdict(ratio, found.tolerance))
        yield number(batch), rate, said[0], done, said[1]


def times(ratio: UnitsRatio) -> str:
    """A ratio of units with its interval."""
    if ratio.ratio is None or math.isinf(ratio.ratio):
        return number(ratio.ratio)
    return f"{number(ratio.ratio)}×" + ("" if ratio.low is None else f" ({interval(ratio.low, ratio.high)})")


def verdict(ratio: UnitsRatio, tolerance: float) -> str:
    """A batch beside the reference, in a few words."""
    for n, what in ((ratio.n_diverged, "diverged"), (ratio.n_slow, "too slow")):
        if n:
            return what if n == len(ratio.logs) else f"{n} of {len(ratio.logs)} {what}"
    if ratio.low is None or ratio.high is None:
        return "not compared" if ratio.ratio is None else "interval not known"
    if ratio.high <= 1 + tolerance:
        return "as good"
    return "needs more" if ratio.low > 1 + tolerance else "not resolved"


def scale_rows(found: Branches) -> Iterator[Row]:
    """B_crit by the branches, and each noise scale over it. The first row is the head."""
    yield "", f"in {found.unit}", "over this B_crit"
    (name, law), *others = noise_scales(found)
    why = f" ({law.reason})" if law.reason not in ("", found.critical.reason) else ""
    yield name, law.in_words + why, "–"
    for name, scale in others:
        yield name, scale.in_words, over_b_crit(scale, law)


def noise_scales(found: Branches) -> list[tuple[str, RatioInterval]]:
    """B_crit by the branches first, then each noise scale, by name."""
    rows = [("B_crit by these branches", found.law_critical)]
    for proxy in found.proxies:
        low, high = proxy.low, math.inf if proxy.high is None else proxy.high
        name = f"{proxy.name} ({proxy.metric})" if proxy.metric else proxy.name
        if proxy.value is not None:
            rows.append((name, RatioInterval("resolved", low, high, ratio=proxy.value)))
        else:
            rows.append((name, RatioInterval("upper_bound" if low == 0 else "lower_bound", low, high)))
    return rows


def over_b_crit(scale: RatioInterval, law: RatioInterval) -> str:
    """A noise scale over the measured B_crit. The range takes the far ends of both intervals."""
    if law.low is None or law.high is None or scale.low is None or scale.high is None:
        return number(None)
    low, high = scale.low / law.high, scale.high / law.low if law.low else math.inf
    if low == 0 and math.isinf(high):
        return number(None)
    if law.ratio is None or scale.ratio is None:
        return interval(low, high)
    return f"{number(scale.ratio / law.ratio)} ({interval(low, high)})"
