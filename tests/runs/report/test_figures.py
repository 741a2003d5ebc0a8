from __future__ import annotations

import itertools
import math

from sonde.runs.report.figures import Scale, log_ticks, scale_for


def test_no_axis_collapses() -> None:
    odd = [[5.0], [0.0], [-3.0, -3.0], [math.nan], [], [1e-100, 1e100], [1.0, math.inf]]
    for values, kind in itertools.product(odd, ("linear", "log", "any")):
        scale = scale_for(values, kind)  # type: ignore[arg-type]
        assert -math.inf < scale.start < scale.end < math.inf, (values, kind)
        assert scale.kind == "linear" or scale.start > 0, (values, kind)


def test_a_log_axis_has_a_few_round_ticks_inside_it() -> None:
    for start, ratio in itertools.product((1e-9, 0.3, 1.0, 164.0, 1e7), (1.56, 3.0, 30.0, 1e3, 1e6, 1e20)):
        ticks = log_ticks(Scale("log", start, start * ratio))
        assert 2 <= len(ticks) <= 9, (start, ratio)
        assert ticks == sorted(set(ticks))
        assert start <= ticks[0] < ticks[-1] <= start * ratio, (start, ratio)
