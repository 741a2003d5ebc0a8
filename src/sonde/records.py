"""What a run writes down: the kinds of record, the metrics with their units, and the one interface they go through.

A run is a sequence of records, each a flat JSON object with a `kind`:

- `header`, once, first: versions, the set-up that was found, the name of the unit, the user's metadata.
- `reading`, every `log_every` windows: `metrics` (a number, or null where it is not known), `groups`, `status`,
  `reason`, `dropped`, and `alerts`: what has looked wrong since the reading before it, a message by name.
- `alert`, when something looks wrong for the first time, with its `name` and a `message` in plain words.
- `end`, when the probe was closed; a run without it was cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

SCHEMA = 1
"""Raised when a reader of older records could misunderstand newer ones."""


class Sink(Protocol):
    """Somewhere records go. Called on rank 0 only, when a window ends; it should return soon."""

    def write(self, record: Mapping[str, object]) -> None:
        """Take one record; its values are JSON values."""

    def close(self) -> None:
        """No record follows."""


@dataclass(frozen=True)
class Metric:
    """A metric's unit and meaning, for axes and legends. `{unit}` stands for the name of the run's unit."""

    unit: str
    meaning: str


METRICS: dict[str, Metric] = {
    "gns/b_simple": Metric("{unit}", "gradient noise scale tr Σ/|G|²"),
    "gns/b_simple_low": Metric("{unit}", "lower end of its 95 % interval"),
    "gns/b_simple_high": Metric("{unit}", "upper end of its 95 % interval; null when there is none"),
    "gns/grad_sq": Metric("gradient²", "squared norm of the true gradient |G|², unclamped"),
    "gns/trace_cov": Metric("gradient² · {unit}", "variance of one unit's gradient, tr Σ"),
    "gns/consistency": Metric(
        "ratio", "tr Σ seen within ranks over tr Σ seen between ranks; about 1 when data are sound"
    ),
    "gns/effective_units": Metric("{unit}", "effective number of units in a window (Kish)"),
    "gns/units_per_window": Metric("{unit}", "units in a window: the batch size"),
    "gns/windows_needed": Metric("windows", "windows still needed for ± 20 %; null when not known"),
    "gns/scale": Metric("ratio", "κ: the optimizer's gradient over the sum of the pieces' gradients"),
    "gns/scale_residual": Metric("ratio", "part of the gradient that is not that multiple"),
    "grad/norm": Metric(
        "gradient", "norm of the rank-averaged gradient before clipping or any later scaling, mean over the interval"
    ),
    "grad/clip_fraction": Metric("fraction", "share of the windows that were clipped"),
    "cost/seconds_per_window": Metric("seconds", "host time spent inside the probe, per window"),
    "cost/fraction": Metric("fraction", "that over the time between windows"),
    "run/units_seen": Metric("{unit}", "units consumed since the start"),
    "run/units_per_second": Metric("{unit} per second", "units consumed per second of wall time"),
}
"""Every metric that sonde itself writes; a user's own scalars are written under the names they were logged with."""
