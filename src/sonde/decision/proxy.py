"""How far B_simple was from the critical batch size: in sonde's study, by optimizer and metric, and in published runs.

The tables at the end are written by `python -m evidence.figures`, from the results of the study.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sonde.decision.law import Range
from sonde.stats.intervals import RatioInterval
from sonde.wording import number

_OF_95 = 1.645 / 1.96
"""Length of a 90 % interval over that of a 95 % interval."""


@dataclass(frozen=True)
class Factor:
    """The critical batch size of whole trainings, over B_simple averaged over each training.

    Attributes:
        median: over the trainings; None where nothing says what is usual.
        low: 5 % of the trainings are below it.
        high: 5 % are above it.
        n_trainings: in which B_simple was measured.
        n_tasks: that were trained.
    """

    median: float | None
    low: float
    high: float
    n_trainings: int
    n_tasks: int


PUBLISHED = Factor(None, 0.1, 20.0, 0, 0)
"""Of runs that others published: McCandlish et al. 2018, arXiv:1812.06162."""
OF_BRANCHES: Mapping[str, Factor] = {
    "SGD (β = 0)": Factor(2.3, 0.15, 5.2, 36, 3),
    "SGD (β = 0.9)": Factor(0.99, 0.29, 4.9, 36, 3),
    "Adam or AdamW (β = 0.9)": Factor(0.58, 0.053, 1.8, 36, 3),
    "Muon (β = 0.95, nesterov)": Factor(0.55, 0.094, 1.7, 35, 3),
}
"""The branched critical batch size over B_simple at the same weights, from `evidence/tables.md`: a branch shows what a
batch does from there on, at the usual rule of the rate."""
IN_RL: Mapping[str, Factor] = {"SGD": Factor(1.2, 0.66, 1.6, 8, 2), "Adam": Factor(2.3, 1.8, 3.0, 8, 2)}
"""The same for policies trained by GRPO, both batches in prompts: smallest, median and largest of 8 cases of the study,
from `evidence/tables.md`."""


def factor_for(unit: str, optimizer: str, metric: str, *, from_here_on: bool) -> Factor:
    """How the critical batch size follows from B_simple: as the study found, or else as in published runs.

    Args:
        unit: plural name of the unit, or "effective " and that name.
        optimizer: as `batch_size.optimizers.kind_of` names it; empty where it is not known.
        metric: of B_simple.
        from_here_on: for what follows, from B_simple now; otherwise for a whole run, from its average.
    """
    if unit.endswith("prompts"):
        found = next((each for name, each in IN_RL.items() if optimizer.startswith(name)), None)
        return found if found and metric == "euclidean" else PUBLISHED
    if from_here_on:
        return OF_BRANCHES.get(optimizer, PUBLISHED) if metric == "euclidean" else PUBLISHED
    return FACTORS.get((optimizer, metric), PUBLISHED)


def critical_range(known: RatioInterval, factor: Factor) -> Range:
    """The critical batch size B_crit = B_simple × factor, as a range with about 90 % of the probability.

    Two errors are combined: of B_simple, and of the factor. They have nothing to do with each other and both are errors
    of logarithms, so on each side of the middle their lengths are added in quadrature. The 95 % interval of B_simple is
    first made one of 90 %, which the factor's range is. Where only a bound of B_simple is known, or no usual factor,
    the ends are multiplied.

    Args:
        known: the noise scale; nothing is known of B_crit where nothing is known of it.
        factor: of the optimizer.

    Example:
        >>> found = critical_range(RatioInterval("resolved", 32.0, 50.0, ratio=40.0), Factor(1.5, 0.84, 2.8, 40, 4))
        >>> round(found.middle), round(found.low), round(found.high)
        (60, 33, 115)
    """
    low, high = known.low or 0.0, math.inf if known.high is None else known.high
    if known.ratio is None or factor.median is None:
        return Range(None, low * factor.low, high * factor.high)
    down = math.hypot(_OF_95 * _log(known.ratio, low), _log(factor.median, factor.low))
    up = math.hypot(_OF_95 * _log(high, known.ratio), _log(factor.high, factor.median))
    middle = known.ratio * factor.median
    return Range(middle, middle * math.exp(-down), middle * math.exp(up))


def _log(above: float, below: float) -> float:
    return math.inf if below <= 0 or math.isinf(above) else math.log(above / below)


def factor_in_words(factor: Factor, optimizer: str, unit: str, *, from_here_on: bool) -> str:
    """What B_simple is worth as a proxy for B_crit, in one sentence.

    Args:
        factor: as of `factor_for`.
        optimizer: its name; empty where it is not known.
        unit: plural name of the unit.
        from_here_on: whether B_crit is of what follows.

    Example:
        >>> of = "SGD (β = 0.9)"
        >>> factor_in_words(OF_BRANCHES[of], of, "images", from_here_on=True)
        "With SGD (β = 0.9), B_crit was 0.29 to 4.9 times B_simple now (median 0.99) in 90 % of 36 branches of sonde's \
study."
    """
    if factor == PUBLISHED:
        return (
            f"{'This optimizer or metric was not in' if optimizer else 'The log does not say the optimizer for'} "
            "sonde's study: B_crit is taken to be 0.1 to 20 times B_simple, as in published runs (McCandlish et al. "
            "2018, arXiv:1812.06162)."
        )
    of = "B_simple now" if from_here_on else "the run's average B_simple"
    where = f"90 % of {factor.n_trainings} {'branches' if from_here_on else 'trainings'}"
    if unit.endswith("prompts"):
        of, where = "B_simple", f"{factor.n_trainings} cases of GRPO"
    low, median, high = (number(end, 2) for end in (factor.low, factor.median, factor.high))
    return f"With {optimizer}, B_crit was {low} to {high} times {of} (median {median}) in {where} of sonde's study."


def law_in_words() -> str:
    """How well the law of the trade-off was found to hold, whatever the optimizer."""
    n, of = LAW_FITS_BETTER
    return (
        "This law is taken for all optimizers: in sonde's study of SGD, AdamW and Muon, it fitted better than the law "
        f"for steps of signs in {n} of {of} cases."
    )


# From here on written by `python -m evidence.figures`.

FACTORS: Mapping[tuple[str, str], Factor] = {
    ("SGD (β = 0)", "euclidean"): Factor(median=0.9, low=0.31, high=1.5, n_trainings=40, n_tasks=4),
    ("SGD (β = 0)", "sign"): Factor(median=0.74, low=0.23, high=2.5, n_trainings=40, n_tasks=4),
    ("SGD (β = 0.9)", "euclidean"): Factor(median=1.7, low=0.77, high=4.5, n_trainings=40, n_tasks=4),
    ("SGD (β = 0.9)", "sign"): Factor(median=1.6, low=0.79, high=4.8, n_trainings=40, n_tasks=4),
    ("Adam or AdamW (β = 0.9)", "euclidean"): Factor(median=1.5, low=0.84, high=2.8, n_trainings=40, n_tasks=4),
    ("Adam or AdamW (β = 0.9)", "adam"): Factor(median=1.1, low=0.17, high=2.6, n_trainings=40, n_tasks=4),
    ("Adam or AdamW (β = 0.9)", "sign"): Factor(median=1.7, low=0.32, high=5.9, n_trainings=40, n_tasks=4),
    ("Muon (β = 0.95, nesterov)", "euclidean"): Factor(median=1.6, low=0.46, high=3.3, n_trainings=40, n_tasks=4),
}
"""By the optimizer in words, and the metric; without ranges of more than 20 times."""
LAW_FITS_BETTER = (42, 48)
"""Cases (optimizer, task, target) that 1 + B/B_crit fits better than the law of signs, and all cases."""
