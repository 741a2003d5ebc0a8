"""What may be known of a training, drawn by hypothesis, and facts by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

from hypothesis import strategies as st

from sonde.decision.decide import Wanted, decide
from sonde.decision.facts import Facts
from sonde.decision.law import Range
from sonde.decision.plans import Present
from sonde.decision.time_curve import TimeCurve, Timing
from sonde.stats.intervals import RatioInterval

powers = st.integers(0, 4).map(lambda k: 2**k)
ADAMW = "Adam or AdamW (β = 0.9)"
SETTINGS = {"name": "AdamW", "lr": 1e-3, "betas": [0.99, 0.999], "eps": 1e-8, "weight_decay": 0.1}
"""Of an Adam whose rule ends at 100 times the batch."""


def resolved(ratio: float, width: float = 1.05) -> RatioInterval:
    return RatioInterval("resolved", ratio / width, ratio * width, ratio=ratio)


def facts(batch: float, average: float, now: float | None = None, **more: Any) -> Facts:
    """Of 1,000 steps with AdamW, whose noise scales are known to 5 %."""
    known = {"optimizer": ADAMW, "settings": (SETTINGS,), "n_steps": 1000, "name": "run"} | more
    return Facts("rows", batch, resolved(now or average), resolved(average), **known)


def tried(*sizes: tuple[float, float], accumulation: int = 1, ranks: int = 1, beside: float = 0.0) -> TimeCurve:
    """A curve of micro-batches and the seconds of a step."""
    return TimeCurve(tuple(Timing(m, accumulation, ranks, seconds, beside) for m, seconds in sizes))


@st.composite
def ranges(draw: st.DrawFn) -> Range:
    """Of B_crit: with a middle, without, and with one end alone."""
    middle, width = math.exp(draw(st.floats(-1, 12))), math.exp(draw(st.floats(0.01, 2)))
    low, high = middle / width, middle * width
    known = [Range(middle, low, high), Range(None, low, high), Range(None, low, math.inf), Range(None, 0.0, high)]
    return draw(st.sampled_from(known))


@st.composite
def curves(draw: st.DrawFn, micro: float, accumulation: int, ranks: int) -> TimeCurve:
    """The present step alone; or further sizes beside it, or without it, perhaps with what is beside, and with the end
    of memory.
    """
    of_micro, beside = draw(st.floats(1e-3, 1)), draw(st.floats(0, 1))
    known = beside if draw(st.booleans()) else None
    timings, size = [], float(micro * draw(st.sampled_from([1, 1, 1, 4])))
    for rise in (1.0, *draw(st.lists(st.floats(1.0, 4.0), max_size=3))):
        of_micro *= rise
        timings.append(Timing(size, accumulation, ranks, accumulation * of_micro + beside, known))
        size *= 4
    return TimeCurve(tuple(timings), draw(st.sampled_from([math.inf, size / 2])))


# A naive computation of costs.


def ends_of(present: Present, critical: Range, split: tuple[int, int, int], batch: float) -> tuple[list[float], ...]:
    """Steps, and time over that of the present plan, at each end of B_crit and each end of the time of a step."""
    ranks, accumulation, micro = split
    now, (step, _) = present.step_time, present.curve.of_step(micro, accumulation, ranks)
    ratios = (step.low / now.high, step.high / now.low)
    if split == (present.ranks, present.accumulation, present.micro_batch):
        ratios = (1.0, 1.0)
    steps, times = [], []
    for c in (critical.low, critical.high):
        part = present.batch / batch if math.isinf(c) else (1 + c / batch) / (1 + c / present.batch)
        steps.append(present.steps * part)
        times += [part * ratio for ratio in ratios]
    return steps, times


def every_split(present: Present, batch: int, at_most: int) -> list[tuple[int, int, int]]:
    """Ranks, accumulation and micro-batch, whose product is the batch: all powers of two."""
    sizes = [2**k for k in range(11)]
    largest = present.curve.largest
    splits = itertools.product([n for n in sizes if n <= at_most], sizes)
    return [(r, a, batch // r // a) for r, a in splits if r * a <= batch and batch // r // a <= largest]


FLAT = tried((64, 0.010), (256, 0.012), (1024, 0.020), (4096, 0.080))


def advised(known: Facts, **wanted: Any) -> tuple[str, float | None]:
    """The kind of decision, and the batch that it is for."""
    found = decide(known, Wanted(**wanted))
    best = found.leading and found.leading.best
    return found.kind, best.batch if best else None
