"""The columns of the noise scale's readings. A row is all that a new number needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sonde.stats.columns import BLUE, GREEN, INK, ORANGE, Columns, Curve, Metric, Panel, interval
from sonde.wording import count, duration, percent

UNIT = "{unit}"
NORM, CLIP_FRACTION, MAX_NORM, UPDATE_NORM = "grad/norm", "grad/clip_fraction", "grad/max_norm", "update/norm"
NOISE_SCALE, AVERAGE, BATCH = "gns/b_simple", "gns/b_simple_average", "gns/units_per_window"

OVER_RUN, MOMENTS, NORMS = "Noise scale and batch size", "Noise and signal", "Gradient norm and clipping"
"""Sections of the report."""
_SCALE = Panel("Noise scale ({unit})", OVER_RUN, "log", height=380)
_MOMENTS = Panel("Squared gradient norm", MOMENTS, "log", height=340)
_NORM = Panel("Gradient norm", NORMS)
_CLIPPED = Panel("Clipped windows", NORMS, ends=(0.0, 1.0), height=170)
_UPDATE = Panel("Norm of the update", NORMS, height=200)
_BELOW_0 = "|G|² estimated at or below 0: not yet distinguishable from 0"


def _covered(reading: Any) -> float:
    return reading.coverage.part if reading.coverage else 1.0


OF_WINDOW: Columns = {
    "gns/trace_cov": Metric(
        "gradient² · {unit}", "noise tr Σ: variance of the gradient of one unit, over about half the run",
        panel=_MOMENTS, curve=Curve("line", ORANGE)),
    "gns/grad_sq": Metric(
        "gradient²", "signal |G|²: squared norm of the true gradient, unclamped, over about half the run",
        panel=_MOMENTS, curve=Curve("line", GREEN, outside=_BELOW_0)),
}  # fmt: skip
"""What a window on its own has too."""
OF_EACH_METRIC: Columns = {
    **interval(NOISE_SCALE, UNIT, "noise scale now", panel=_SCALE, curve=Curve("interval", BLUE)),
    **interval(AVERAGE, UNIT, "average over the run: noise scale so far, each step weighted by its progress",
               of="average", value="ratio", panel=_SCALE, curve=Curve("dotted", INK)),
    **OF_WINDOW,
}  # fmt: skip
"""What is logged in every metric that gradients are measured in."""
OF_READING: Columns = {
    **OF_EACH_METRIC,
    BATCH: Metric(UNIT, "batch size: units in a window", panel=_SCALE, curve=Curve("dashed", ORANGE)),
    "gns/effective_units": Metric(UNIT, "effective number of units in a window (Kish)"),
    "gns/scatter": Metric("ratio", "standard deviation of log(tr Σ/|G|²) of single windows about the level, at most"),
    "gns/first_step": Metric("step", "first step of the average; other parameters were trained before"),
    "gns/consistency": Metric("ratio", "tr Σ within ranks over tr Σ between ranks; about 1 when data are sound",
                              term="Consistency"),
    "gns/u": Metric("1/{unit}", "mean of one over a piece's units, weighted as the pieces are; gns_mu is tr Σ·u/|G|²"),
    "gns/windows_needed": Metric("windows", "measured windows still needed for ± 20 %; null when not known"),
    "gns/warms_up": Metric("0 or 1", "1 while the learning rate has only risen and still rises: no batch is judged"),
    "gns/scale": Metric("ratio", "κ, the optimizer's gradient over the sum of the pieces' gradients", term="Scale"),
    "gns/scale_residual": Metric("ratio", "part of the optimizer's gradient that κ does not explain",
                                 term="Beside the scale", as_text=percent),
    "gns/covered": Metric("fraction", "part of |F|² that the noise scale speaks of; 1 for all", _covered),
}  # fmt: skip
"""Numbers of a `NoiseScaleReading`."""
OF_WINDOWS: Columns = {
    NORM: Metric("gradient", "gradient norm: averaged over ranks, before clipping or any later scaling",
                 panel=_NORM, curve=Curve("line", BLUE)),
    MAX_NORM: Metric("gradient", "threshold of the clip: a larger norm is scaled down",
                     panel=_NORM, curve=Curve("dashed", ORANGE)),
    CLIP_FRACTION: Metric("fraction", "clipped: share of the windows that were clipped",
                          panel=_CLIPPED, curve=Curve("filled", ORANGE, alpha=0.2), as_text=percent),
    UPDATE_NORM: Metric("parameter", "norm of the update: what a step changes in the parameters",
                        panel=_UPDATE, curve=Curve("line", GREEN)),
}  # fmt: skip
"""Scalars of windows, which come under their names. A reading has their means, as of the user's own."""
OF_INTERVAL: Columns = {
    "cost/seconds_per_window": Metric("seconds", "host time that the probe costs, per window of training",
                                      term="Overhead", as_text=duration),
    "cost/fraction": Metric("fraction", "that host time over the time between windows"),
    "cost/share": Metric("fraction", "part of the time that measuring takes, in the last windows", "cost.share",
                         term="Cost", as_text=percent),
    "cost/share_error": Metric("fraction", "standard error of cost/share", "cost.error"),
    "cost/every": Metric("windows", "windows of training for each measured one now", "cost.every",
                         term="Measured windows"),
    "run/units_seen": Metric(UNIT, "units seen: since the start", panel=_SCALE, curve=Curve("none"), as_text=count),
    "run/units_per_second": Metric("{unit} per second", "units consumed per second of wall time"),
}  # fmt: skip
"""Numbers of the windows since the reading before."""
METRICS: Columns = {**OF_READING, **OF_WINDOWS, **OF_INTERVAL}
_NOW = (NOISE_SCALE, *("_".join((NOISE_SCALE, end)) for end in ("low", "high")))
OF_EACH_UNIT: Columns = {name: METRICS[name] for name in (*_NOW, BATCH)}
"""What is logged in every unit that pieces are counted in."""


def in_metric(column: str, metric: str) -> str:
    """The name of a column in another metric of the gradients: gns/sign/b_simple."""
    return column.replace("gns/", f"gns/{metric}/") if metric else column


def further_columns(units: Iterable[str], first: str, metrics: Iterable[str]) -> Columns:
    """The columns that say the noise scale again in further units, and in other metrics of the gradients.

    Args:
        units: plural names of the further units.
        first: of the independent sample.
        metrics: after the headline.
    """
    in_units = {
        f"{name}_{unit}": replace(row, unit=unit, meaning=f"{row.meaning}, at the average {unit} of one of the {first}")
        for unit in units
        for name, row in OF_EACH_UNIT.items()
    }
    in_metrics = {
        in_metric(name, metric): replace(
            row, unit=row.unit.replace("gradient²", "norm²"), meaning=f"{row.meaning}, metric {metric!r}"
        )
        for metric in metrics
        for name, row in OF_EACH_METRIC.items()
    }
    return in_units | in_metrics
