"""What the report shows, in order: each figure with the words a stranger needs to read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sonde.records import METRICS
from sonde.runs.reader import Reading, Run
from sonde.runs.report.curve_style import time_axis
from sonde.runs.report.curves import moments_curve, noise_scale_curve, norm_curve, value_curve
from sonde.runs.report.figures import Plot, Table
from sonde.runs.report.groups_plot import MAX_GROUPS, groups_plot
from sonde.runs.report.timeline import Measured, Timeline, position_text, timeline
from sonde.runs.report.tradeoff_plot import tradeoff_plot
from sonde.wording import percent, plural, shorten

MAX_VALUES = 4
"""Logged values drawn; the page stays small and readable whatever a run logs."""


@dataclass(frozen=True)
class Section:
    """One section of the report.

    Attributes:
        title: what is shown.
        text: how to read it, plain text.
        content: what to draw or to list, or the sentence that stands where there is nothing of that.
    """

    title: str
    text: str
    content: tuple[Plot | Table | str, ...]


def noise_scale_sections(run: Run) -> list[Section]:
    """All sections with figures, of a run that has at least one reading of its noise scale."""
    unit, last = run.header.unit, run.readings[-1]
    line = timeline(run.readings, unit)
    axis = time_axis(line)
    order = [str(name) for name in run.header.setup.get("groups") or ()]
    return [
        Section("Noise scale and batch size", _noise_scale_text(run, line), (noise_scale_curve(line, axis),)),
        Section(
            "Noise and signal",
            "The noise scale is the ratio of these two, B_simple = tr Σ / |G|²: on this axis, the distance between the "
            "curves. Both are running averages.",
            (moments_curve(line, axis),),
        ),
        Section("Noise scale by part of the model", _groups_text(last, unit), (groups_plot(last, order, unit),)),
        Section(
            "Gradient norm and clipping",
            "The norm of the whole gradient of each optimizer step, over all ranks, before any clipping. "
            "Each point is the mean since the reading before it.",
            (norm_curve(line, axis),),
        ),
        _values_section(run, [value_curve(line, axis, name) for name in _losses_first(run)[:MAX_VALUES]]),
        Section(
            "What the batch size costs",
            f"Training with batch size B takes S/S_min = 1 + B_crit/B times the fewest possible steps, and uses "
            f"E/E_min = 1 + B/B_crit times the fewest possible {unit} (McCandlish et al. 2018, arXiv:1812.06162). "
            "Both are 2 where the curves cross, at B = B_crit. The noise scale of the last reading stands in for "
            "B_crit: a proxy, good to a factor of about 2.",
            (tradeoff_plot(last, unit),),
        ),
    ]


def _noise_scale_text(run: Run, line: Timeline[Reading]) -> str:
    text = (
        "The noise scale is the batch size at which the gradient of a batch is as much noise as signal. Batches far "
        f"below it need many more steps; batches far above it use many more {line.unit} and save few steps. "
        "It usually grows as training goes on."
    )
    level = run.header.setup.get("level")
    if level:
        text += (
            f" The band is its {percent(float(level))} confidence interval: of the average over the windows that the "
            "estimate reaches back, so where the noise scale moves, the curve follows late."
        )
    if any(reading.status == "unresolved" for reading in run.readings):
        text += " Where nothing is drawn, nothing was known yet."
    return text if line.every == 1 else f"{text} One in {line.every} readings is drawn."


def _groups_text(last: Reading, unit: str) -> str:
    text = (
        f"At the last reading, {position_text(last, unit)}, in the order of the model. A part far to the right is "
        "noisier than the rest of the model; one far to the left learns from a clearer gradient."
    )
    hidden = len(last.groups) - MAX_GROUPS
    return text if hidden <= 0 else f"{text} The first {MAX_GROUPS} are drawn; {hidden:,} more are in the log."


def _values_section(run: Run, plots: list[Plot]) -> Section:
    names = _losses_first(run)
    if not names:
        return Section("Loss", "", ("This run logged no loss and no other value of its own.",))
    hidden = names[MAX_VALUES:]
    text = "As the run logged it; each point is the mean since the reading before it."
    if hidden:
        text += f" {plural(len(hidden), 'more value')} in the log: {', '.join(shorten(name) for name in hidden[:10])}"
        text += ", …" if len(hidden) > 10 else "."
    return Section("Loss" if names == ["loss"] else "Loss and other logged values", text, tuple(plots))


def _losses_first(run: Run) -> list[str]:
    """The names of the user's own values. Names that contain "loss" come first."""
    return sorted(own_value_names(run, run.readings), key=lambda name: "loss" not in name.lower())


def own_value_names(run: Run, readings: Sequence[Measured]) -> list[str]:
    """Names of the values among the metrics of readings that are not sonde's, and were known at least once."""
    ours = METRICS.keys() | run.header.metrics.keys()
    known = {name: None for reading in readings for name, value in reading.metrics.items() if value is not None}
    return [name for name in known if name not in ours]
