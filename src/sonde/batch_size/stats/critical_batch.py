"""What a noise scale means for the batch size: the trade-off between steps and examples, and a verdict in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sonde.batch_size.stats.drift import drift_in_words
from sonde.stats.intervals import Status
from sonde.wording import number

ABOUT_RIGHT = 2.0
"""A batch within this factor of the noise scale is about right: it costs at most three times the fewest steps, and at
most three times the fewest units."""

_PROXY = (
    "B_simple is a proxy for the critical batch size. In published runs the critical batch size was 0.1 to 20 times "
    "B_simple (McCandlish et al. 2018, arXiv:1812.06162)."
)


@dataclass(frozen=True)
class Tradeoff:
    """Cost of training at one batch size, relative to the least possible.

    Attributes:
        steps: S/S_min, optimizer steps relative to training at an infinite batch.
        examples: E/E_min, units consumed relative to training at an infinitesimal batch.
    """

    steps: float
    examples: float


def steps_and_examples(batch: float, critical_batch: float) -> Tradeoff:
    """The trade-off (S/S_min − 1)(E/E_min − 1) = 1 at a given batch size.

    Args:
        batch: units per optimizer step.
        critical_batch: B_crit in the same units; the noise scale is its usual proxy.

    Returns:
        S/S_min = 1 + B_crit/B and E/E_min = 1 + B/B_crit: both 2 where B = B_crit.

    Raises:
        ValueError: unless both are positive and finite.

    Reference:
        McCandlish et al. 2018, arXiv:1812.06162, equations 2.11 and 5.1.

    Example:
        >>> steps_and_examples(64, 192)
        Tradeoff(steps=4.0, examples=1.3333333333333333)
    """
    if not (0 < batch < math.inf and 0 < critical_batch < math.inf):
        raise ValueError(f"batch and critical_batch must be positive and finite, got {batch} and {critical_batch}")
    return Tradeoff(steps=1 + critical_batch / batch, examples=1 + batch / critical_batch)


Kind = Literal[
    "too_small", "about_right_or_too_small", "about_right", "about_right_or_too_large", "too_large", "unknown"
]


@dataclass(frozen=True)
class Verdict:
    """A judgement of the batch size.

    Attributes:
        kind: what the data allow; "unknown" where they allow a batch that is too small and one that is too large.
        headline: one sentence.
        detail: the consequences, with numbers, what to do next, and the assumption behind them.
        in_short: "the batch is about right" or the like; empty where there is no verdict.
    """

    kind: Kind
    headline: str
    detail: str
    in_short: str = ""


_WORDS: dict[Kind, str] = {
    "too_small": "is small",
    "about_right_or_too_small": "is about right or too small",
    "about_right": "is about right",
    "about_right_or_too_large": "is about right or too large",
    "too_large": "is large",
    "unknown": "may be too small, about right or too large",
}


def judge_batch(
    batch: float,
    *,
    unit: str,
    status: Status,
    b_simple: float | None,
    low: float | None,
    high: float | None,
    reason: str,
    doubling_windows: float | None = None,
    advice: str = "",
) -> Verdict:
    """Judge a batch size by the noise scale now, and by where it is going.

    Args:
        batch: units per optimizer step.
        unit: plural name of the unit.
        status: how far B_simple is known, see `RatioInterval`.
        b_simple: the estimate, None unless resolved.
        low: lower end of its interval, None when unresolved.
        high: upper end, infinite for a lower bound, None when unresolved.
        reason: why it is not resolved.
        doubling_windows: windows in which B_simple doubles, negative where it halves; None where that is not known.
        advice: what would make B_simple known better.

    Returns:
        A `Verdict`. A batch is about right within a factor of `ABOUT_RIGHT` of the noise scale. The verdict names all
        that the interval allows.
    """
    size = f"{number(batch, 4)} {unit}"
    if status == "unresolved" or low is None or high is None:
        return Verdict("unknown", f"No verdict yet on the batch of {size}.", _sentences(reason, advice))
    if high <= 0 or b_simple == 0:
        return Verdict(
            "unknown",
            f"No verdict on the batch of {size}: no gradient noise was seen.",
            "All pieces had the same gradient: check that they hold different data.",
        )
    kind = _kind(batch, low, high)
    if b_simple is None:
        known = f"more than {number(low)} {unit}" if math.isinf(high) else f"less than {number(high)} {unit}"
        headline = f"The batch of {size} {_WORDS[kind]}: the noise scale is {known}."
        cost = _cost_of_bound(batch, low, high, unit) if kind in ("too_small", "too_large") else ""
        return Verdict(kind, headline, _sentences(cost, reason, advice, _PROXY), _in_short(kind))
    known = f"{number(b_simple)} {unit} [{number(low)} – {number(high)}]"
    headline = f"The batch of {size} {_WORDS[kind]}: the noise scale is {known}."
    outlook = _outlook(batch, b_simple, doubling_windows)
    if kind in ("too_small", "about_right", "too_large"):
        advice = ""  # the interval is narrow enough to decide
    detail = _sentences(_cost(kind, batch, b_simple, unit), outlook, advice, _PROXY)
    return Verdict(kind, headline, detail, _in_short(kind))


def _in_short(kind: Kind) -> str:
    return f"the batch {_WORDS[kind]}"


def _kind(batch: float, low: float, high: float) -> Kind:
    may_be_small, may_be_large = high > ABOUT_RIGHT * batch, low < batch / ABOUT_RIGHT
    if low > ABOUT_RIGHT * batch:
        return "too_small"
    if high < batch / ABOUT_RIGHT:
        return "too_large"
    if may_be_small and may_be_large:
        return "unknown"
    if may_be_small:
        return "about_right_or_too_small"
    return "about_right_or_too_large" if may_be_large else "about_right"


def _cost(kind: Kind, batch: float, b_simple: float, unit: str) -> str:
    cost = steps_and_examples(batch, b_simple)
    now = (
        f"Training at this batch size takes about {number(cost.steps, 2)}× the fewest possible steps "
        f"and {number(cost.examples, 2)}× the fewest possible {unit}"
    )
    if kind == "too_small":
        return (
            f"{now}. A batch near {number(b_simple, 2)} {unit} would need "
            f"{2 / cost.steps:.0%} of the steps and {number(2 / cost.examples, 2)}× the {unit}"
        )
    if kind == "too_large":
        return (
            f"{now}. A batch near {number(b_simple, 2)} {unit} would need {2 / cost.examples:.0%} of the {unit} "
            f"and {number(2 / cost.steps, 2)}× the steps"
        )
    if kind == "about_right":
        return f"{now}. A larger batch saves fewer and fewer steps, and a smaller batch saves few {unit}"
    return (
        f"{now}. The batch is about right for a noise scale between {number(batch / ABOUT_RIGHT)} and "
        f"{number(batch * ABOUT_RIGHT)} {unit}, and the interval reaches beyond that range"
    )


def _cost_of_bound(batch: float, low: float, high: float, unit: str) -> str:
    if math.isinf(high):
        steps = number(steps_and_examples(batch, low).steps)
        return (
            f"Training takes at least {steps}× the fewest possible steps. Doubling the batch nearly halves the steps "
            f"and costs few extra {unit}"
        )
    examples = number(steps_and_examples(batch, high).examples)
    return (
        f"Training uses at least {examples}× the fewest possible {unit}. Halving the batch nearly halves the {unit} "
        "and costs few extra steps"
    )


def _outlook(batch: float, b_simple: float, doubling_windows: float | None) -> str:
    """Where the noise scale is going, and when the verdict changes if that goes on."""
    moves = drift_in_words(doubling_windows)
    if not moves or doubling_windows is None:
        return ""
    limit = batch * ABOUT_RIGHT if doubling_windows > 0 else batch / ABOUT_RIGHT
    doublings = math.log2(limit / b_simple)
    if doublings * doubling_windows <= 0:
        return f"The noise scale {moves}"
    becomes, windows = "small" if doubling_windows > 0 else "large", number(doublings * doubling_windows, 2)
    return (
        f"The noise scale {moves}: if this goes on, the batch becomes {becomes} in about "
        f"{windows} {'window' if windows == '1' else 'windows'}"
    )


def _sentences(*parts: str) -> str:
    """The parts that are not empty, as sentences."""
    whole = [part[:1].upper() + part[1:].removesuffix(".") for part in parts if part]
    return ". ".join(whole) + "." if whole else "The data do not resolve the noise scale."
