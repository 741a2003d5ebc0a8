"""How many units a batch size needs, by two laws of optimizers, and which of them fits what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sonde.stats.intervals import student_t_quantile

_GRID = 400
"""Critical batch sizes that are tried, evenly in their logs."""
_REACH = 1000.0
"""They reach so many times beyond the batches that were measured."""


def units_by_noise(batch: float, critical: float) -> float:
    """Units needed over the fewest: 1 + B/B_crit.

    Reference:
        McCandlish et al. 2018, arXiv:1812.06162, equation 2.11.
    """
    return 1 + batch / critical


def units_by_sign(batch: float, critical: float) -> float:
    """Units needed over the fewest where steps have a fixed size, as those of the sign: fewest at 4 critical batches.

    The loss falls per step by Δ_max (1 − √(𝓑/B))², and not at all below 𝓑: there the result is infinite.

    Reference:
        Naganuma et al. 2026, arXiv:2602.03001.
    """
    if batch <= critical:
        return math.inf
    return batch / (16 * critical * (1 - math.sqrt(critical / batch)) ** 2)


LAWS: Mapping[str, Callable[[float, float], float]] = {"noise": units_by_noise, "sign": units_by_sign}
"""By name: units over the fewest, of a batch and the critical batch."""


@dataclass(frozen=True)
class LawFit:
    """A law fitted to the units that several batch sizes needed.

    Attributes:
        law: its name.
        critical: the critical batch that fits best.
        low: lower end of its 95 % interval; 0 where every smaller one fits too.
        high: upper end; infinite where every larger one fits too.
        misfit: sum of squared errors of the logs, each over its own standard error.
        dof: batches less the two numbers that are fitted.
    """

    law: str
    critical: float
    low: float
    high: float
    misfit: float
    dof: int


def fit_law(law: str, batches: Sequence[float], logs: Sequence[float], errors: Sequence[float], n_seeds: int) -> LawFit:
    """Fit the critical batch of a law to the units that batch sizes needed for one loss.

    Args:
        law: of `LAWS`.
        batches: at least 3 sizes.
        logs: log of the units that each needed, up to a common constant.
        errors: standard error of each log.
        n_seeds: trainings of each, for Student's t.

    Raises:
        ValueError: for fewer than 3 batches.

    Example:
        >>> batches = [8, 16, 32, 64]
        >>> fit = fit_law("noise", batches, [math.log(1 + b / 20) for b in batches], [0.02] * 4, n_seeds=5)
        >>> round(fit.critical)
        20
    """
    if len(batches) < 3:
        raise ValueError(f"a law with two unknowns needs 3 batch sizes or more, got {len(batches)}")
    # The critical batches whose misfit exceeds the least by no more than Student's t squared.
    more = student_t_quantile(0.975, max(len(batches) * (n_seeds - 1), 1)) ** 2
    low, high = min(batches) / _REACH, max(batches) * _REACH
    opens_low = opens_high = False
    for _ in range(2):  # the second time finely, around those that fit
        grid = [low * (high / low) ** (k / _GRID) for k in range(_GRID + 1)]
        misfits = [_misfit(law, batches, logs, errors, critical) for critical in grid]
        best = min(range(len(grid)), key=misfits.__getitem__)
        fits = [k for k, misfit in enumerate(misfits) if misfit <= misfits[best] + more]
        opens_low, opens_high = opens_low or fits[0] == 0, opens_high or fits[-1] == _GRID
        low, high = grid[max(fits[0] - 1, 0)], grid[min(fits[-1] + 1, _GRID)]
    return LawFit(
        law,
        grid[best],
        0.0 if opens_low else grid[fits[0]],
        math.inf if opens_high else grid[fits[-1]],
        misfits[best],
        len(batches) - 2,
    )


def _misfit(
    law: str, batches: Sequence[float], logs: Sequence[float], errors: Sequence[float], critical: float
) -> float:
    """Squared errors over their variances, at the constant that fits best."""
    said = [LAWS[law](batch, critical) for batch in batches]
    if not all(map(math.isfinite, said)):
        return math.inf
    rest = [log - math.log(value) for log, value in zip(logs, said, strict=True)]
    weights = [1 / error**2 for error in errors]
    mean = sum(w * r for w, r in zip(weights, rest, strict=True)) / sum(weights)
    return sum(w * (r - mean) ** 2 for w, r in zip(weights, rest, strict=True))
