from __future__ import annotations

import math

import pytest

from sonde.runs.report.figures import Scale, log_ticks, scale_for


@pytest.mark.parametrize("values", [[5.0], [0.0], [-3.0, -3.0], [math.nan], [], [1e-100, 1e100], [1.0, math.inf]])
@pytest.mark.parametrize("kind", ["linear", "log", "any"])
def test_no_axis_collapses(values: list[float], kind: str) -> None:
    scale = scale_for(values, kind)  # type: ignore[arg-type]
    assert math.isfinite(scale.start)
    assert math.isfinite(scale.end)
    assert scale.start < scale.end
    assert scale.kind == "linear" or scale.start > 0


@pytest.mark.parametrize("start", [1e-9, 0.3, 1.0, 164.0, 1e7])
@pytest.mark.parametrize("ratio", [1.56, 3.0, 30.0, 1e3, 1e6, 1e20])
def test_a_log_axis_has_a_few_round_ticks_inside_it(start: float, ratio: float) -> None:
    ticks = log_ticks(Scale("log", start, start * ratio))
    assert 2 <= len(ticks) <= 9
    assert ticks == sorted(set(ticks))
    assert start <= ticks[0]
    assert ticks[-1] <= start * ratio
