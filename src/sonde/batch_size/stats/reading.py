"""A reading of the noise scale, for people and programs, and alerts about what looks wrong in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sonde.stats.intervals import Status
from sonde.wording import number

_UNRESOLVED_AFTER = 50
"""Windows after which an unresolved reading is an alert."""


@dataclass(frozen=True)
class GroupReading:
    """The noise scale of one group of parameters; fields as in `NoiseScaleReading`."""

    status: Status
    b_simple: float | None
    low: float | None
    high: float | None
    grad_sq: float | None
    trace_cov: float | None


@dataclass(frozen=True)
class NoiseScaleReading:
    """A reading of the gradient noise scale. Squares are in units of the rank-averaged gradient before clipping.

    Attributes:
        b_simple: B_simple = tr Σ/|G|² in units; None unless resolved.
        low: lower end of the interval of B_simple; None when unresolved.
        high: upper end; infinite when only a lower bound is known, None when unresolved.
        status: "resolved", "lower_bound" (B_simple > low) or "unresolved".
        reason: why B_simple is not resolved; empty when it is resolved.
        grad_sq: running |G|², which may be negative; None before the first window.
        trace_cov: running tr Σ per unit; None before the first window.
        units_per_window: the batch size: average units in a window; None before the first window.
        effective_units: effective number of units (Kish) in the last window.
        u: Σ a_k/n_k of the last window, the mean of 1/n_k over its pieces; other systems report tr Σ·u/|G|².
        windows: windows averaged.
        dropped: windows left out, by reason.
        windows_needed: windows still needed for ± 20 %; None when their number cannot be estimated.
        consistency: tr Σ within ranks over tr Σ between ranks, about 1 when data are sound; None when there is no
            second rank or no second micro-batch to compare.
        doubts: reasons not to trust the numbers: messages by name; usually empty. A reading with doubts is unresolved
            and gives no numbers.
        scale: κ of the last sound window, the optimizer's gradient over the sum of the pieces' gradients.
        scale_residual: the part of the last window's gradient that κ does not explain.
        unit: plural name of the unit.
        groups: by parameter group, in the model's order.
    """

    b_simple: float | None
    low: float | None
    high: float | None
    status: Status
    reason: str
    grad_sq: float | None
    trace_cov: float | None
    units_per_window: float | None
    effective_units: float | None
    u: float | None
    windows: int
    dropped: Mapping[str, int]
    windows_needed: int | None
    consistency: float | None
    doubts: Mapping[str, str]
    scale: float | None
    scale_residual: float | None
    unit: str
    groups: Mapping[str, GroupReading] = field(repr=False)

    def metrics(self) -> dict[str, float | None]:
        """The numbers by metric name; None where a number is unknown or unbounded."""
        numbers = {
            "gns/b_simple": self.b_simple,
            "gns/b_simple_low": self.low,
            "gns/b_simple_high": self.high,
            "gns/grad_sq": self.grad_sq,
            "gns/trace_cov": self.trace_cov,
            "gns/consistency": self.consistency,
            "gns/effective_units": self.effective_units,
            "gns/u": self.u,
            "gns/units_per_window": self.units_per_window,
            "gns/windows_needed": self.windows_needed,
            "gns/scale": self.scale,
            "gns/scale_residual": self.scale_residual,
        }
        return {name: value if value is None or math.isfinite(value) else None for name, value in numbers.items()}

    def __str__(self) -> str:
        batch = f"batch {number(self.units_per_window, 4)}" if self.units_per_window is not None else "no window yet"
        seen = f"{batch}, {self.windows} windows" + (f", {sum(self.dropped.values())} dropped" if self.dropped else "")
        if self.status == "resolved":
            return f"B_simple {number(self.b_simple)} {self.unit} [{number(self.low)} – {number(self.high)}], {seen}"
        if self.status == "lower_bound":
            more = f", about {self.windows_needed} more for ± 20 %" if self.windows_needed else ""
            return f"B_simple > {number(self.low)} {self.unit}, {seen}{more}"
        return f"B_simple not known yet ({self.reason}), {seen}"


def find_alerts(reading: NoiseScaleReading) -> dict[str, str]:
    """Messages about what looks wrong in a reading.

    Args:
        reading: any reading.

    Returns:
        Messages by name: "changed", "same_data", "unresolved"; empty when nothing looks wrong.
    """
    alerts = dict(reading.doubts)
    if not alerts and reading.status != "resolved" and reading.windows >= _UNRESOLVED_AFTER:
        needed = reading.windows_needed
        alerts["unresolved"] = (
            f"|G|² cannot yet be distinguished from 0 after {reading.windows} windows, so the noise scale has no upper "
            f"bound: {f'measure about {needed} more windows' if needed else 'use a longer horizon'}, or more pieces in "
            "each window"
        )
    return alerts
