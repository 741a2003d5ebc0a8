"""The figure of the study of schedules: a row for each case, an interval for each arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evidence.schedule_answers import GOAL, MARGIN, Case, Paired, cases
from evidence.schedules import RATIOS
from evidence.tasks import OPTIMIZERS, TASKS
from evidence.work import Store

KINDS = dict(zip(OPTIMIZERS, ("SGD", "SGD, \N{GREEK SMALL LETTER BETA} = 0.9", "AdamW", "Muon"), strict=True))
NAMES = dict(zip(TASKS, ("regression", "perceptron", "convnet", "language model"), strict=True))
LOOKS = {
    "adaptive": ("#d55e00", "circle"),
    "doubling": ("#56b4e9", "square"),
    "late switch": ("#0072b2", "triangle"),
    "Seesaw": ("#009e73", "diamond"),
    "constant, equal steps": ("#777777", "inverted_triangle"),
}
LOST = (-110, 90)
"""Percent of units that are drawn: wider intervals are cut."""

Place = tuple[str, str]
"""Of a row: the optimizer and the task."""


def plots(store: Store) -> list[Any]:
    """Beside the best constant batch: steps saved at each ratio, and units that arms of equal steps lose."""
    from bokeh.models import Range1d

    known = {ratio: [case for case in cases(store) if case.ratio == f"{ratio:g}"] for ratio in RATIOS}
    saved = {
        f"adaptive, ratio {ratio:g}": {place(case): case.saved for case in of_this} for ratio, of_this in known.items()
    }
    looks = [(LOOKS["adaptive"][0], "circle"), ("black", "circle")]
    found = [_rows("Fewer steps than the best constant batch, %", saved, looks, 100 * GOAL)]
    for ratio, of_this in known.items():
        lost = {arm: {place(case): case.lost(arm, case.best_constant) for case in of_this} for arm in LOOKS}
        found.append(_rows(f"Units lost beside it, %, ratio {ratio:g}", lost, [*LOOKS.values()], 100 * MARGIN))
    for plot in found[1:]:
        plot.yaxis.visible, plot.x_range = False, Range1d(start=LOST[0], end=LOST[1])
    return found


def place(case: Case) -> Place:
    """Where a case is drawn."""
    return KINDS[case.kind], NAMES[case.task]


def _rows(
    title: str, found: Mapping[str, Mapping[Place, Paired]], looks: Sequence[tuple[str, str]], line: float
) -> Any:
    from bokeh.models import FactorRange
    from bokeh.plotting import figure
    from bokeh.transform import dodge

    order = [(kind, name) for kind in KINDS.values() for name in NAMES.values()]
    present = {at for of_one in found.values() for at in of_one}
    rows = FactorRange(factors=[at for at in reversed(order) if at in present], range_padding=0.02, group_padding=0.3)
    plot: Any = figure(title=title, y_range=rows, frame_width=290, frame_height=680, toolbar_location=None)
    plot.yaxis.group_label_orientation = "horizontal"
    plot.ygrid.grid_line_color = None
    plot.vspan(x=[0], color="black")
    plot.vspan(x=[line], color="black", line_dash="dashed")
    for k, ((name, of_one), (color, marker)) in enumerate(zip(found.items(), looks, strict=True)):
        y = dodge("y", 0.75 * (0.5 - (k + 0.5) / len(found)), range=plot.y_range)
        ends = {end: [100 * getattr(each, end) for each in of_one.values()] for end in ("mean", "low", "high")}
        source = {"y": [*of_one], **ends}
        bold = name.startswith("adaptive")
        plot.segment("low", y, "high", y, source=source, color=color, line_width=3 if bold else 1)
        plot.scatter("mean", y, source=source, color=color, marker=marker, size=9 if bold else 6, legend_label=name)
    plot.legend.ncols = 2
    plot.add_layout(plot.legend[0], "below")
    return plot
