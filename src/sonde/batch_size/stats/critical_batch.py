"""What a noise scale means for the batch size: the trade-off between steps and units, and a verdict in words.

Two noise scales answer two questions. The average over the run is about a run like this one, from its beginning to its
end: that is what a comparison of whole runs at several batch sizes shows. The noise scale now is about the steps that
follow. It grows while a model trains, so the two differ by several times, and advice from one is wrong for the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sonde.batch_size.stats.proxy import Factor, Range, critical_range, factor_for, in_units, proxy_in_words
from sonde.wording import number

ABOUT_RIGHT = 2.0
"""A batch within this factor of B_crit is about right: it costs at most three times the fewest steps, and at most three
times the fewest units."""


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
WELL_KNOWN = 0.2 / 1.96
"""Standard error of log B_simple at ± 20 %."""
BARELY_KNOWN = 0.45
"""Standard error of log B_simple at which |G|² or tr Σ can just be distinguished from 0: about 1 over Student's t."""
_WIDE = 0.25
"""Standard error of log B_simple at about ± 50 %: a two-sided interval that is wider deserves advice."""
GUESSED = 1.5
"""Standard error of log B_simple beyond which first order says nothing, and a remedy ten times too large or too small
would be computed."""
_MOST_LONGER = 4.0
"""More training than so many times the present is no advice."""
_SAME_BATCH = 1.2
"""Batches within this factor count as one."""
_NEARLY_ALL = 0.995
"""A part that is printed as 100 %."""
_ALIKE = 0.01
"""Units weigh alike if their effective number is smaller than their number by no more than this part."""
FEWEST_STEPS = 100
"""Steps of training before a verdict: in the first ones the noise scale grows by tens of times."""


@dataclass(frozen=True)
class Estimate:
    """A noise scale, as far as it is known.

    Attributes:
        b_simple: in units; None unless both ends of its interval are known.
        low: lower end of its interval, 0 for an upper bound; None when nothing is known.
        high: upper end, infinite for a lower bound; None when nothing is known.
    """

    b_simple: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether there is an interval or a bound."""
        return self.low is not None and self.high is not None

    def times(self, factor: float) -> Estimate:
        """The same in units of another size."""
        return Estimate(*(None if end is None else end * factor for end in (self.b_simple, self.low, self.high)))

    def in_words(self, unit: str) -> str:
        """With its unit, as `Range.in_words`."""
        return in_units(self.b_simple, self.low, self.high, unit)


@dataclass(frozen=True)
class Verdict:
    """A judgement of the batch size.

    Attributes:
        kind: for a run like this one, from its average; from here on, where there is no average. "unknown" where the
            data allow a batch that is too small and one that is too large.
        kind_now: from here on.
        headline: one sentence for each.
        detail: the consequences, with numbers, what to do next, and the assumption behind them.
        in_short: "the batch is about right" or the like; empty where there is no verdict.
        advice: what would decide the verdict; empty where it is decided, or where it is too early for one.
    """

    kind: Kind
    headline: str
    detail: str
    in_short: str = ""
    kind_now: Kind = "unknown"
    advice: str = ""


_WORDS: dict[Kind, str] = {
    "too_small": "is small",
    "about_right_or_too_small": "is about right or too small",
    "about_right": "is about right",
    "about_right_or_too_large": "is about right or too large",
    "too_large": "is large",
    "unknown": "may be too small, about right or too large",
}


def as_weighed(batch: float, effective: float | None, unit: str) -> tuple[float, str]:
    """A batch as the noise scale counts it: in effective units, where these are fewer, and the name of what it counts.

    Args:
        batch: units per optimizer step.
        effective: their effective number (Kish); None where it is not known.
        unit: plural name of the unit.
    """
    if effective is None or effective > (1 - _ALIKE) * batch:
        return batch, unit
    return effective, f"effective {unit}"


def are_alike(batch: float, other: float) -> bool:
    """Whether two batches are so near to each other that they count as one."""
    return max(batch, other) <= _SAME_BATCH * min(batch, other)


def judge_batch(
    batch: float,
    *,
    unit: str,
    now: Estimate,
    of_run: Estimate | None = None,
    n_steps: int | None = None,
    first_step: int = 1,
    warms_up: bool = False,
    reason: str = "",
    advice: str = "",
    optimizer: str = "",
    metric: str = "euclidean",
) -> Verdict:
    """Judge a batch size by the noise scale of the run so far, and by the noise scale now.

    Args:
        batch: units per optimizer step.
        unit: plural name of the unit.
        now: the noise scale now.
        of_run: its average over the run; None at fixed weights.
        n_steps: steps of training that both stand for; None at fixed weights.
        first_step: the first of them; other parameters were trained before.
        warms_up: whether the learning rate is still rising.
        reason: why the noise scale now is not resolved.
        advice: what would make it known better.
        optimizer: of the run, such as "SGD (β = 0.9)", as `optimizer_kind` in the set-up of its log, for what sonde's
            study found with it; empty where it is not known.
        metric: of the noise scale.

    Returns:
        A `Verdict`. A batch is about right within a factor of `ABOUT_RIGHT` of B_crit: the noise scale, times how far
        B_crit was from it with this optimizer. The verdict names all that the range of B_crit allows, and none in the
        first `FEWEST_STEPS` steps or while the learning rate rises.

    Raises:
        ValueError: unless the batch is positive and finite.

    Example:
        >>> judge_batch(128, unit="images", now=Estimate(410, 330, 520), optimizer="SGD (β = 0.9)").headline
        'The batch of 128 images is about right or too small: B_crit is 406 images [117 – 2,034], from a noise scale \
of 410 images [330 – 520].'
    """
    if not 0 < batch < math.inf:
        raise ValueError(f"batch must be positive and finite, got {batch}: pass the units of one optimizer step")
    size = f"{number(batch, 4)} {unit}"
    of_run = of_run if of_run is not None and of_run.is_known else None
    early = _too_early(n_steps, first_step, warms_up=warms_up)
    if early or not (now.is_known or of_run):
        detail = _sentences("" if now.is_known else reason, early or advice)
        return Verdict("unknown", f"No verdict yet on the batch of {size}.", detail, advice="" if early else advice)
    if now.high == 0:
        return Verdict(
            "unknown",
            f"No verdict on the batch of {size}: no gradient noise was seen.",
            "All pieces had the same gradient: check that they hold different data.",
        )
    following = critical(now, factor_for(unit, optimizer, metric, from_here_on=True))
    kind_now = batch_kind(batch, following)
    if of_run is None:
        scope = "" if n_steps is None else "from here on, "  # at fixed weights there is nothing else
        from_now = f"B_crit is {following.in_words(unit)}, from a noise scale of {now.in_words(unit)}"
        headline = _sentences(f"{scope}the batch of {size} {_WORDS[kind_now]}: {from_now}")
        kind, in_short = kind_now, f"{scope}the batch {_WORDS[kind_now]}"
        costs = scope + _trade_off(batch, following, kind_now, unit)
    else:
        whole = critical(of_run, factor_for(unit, optimizer, metric, from_here_on=False))
        kind = batch_kind(batch, whole)
        run = "a run like this one" if first_step == 1 else f"a run like this one from step {first_step:,} on"
        headline = (
            f"For {run}, the batch of {size} {_WORDS[kind]}: B_crit is {whole.in_words(unit)}, from an average noise "
            f"scale of {of_run.in_words(unit)}."
        )
        in_short = f"for {run}, the batch {_WORDS[kind]}"
        costs = f"In {run}, {_trade_off(batch, whole, kind, unit)}"
        if now.is_known:
            again = " too" if kind_now == kind else f", it {_WORDS[kind_now]}"
            headline += (
                f" From here on{again}: B_crit is {following.in_words(unit)}, from a noise scale of "
                f"{now.in_words(unit)} now."
            )
            in_short += "" if kind_now == "unknown" else f"; from here on{again}"
            costs += f". From here on, {_trade_off(batch, following, kind_now, unit)}"
    if kind_now in ("too_small", "about_right", "too_large"):
        advice = ""  # the interval is narrow enough to decide
    proxy = proxy_in_words(unit, optimizer, metric, of_run=of_run is not None)
    more = advice and f"to know the noise scale better, {advice}"
    return Verdict(kind, headline, _sentences(costs, reason, more, proxy), in_short, kind_now, advice)


def _too_early(n_steps: int | None, first_step: int, *, warms_up: bool) -> str:
    """Why there is no verdict yet, whatever the noise scale is; empty where there may be one."""
    if n_steps is not None and n_steps < FEWEST_STEPS:
        step = first_step - 1 + FEWEST_STEPS
        return f"the noise scale grows fast in the first steps, so no batch is judged before step {step:,}"
    return "the learning rate is still rising, and the noise scale with it" if warms_up else ""


def batch_kind(batch: float, critical: Range) -> Kind:
    """What the critical batch size says of a batch: all that its range allows.

    Args:
        batch: units of one optimizer step.
        critical: B_crit; 0 and infinity are ends that are not known.
    """
    may_be_small = critical.high > ABOUT_RIGHT * batch
    may_be_large = critical.low < batch / ABOUT_RIGHT and batch > 1  # no batch has less than one unit
    if critical.low > ABOUT_RIGHT * batch:
        return "too_small"
    if critical.high < batch / ABOUT_RIGHT and may_be_large:
        return "too_large"
    if may_be_small and may_be_large:
        return "unknown"
    if may_be_small:
        return "about_right_or_too_small"
    return "about_right_or_too_large" if may_be_large else "about_right"


def critical(known: Estimate, factor: Factor) -> Range:
    """The critical batch size, as far as it is known.

    Args:
        known: the noise scale; nothing is known of B_crit where nothing is known of it.
        factor: B_crit over the noise scale, as `proxy.factor_for` has it.
    """
    return critical_range(known.b_simple, known.low or 0.0, math.inf if known.high is None else known.high, factor)


def _trade_off(batch: float, critical: Range, kind: Kind, unit: str) -> str:
    """What another batch size would cost, as far as the range of the critical batch size reaches.

    Of the units, a batch of b′ in place of b needs b′/b times the part that it needs of the steps.
    """
    smaller = kind in ("too_large", "about_right_or_too_large")
    other = max(batch / 2, 1.0) if smaller else batch * 2
    name = "twice the batch" if not smaller else "half the batch" if batch >= 2 else f"a batch of 1 of the {unit}"
    ends = [relative_steps(other, batch, end) for end in (critical.low, critical.high)]
    steps, units = sorted(ends), sorted(end * other / batch for end in ends)
    if critical.low == 0 or math.isinf(critical.high):
        # One end of the range is not known, so one end of each cost is not either.
        most, what = (max(units), unit) if smaller else (max(steps), "steps")
        if most > _NEARLY_ALL:
            return f"{name} may save none of the {what}"
        return f"{name} would need at most {100 * most:.0f} % of the {what}"
    return f"{name} would need {_part(steps)} the steps and {_part(units)} the {unit}"


def relative_steps(other: float, batch: float, noise_scale: float) -> float:
    """Steps that training takes at another batch size, over those at this one: (1 + B/b′)/(1 + B/b)."""
    return batch / other if math.isinf(noise_scale) else (1 + noise_scale / other) / (1 + noise_scale / batch)


def _part(ends: list[float]) -> str:
    """Such as "73 to 75 % of" or "1.5 to 1.7 times"."""
    low, high = (number(end, 2) if ends[1] > 1 else f"{100 * end:.0f}" for end in ends)
    known = low if low == high else f"{low} to {high}"
    return f"{known} times" if ends[1] > 1 else f"{known} % of"


def _sentences(*parts: str) -> str:
    """The parts that are not empty, as sentences."""
    whole = [part[:1].upper() + part[1:].removesuffix(".") for part in parts if part]
    return ". ".join(whole) + "." if whole else "The data do not resolve the noise scale."


# What would make the noise scale known better: measuring more windows, more training, or more units.


def windows_needed(log_error: float | None, n_windows: int, *, power: int = 2) -> int | None:
    """How many more windows until the standard error of log B_simple is that of ± 20 %.

    Args:
        log_error: the standard error now; None where it is not known.
        n_windows: windows that it rests on.
        power: of the error's ratio by which the number of windows grows.

    Returns:
        The number, 0 when it is reached; None when it is not known.
    """
    if log_error is None or log_error > GUESSED or not n_windows:
        return None
    return max(math.ceil(n_windows * ((log_error / WELL_KNOWN) ** power - 1) - 1e-9), 0)


def advise(status: str, log_error: float | None, *, n_steps: int, every: float) -> str:
    """What to do about a noise scale of which only a bound, or a wide interval, is known.

    Args:
        status: of the reading.
        log_error: standard error of log B_simple to first order; None where |G|² or tr Σ is not positive so far.
        n_steps: steps of training so far.
        every: one window in so many was measured of late.

    Returns:
        One sentence without its full stop; empty where nothing is needed.
    """
    if not n_steps or (status == "resolved" and (log_error is None or log_error <= _WIDE)):
        return ""
    target = _WIDE if status == "resolved" else BARELY_KNOWN
    factor = None  # of windows
    if log_error is not None and log_error <= GUESSED and n_steps >= FEWEST_STEPS:
        factor = max((log_error / target) ** 2, 1.5)  # below 1.5, a remedy would change little
    if every > 1.5:
        denser = 1 if factor is None else int(every / factor)
        if denser <= 1:
            return "measure every window (every=1)"
        return f"measure one window in {denser} (every={denser}, or a larger budget=)"
    if factor is None:
        what = "tr Σ" if status == "upper_bound" else "|G|²"
        more = "split each batch into more pieces" if status == "upper_bound" else "use more units in each window"
        return f"train on, or {more}; how much cannot be computed before {what} is known better"
    if factor <= _MOST_LONGER:
        return f"train about {_rounded(n_steps * (factor - 1))} more steps"
    # The variance of |G|² falls with the square of the units, where noise is large; that of tr Σ with the pieces.
    if status == "upper_bound":
        return f"split each batch into {factor:.1f} times as many pieces, or use as many times the units in such pieces"
    return f"use about {math.sqrt(factor):.1f} times as many units in each window"


def _rounded(count: float) -> int:
    """Two digits, upwards: the count is no better known, and a log repeats it less often."""
    step = int(10 ** max(math.floor(math.log10(count)) - 1, 0))
    return math.ceil(count / step - 1e-9) * step
