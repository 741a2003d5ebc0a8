"""The sections of a run with a noise scale, in order: each figure with the text that a newcomer needs to read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sonde.runs.policy_reading import PolicyReading
from sonde.runs.reader import MetricsReading, Reading, Run
from sonde.runs.report.curve_style import time_axis
from sonde.runs.report.curves import moments_curve, noise_scale_curve, norm_curve, value_curve
from sonde.runs.report.figures import Plot, Table
from sonde.runs.report.groups_plot import MAX_GROUPS, groups_plot
from sonde.runs.report.pixels import PIXELS
from sonde.runs.report.timeline import Measured, Timeline, position_text, timeline
from sonde.runs.report.tradeoff_plot import tradeoff_plot
from sonde.wording import count, percent, plural, shorten

MAX_VALUES = 4
"""Largest number of logged values that are drawn. It keeps the page small and readable, whatever a run logs."""


@dataclass(frozen=True)
class Section:
    """One section of the report.

    Attributes:
        title: what is shown.
        text: how to read it, plain text.
        content: figures and tables. Where one is missing, a sentence says why.
    """

    title: str
    text: str
    content: tuple[Plot | Table | str, ...]


def noise_scale_sections(run: Run) -> list[Section]:
    """All sections of a run that has at least one reading of its noise scale."""
    probe, last = run.probe("reading"), run.readings[-1]
    unit = probe.unit
    line = timeline(run.readings, unit)
    axis = time_axis(line)
    group_order = [str(name) for name in probe.setup.get("groups") or ()]
    return [
        Section("Noise scale and batch size", _noise_scale_text(run, line), (noise_scale_curve(line, axis),)),
        Section(
            "Noise and signal",
            "B_simple = tr Σ / |G|²: the noise scale is the noise divided by the signal. On this logarithmic axis, the "
            "vertical distance between the two curves shows it. Both curves are running averages, so their ratio lags "
            "behind the noise scale now while training moves.",
            (moments_curve(line, axis),),
        ),
        Section("Noise scale by part of the model", _groups_text(run, unit), (groups_plot(last, group_order, unit),)),
        Section(
            "Gradient norm and clipping",
            "The norm of the whole gradient of each optimizer step, over all ranks, before clipping. "
            "Each point is the mean since the previous reading.",
            (norm_curve(line, axis),),
        ),
        _values_section(run, [value_curve(line, axis, name) for name in _losses_first(run)[:MAX_VALUES]]),
        Section(
            "What the batch size costs",
            f"Training with batch size B takes S/S_min = 1 + B_crit/B times the fewest possible steps, and uses "
            f"E/E_min = 1 + B/B_crit times the fewest possible {unit} (McCandlish et al. 2018, arXiv:1812.06162). "
            "The curves cross at B = B_crit, where both costs are 2×. The figure takes the noise scale averaged over "
            "the run as B_crit, or that of the last reading where there is no average: it speaks of a whole run like "
            "this one. The noise scale is a proxy for B_crit: in published runs B_crit was 0.1 to 20 times B_simple.",
            (tradeoff_plot(last, unit),),
        ),
    ]


def _noise_scale_text(run: Run, line: Timeline[Reading]) -> str:
    text = (
        "The noise scale is the batch size at which the gradient of a batch contains as much noise as signal. "
        "A batch far below the noise scale needs many more steps. A batch far above it uses many more "
        f"{line.unit} and saves few steps. The noise scale usually grows during training."
    )
    level = run.probe("reading").setup.get("level")
    if level and run.probe("reading").setup.get("fixed_weights"):
        text += (
            " The model did not train while it was measured. The curve is the average of all windows so far, and the "
            f"band its {percent(float(level))} confidence interval, which narrows as units are measured."
        )
    elif level:
        text += (
            " The solid curve is the noise scale now, filtered from all windows (optimizer steps) so far. The band "
            f"is its {percent(float(level))} confidence interval. The dotted curve is the average over the run so far, "
            "which a comparison of whole runs at several batch sizes would show."
        )
    if any(reading.status == "unresolved" for reading in run.readings):
        text += " A gap means that the noise scale was not known yet."
    if len(run.readings) > PIXELS:
        text += f" Of {count(len(run.readings))} readings, each pixel shows the lowest and the highest."
    return text


def _groups_text(run: Run, unit: str) -> str:
    last, written = run.readings[-1], run.readings[-1].groups_window
    place = f"the last reading ({position_text(last, unit)})" if written == last.window else f"window {count(written)}"
    text = (
        f"Values of {place}, in the order of the model. A part far to the right "
        "has a noisier gradient than the rest of the model. A part far to the left has a clearer gradient."
    )
    hidden = len(last.groups) - MAX_GROUPS
    return (
        text if hidden <= 0 else f"{text} The first {MAX_GROUPS} are drawn; the log has {plural(hidden, 'more group')}."
    )


def _values_section(run: Run, plots: list[Plot]) -> Section:
    names = _losses_first(run)
    if not names:
        return Section("Loss", "", ("This run logged no loss and no other values.",))
    hidden = names[MAX_VALUES:]
    text = "Values as the run logged them. Each point is the mean since the previous reading."
    if hidden:
        text += f" {plural(len(hidden), 'more value')} in the log: {', '.join(shorten(name) for name in hidden[:10])}"
        text += ", …" if len(hidden) > 10 else "."
    return Section("Loss" if names == ["loss"] else "Loss and other logged values", text, tuple(plots))


def _losses_first(run: Run) -> list[str]:
    """The names of the user's own values. Names that contain "loss" come first."""
    return sorted(own_value_names(run, run.readings), key=lambda name: "loss" not in name.lower())


def own_value_names(run: Run, readings: Sequence[Measured]) -> list[str]:
    """The names of the metrics that the user logged, as far as at least one reading knows a value."""
    names_of_sonde = run.metrics.keys()
    known = {name: None for reading in readings for name, value in reading.metrics.items() if value is not None}
    return [name for name in known if name not in names_of_sonde]


def declared_sections(run: Run) -> list[Section]:
    """The sections that probes declare, each with a curve for every metric that at least one reading knows."""
    metrics = run.metrics
    readings: list[Reading | PolicyReading | MetricsReading] = [*run.readings, *run.policy, *run.own]
    readings.sort(key=lambda reading: (reading.segment, reading.time))
    sections = []
    for declared in run.sections:
        plots = []
        for name in declared.metrics:
            known = [r for r in readings if r.metrics.get(name) is not None]
            if known:
                line = timeline(known, run.probe("reading").unit)
                plots.append(value_curve(line, time_axis(line), name, metrics.get(name, {})))
        content = tuple(plots) or ("None of these metrics was known in this run.",)
        sections.append(Section(declared.title, declared.text, content))
    return sections
