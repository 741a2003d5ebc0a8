"""The page of branches from one checkpoint: the critical batch size first, then what it was read from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from sonde.evidence.answer import advice, at_half, batch_rows, headline, noise_scales, scale_rows, times, verdict
from sonde.evidence.branches import Branches
from sonde.evidence.notices import notices
from sonde.evidence.stats.branched_batch import UnitsRatio
from sonde.runs.report.how_measured import Row
from sonde.runs.report.page import whole_page
from sonde.runs.report.verdicts import Tile, VerdictPanel
from sonde.wording import capital, count, interval, number, percent, plural

BRANCHES_NAME = "branches.json"
"""The file of branches in the folder of `sonde branch`."""
_NO_SCALES = (
    "No noise scale was measured beside these branches. sonde measure reads it at the checkpoint, and a script "
    "that attaches sonde logs it in each branch."
)


def read_branches(path: Path) -> Branches:
    """The branches in a file.

    Args:
        path: the file in a folder that `sonde branch` wrote.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when it does not hold branches, or another version of sonde wrote it.
    """
    try:
        return Branches.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} does not hold branches: give a folder that `sonde branch` wrote") from error


def branch_page(branches: Branches) -> str:
    """The whole page."""
    # Here, since Bokeh is an extra, and only the page needs it.
    from sonde.runs.report.branch_figures import loss_plot, ratio_plot
    from sonde.runs.report.figures import Section, Table

    unit, noticed = branches.unit, notices(branches)
    scales = noise_scales(branches) if branches.proxies else []
    (batch_head, *of_batches), (scale_head, *of_scales) = batch_rows(branches), scale_rows(branches)
    caption = f"{capital(unit)} needed, times those of the reference"
    ratios = Table(caption, tuple(map(capital, batch_head)), tuple(of_batches))
    beside = Table("B_crit and noise scales", tuple(map(capital, scale_head)), tuple(of_scales))
    sections = [
        Section(f"{capital(unit)} that each batch size needs", _RATIO_TEXT, (ratio_plot(branches, scales), ratios)),
        Section("Loss of each batch size", _LOSS_TEXT, (loss_plot(branches),)),
        Section("Noise scales", _scales_text(branches), (beside,) if scales else (beside, _NO_SCALES)),
    ]
    n_finished = sum(b.state == "finished" for b in branches.branches)
    return whole_page(
        sections,
        name="Branches from one checkpoint",
        subject="critical batch size",
        facts=(
            f"Reference: batch size {number(branches.reference)}",
            f"{number(branches.units)} {unit} in each branch",
            plural(len({b.seed for b in branches.branches}), "seed"),
            f"{count(n_finished)} of {count(len(branches.branches))} branches finished",
        ),
        alerts_title="Noticed in these branches",
        alerts=[{"message": sentence} for sentence in noticed],
        panels=[_panel(branches)],
        rows=[*_how_measured(branches), Row("Alerts", tuple(noticed[5:]))],
        source="these branches",
    )


_RATIO_TEXT = (
    "All branches train on the same number of units from one checkpoint. Each point says how many units a batch size "
    "needs for the losses that the reference reaches, times the units that the reference needs. The critical batch "
    "size is where this ratio passes the tolerance."
)
_LOSS_TEXT = "The mean of the seeds, on the same held-out data for all branches. Lower is better."


def _scales_text(branches: Branches) -> str:
    """What is compared with what."""
    reference, more = number(branches.reference), f"{branches.tolerance:g}"
    return (
        "By the law of McCandlish et al. 2018 (arXiv:1812.06162), a batch size B needs 1 + B/B_crit times the fewest "
        f"possible {branches.unit}, and a noise scale predicts B_crit. From a reference of {reference} and a tolerance "
        f"of {more}, the critical batch size b gives B_crit = (b − {1 + branches.tolerance:g} × {reference})/{more}. "
        "In the last column, a range takes the far ends of both intervals."
    )


def _panel(branches: Branches) -> VerdictPanel:
    """What to do, the critical batch size, and what may change it."""
    status = branches.critical.status
    badge = {"resolved": "Measured", "unresolved": "Not known yet"}.get(status, "Only a lower bound")
    basis = f"Judged from {count(len(branches.branches))} branches. Intervals hold with {percent(0.95)}."
    return VerdictPanel(
        "measured" if status == "resolved" else "unknown",
        badge,
        advice(branches),
        headline(branches),
        at_half(branches),
        basis,
        tuple(_tile(ratio, branches.tolerance) for ratio in branches.ratios),
    )


def _tile(ratio: UnitsRatio, tolerance: float) -> Tile:
    is_steady = not (ratio.n_diverged or ratio.n_slow)
    note = interval(ratio.low, ratio.high) if is_steady else verdict(ratio, tolerance)
    return Tile(f"Batch size {number(ratio.batch)}", times(ratio).split(" (")[0], note)


def _how_measured(branches: Branches) -> Iterator[Row]:
    unit = branches.unit
    yield Row("Learning rate", (f"{branches.rule}.",))
    yield Row("Loss", (branches.loss,))
    yield Row(
        "Ratio",
        (
            "Of a batch size and the reference, with the same seed, one is slower. It has some mean loss over the last "
            f"half of its {unit}. The other has this mean loss over the second half of fewer {unit}. The ratio is the "
            f"quotient of the {unit}. Over seeds, the mean of the logs is taken.",
            "Where there are few losses, last losses stand for means.",
            "Interval: Student's t over seeds. The scatter is the mean of the batch size's own and that of all.",
        ),
    )
    yield Row(
        "Critical batch size",
        (
            f"The batch size at which the ratio passes {1 + branches.tolerance:g}, by straight lines between the batch "
            "sizes. Its interval reaches from where the upper ends of the ratios pass it to where the lower ends do.",
        ),
    )
