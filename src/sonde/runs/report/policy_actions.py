"""What the report says one could do: the entropy coefficient that would hold the entropy, and where to spend tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sonde.runs.policy_reading import PolicyReading
from sonde.runs.report.curve_style import STEP, TimeAxis, add_bands, add_curve, new_curve, restart_legend
from sonde.runs.report.figures import BLUE, ORANGE, LegendEntry, Plot, add_hover, scale_for
from sonde.runs.report.policy_curves import timeline_with
from sonde.wording import interval, number, percent

_HOLD, _LOW, _HIGH, _NOW = (
    f"entropy/{name}"
    for name in ("coefficient_to_hold", "coefficient_to_hold_low", "coefficient_to_hold_high", "coefficient_now")
)

_SHARE = tuple(
    f"gns_prompts/{name}" for name in ("completions_share", "completions_share_low", "completions_share_high")
)


def coefficient_curve(readings: Sequence[PolicyReading], axis: TimeAxis) -> Plot | None:
    """The entropy coefficient with which the entropy would hold, beside that of the loss; None if not computed."""
    line = timeline_with(readings, _NOW)
    if line is None:
        return None
    hold, low, high, now = (line.metric(name) for name in (_HOLD, _LOW, _HIGH, _NOW))
    is_known = [math.isfinite(value) for value in hold]
    # Beside a coefficient that is not known, an end alone is a bound: it has no band.
    low, high = ([v if known else math.nan for v, known in zip(ends, is_known, strict=True)] for ends in (low, high))
    y = scale_for([0.0, *(v for v in [*hold, *now] if math.isfinite(v))], "linear")
    fig = new_curve(line, axis, y, y_label="Entropy coefficient", height=260)
    add_bands(fig, line.x, [y.clamp(v) for v in low], [y.clamp(v) for v in high], y, fill_color=BLUE, fill_alpha=0.16)
    add_curve(fig, line.x, now, ORANGE, dash="dashed")
    add_curve(fig, line.x, hold, BLUE)
    columns = {
        "x": line.x,
        "y": [h if known else n for h, known, n in zip(hold, is_known, now, strict=True)],
        "window": line.windows,
        "hold": line.texts(_hold_text),
        "now": line.texts(lambda r: number(r.metrics.get(_NOW))),
    }
    add_hover(fig, columns, [("to hold the entropy", "@hold"), ("of the loss", "@now"), STEP])
    legend = [
        LegendEntry("line", BLUE, "entropy coefficient with which the entropy would not change"),
        LegendEntry("band", BLUE, "its 95 % interval"),
        LegendEntry("dashed", ORANGE, "entropy coefficient of the loss"),
    ]
    return Plot((fig,), (*legend, *restart_legend(line)))


def _hold_text(reading: PolicyReading) -> str:
    value, low, high = (reading.metrics.get(name) for name in (_HOLD, _LOW, _HIGH))
    return number(value) if value is None or low is None or high is None else f"{number(value)} {interval(low, high)}"


def allocation_text(readings: Sequence[PolicyReading]) -> str:
    """What twice the completions and twice the prompts would do to the noise, by the last reading; "" if unknown."""
    for reading in reversed(readings):
        share, low, high = (reading.metrics.get(name) for name in _SHARE)
        if share is not None and low is not None and high is not None:
            return (
                f" At step {reading.window:,}, twice the completions to each prompt would have cut the noise of a step "
                f"by {percent(share / 2)} (95 % interval: {percent(low / 2)} to {percent(high / 2)}), and twice the "
                f"prompts by {percent(0.5)}, both with twice the tokens."
            )
    return ""
