from __future__ import annotations

import math
from typing import Any

import pytest

from sonde.batch_size.stats.critical_batch import judge_batch, steps_and_examples


@pytest.mark.parametrize("batch", [1, 32, 500, 10_000])
def test_trade_off_equation(batch: float) -> None:
    cost = steps_and_examples(batch, 500)
    assert (cost.steps - 1) * (cost.examples - 1) == pytest.approx(1)
    assert steps_and_examples(500, 500).steps == steps_and_examples(500, 500).examples == 2


@pytest.mark.parametrize(("batch", "critical"), [(0, 1), (-1, 1), (1, 0), (math.inf, 1), (1, math.nan)])
def test_trade_off_refuses(batch: float, critical: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        steps_and_examples(batch, critical)


def verdict(batch: float, **known: Any) -> Any:
    facts: dict[str, Any] = {"status": "resolved", "b_simple": None, "low": None, "high": None, "reason": ""} | known
    return judge_batch(batch, unit="images", **facts)


def test_verdict_needs_the_whole_interval_beyond_the_proxy() -> None:
    around = {"b_simple": 410.0, "low": 330.0, "high": 520.0}
    assert verdict(128, **around).kind == "too_small"
    assert verdict(400, **around).kind == "about_right"
    assert verdict(650, **around).kind == "about_right"
    assert verdict(2000, **around).kind == "too_large"


@pytest.mark.parametrize(
    ("batch", "low", "high", "headline"),
    [
        (200, 330.0, 520.0, "200 images is about right or too small: the noise scale is 410 images [330 – 520]"),
        (900, 330.0, 520.0, "900 images is about right or too large"),
        (400, 20.0, 6000.0, "400 images may be too small, about right or too large"),
        (32, 1.0, 400.0, "32 images may be too small, about right or too large"),
    ],
)
def test_an_interval_across_the_line_decides_nothing(batch: float, low: float, high: float, headline: str) -> None:
    got = verdict(batch, b_simple=410.0, low=low, high=high)
    assert got.kind == "unknown"
    assert headline in got.headline
    assert "More windows narrow the interval" in got.detail


def test_a_verdict_names_its_numbers() -> None:
    small = verdict(128, b_simple=410.0, low=330.0, high=520.0)
    assert "128 images" in small.headline
    assert "410 images [330 – 520]" in small.headline
    assert "48% of the steps and 1.5× the images" in small.detail  # 2/(1 + 410/128), 2/(1 + 128/410)
    assert "proxy" in small.detail
    large = verdict(2000, b_simple=410.0, low=330.0, high=520.0)
    assert "34% of the images and 1.7× the steps" in large.detail


def test_verdict_from_a_bound_alone() -> None:
    assert verdict(32, status="lower_bound", low=100.0, high=math.inf, reason="r").kind == "too_small"
    near = verdict(64, status="lower_bound", low=100.0, high=math.inf, reason="|G|² cannot yet be distinguished from 0")
    assert near.kind == "unknown"
    assert "above 100 images" in near.headline
    assert "|G|² cannot yet be distinguished from 0" in near.detail


def test_no_verdict_without_data() -> None:
    nothing = verdict(32, status="unresolved", reason="no window has ended yet")
    assert nothing.kind == "unknown"
    assert nothing.detail == "No window has ended yet."
