"""How far a noise scale is known, by the numbers that a log holds of it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sonde.batch_size.stats.critical_batch import as_weighed
from sonde.stats.intervals import RatioInterval

PROMPT_NOISE = "gns_prompts/b_simple"
"""The metric with the noise scale in prompts."""


def logged_interval(metrics: Mapping[str, float | None], name: str) -> RatioInterval:
    """The interval of a noise scale whose estimate is the metric `name` and whose ends are `name` + "_low", "_high".

    A log holds no infinity: the unknown end of a bound is None. The estimate is None unless both ends are known.

    Example:
        >>> metrics = {"gns_prompts/b_simple": None, "gns_prompts/b_simple_low": 0.0, "gns_prompts/b_simple_high": 12.0}
        >>> logged_interval(metrics, "gns_prompts/b_simple").status
        'upper_bound'
    """
    low, high = (metrics.get(f"{name}_{end}") for end in ("low", "high"))
    if low is None:
        return RatioInterval("unresolved", None, None)
    if metrics.get(name) is not None:
        return RatioInterval("resolved", low, high)
    if high is None:
        return RatioInterval("lower_bound", low, math.inf)
    return RatioInterval("upper_bound", low, high)


def logged_batch(metrics: Mapping[str, float | None], unit: str) -> tuple[float | None, str]:
    """The batch size as the noise scale counts it, and the name of what it counts; see `as_weighed`."""
    batch = metrics.get("gns/units_per_window")
    return as_weighed(batch, metrics.get("gns/effective_units"), unit) if batch else (None, unit)
