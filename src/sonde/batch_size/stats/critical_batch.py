"""What a noise scale means for the batch size: the trade-off between steps and examples, and a verdict in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sonde.stats.intervals import Status
from sonde.wording import number

PROXY_FACTOR = 2.0
"""Factor by which the noise scale of a tuned run may differ from the batch size at which returns really diminish.

Measured on a small classifier with 12 learning rates per batch size: B_simple averaged along the best run was within a
factor of about 2 of the critical batch that the runs themselves showed. Larger gaps are known (Merrill et al. 2025,
arXiv:2505.23971), so a verdict calls B_simple a proxy and claims nothing finer than this.
"""

_PROXY = "B_simple is a proxy for the critical batch size, good to a factor of about 2, and it changes during training."


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


@dataclass(frozen=True)
class Verdict:
    """A judgement of the batch size.

    Attributes:
        kind: "too_small", "about_right", "too_large", or "unknown" where the data do not decide.
        headline: one sentence.
        detail: the consequences, with numbers, and the assumption behind them.
    """

    kind: Literal["too_small", "about_right", "too_large", "unknown"]
    headline: str
    detail: str


def judge_batch(
    batch: float,
    *,
    unit: str,
    status: Status,
    b_simple: float | None,
    low: float | None,
    high: float | None,
    reason: str,
) -> Verdict:
    """Judge a batch size by the noise scale and its interval.

    Args:
        batch: units per optimizer step.
        unit: plural name of the unit.
        status: how far B_simple is known, see `RatioInterval`.
        b_simple: the estimate, None unless resolved.
        low: lower end of its interval, None when unresolved.
        high: upper end, infinite for a lower bound, None when unresolved.
        reason: why it is not resolved.

    Returns:
        A `Verdict`. It is "too_small" or "too_large" only when the whole interval lies further from the batch size than
        a factor of `PROXY_FACTOR`, since B_simple is no better a proxy. It is "about_right" only when the whole
        interval lies nearer.
    """
    size = f"{number(batch, 4)} {unit}"
    if status == "unresolved" or low is None or high is None:
        return Verdict("unknown", f"No verdict yet on the batch of {size}.", f"{_sentence(reason)}.")
    if status == "lower_bound":
        if low > PROXY_FACTOR * batch:
            gain = steps_and_examples(batch, low)
            return Verdict(
                "too_small",
                f"The batch of {size} is small: the noise scale is more than {number(low)} {unit}.",
                f"Training takes at least {number(gain.steps)}× the fewest possible steps. Doubling the batch nearly "
                f"halves the steps and costs few extra {unit}. {_PROXY}",
            )
        return Verdict(
            "unknown",
            f"No verdict yet on the batch of {size}: the noise scale is known only to be above {number(low)} {unit}.",
            f"{_sentence(reason)}.",
        )
    assert b_simple is not None
    if b_simple <= 0:
        return Verdict(
            "unknown",
            f"No verdict on the batch of {size}: no gradient noise was seen.",
            "All pieces had the same gradient: check that they hold different data.",
        )
    cost = steps_and_examples(batch, b_simple)
    known = f"{number(b_simple)} {unit} [{number(low)} – {number(high)}]"
    cost_now = (
        f"Training at this batch size takes about {number(cost.steps, 2)}× the fewest possible steps "
        f"and {number(cost.examples, 2)}× the fewest possible {unit}."
    )
    if low > PROXY_FACTOR * batch:
        return Verdict(
            "too_small",
            f"The batch of {size} is small: the noise scale is {known}.",
            f"{cost_now} A batch near {number(b_simple, 2)} {unit} would need "
            f"{2 / cost.steps:.0%} of the steps and {number(2 / cost.examples, 2)}× the {unit}. {_PROXY}",
        )
    if high < batch / PROXY_FACTOR:
        return Verdict(
            "too_large",
            f"The batch of {size} is large: the noise scale is {known}.",
            f"{cost_now} A batch near {number(b_simple, 2)} {unit} would need {2 / cost.examples:.0%} of the {unit} "
            f"and {number(2 / cost.steps, 2)}× the steps. {_PROXY}",
        )
    may_be_small, may_be_large = high > PROXY_FACTOR * batch, low < batch / PROXY_FACTOR
    if may_be_small or may_be_large:
        if may_be_small and may_be_large:
            possible = "may be too small, about right or too large"
        else:
            possible = f"is about right or too {'small' if may_be_small else 'large'}"
        return Verdict(
            "unknown",
            f"The batch of {size} {possible}: the noise scale is {known}.",
            f"This batch is about right for a noise scale between {number(batch / PROXY_FACTOR)} and "
            f"{number(batch * PROXY_FACTOR)} {unit}, but the interval reaches beyond that range. "
            f"More windows narrow the interval. {_PROXY}",
        )
    return Verdict(
        "about_right",
        f"The batch of {size} is about right: the noise scale is {known}.",
        f"{cost_now} A larger batch saves fewer and fewer steps, and a smaller batch saves few {unit}. {_PROXY}",
    )


def _sentence(reason: str) -> str:
    return reason[:1].upper() + reason[1:] if reason else "The data do not resolve the noise scale"
