"""What the log gets of the metrics after the headline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from sonde.batch_size.stats.reading import NoiseScaleReading
from sonde.batch_size.stats.solved_window import SolvedWindow
from sonde.probe import Metric, ReportSection
from sonde.record_values import json_number

_MEANINGS = {
    "b_simple": Metric("{unit}", "noise scale now"),
    "b_simple_low": Metric("{unit}", "lower end of its 95 % interval; 0 for an upper bound"),
    "b_simple_high": Metric("{unit}", "upper end of its 95 % interval; null without one"),
    "b_simple_average": Metric("{unit}", "noise scale of the run so far, each step weighted by its progress"),
    "b_simple_average_low": Metric("{unit}", "lower end of that average's 95 % interval"),
    "b_simple_average_high": Metric("{unit}", "upper end of that average's 95 % interval; null without one"),
    "grad_sq": Metric("norm²", "squared norm of the true gradient, unclamped, over about half the run"),
    "trace_cov": Metric("norm² · {unit}", "noise of one unit's gradient, over about half the run"),
}


def declared(names: Iterable[str]) -> dict[str, Metric]:
    """The metrics that a log gets, by name."""
    return {
        f"gns/{name}/{key}": Metric(metric.unit, f"{metric.meaning}, metric {name!r}")
        for name in names
        for key, metric in _MEANINGS.items()
    }


def sections(names: Iterable[str]) -> tuple[ReportSection, ...]:
    """The report's section with the noise scale in each metric; none without further metrics."""
    curves = tuple(f"gns/{name}/b_simple" for name in names)
    text = (
        "The noise scale of the same gradients in other metrics, now, as above. The "
        "verdict speaks of the first metric alone."
    )
    return (ReportSection("Noise scale in other metrics", text, curves),) if curves else ()


def of_readings(readings: Mapping[str, NoiseScaleReading]) -> dict[str, float | None]:
    """The metrics of readings, by the metrics that these were taken in."""
    values: dict[str, float | None] = {}
    for name, reading in readings.items():
        average = reading.average
        numbers = (
            reading.b_simple,
            reading.low,
            reading.high,
            average.b_simple if average else None,
            average.low if average else None,
            average.high if average else None,
            reading.grad_sq,
            reading.trace_cov,
        )
        for key, value in zip(_MEANINGS, numbers, strict=True):
            values[f"gns/{name}/{key}"] = value if value is None or math.isfinite(value) else None
    return values


def of_windows(windows: Mapping[str, SolvedWindow | None]) -> dict[str, float | None]:
    """tr Σ and |G|² of one window, by metric; None where it was dropped."""
    values: dict[str, float | None] = {}
    for name, solved in windows.items():
        values[f"gns/{name}/trace_cov"] = None if solved is None else json_number(solved.total.trace_cov)
        values[f"gns/{name}/grad_sq"] = None if solved is None else json_number(solved.total.grad_sq)
    return values
