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


def test_a_verdict_needs_the_whole_interval_beyond_the_line() -> None:
    around = {"b_simple": 410.0, "low": 330.0, "high": 520.0}
    assert verdict(128, **around).kind == "too_small"
    assert verdict(400, **around).kind == "about_right"
    assert verdict(650, **around).kind == "about_right"
    assert verdict(2000, **around).kind == "too_large"


@pytest.mark.parametrize(
    ("batch", "low", "high", "kind", "headline"),
    [
        (200, 330.0, 520.0, "about_right_or_too_small", "is about right or too small: the noise scale is 410 images"),
        (900, 330.0, 520.0, "about_right_or_too_large", "900 images is about right or too large"),
        (400, 20.0, 6000.0, "unknown", "400 images may be too small, about right or too large"),
        (32, 1.0, 400.0, "unknown", "32 images may be too small, about right or too large"),
    ],
)
def test_an_interval_across_a_line_names_all_that_it_allows(
    batch: float, low: float, high: float, kind: str, headline: str
) -> None:
    got = verdict(batch, b_simple=410.0, low=low, high=high, advice="train about 200 more steps")
    assert got.kind == kind
    assert headline in got.headline
    assert "Train about 200 more steps." in got.detail


def test_a_verdict_names_its_numbers() -> None:
    small = verdict(128, b_simple=410.0, low=330.0, high=520.0)
    assert "128 images" in small.headline
    assert "410 images [330 – 520]" in small.headline
    assert "48% of the steps and 1.5× the images" in small.detail  # 2/(1 + 410/128), 2/(1 + 128/410)
    assert "proxy" in small.detail
    large = verdict(2000, b_simple=410.0, low=330.0, high=520.0)
    assert "34% of the images and 1.7× the steps" in large.detail


@pytest.mark.parametrize(
    ("batch", "status", "low", "high", "kind"),
    [
        (32, "lower_bound", 100.0, math.inf, "too_small"),
        (64, "lower_bound", 100.0, math.inf, "about_right_or_too_small"),
        (400, "lower_bound", 100.0, math.inf, "unknown"),
        (400, "upper_bound", 0.0, 100.0, "too_large"),
        (64, "upper_bound", 0.0, 100.0, "about_right_or_too_large"),
        (32, "upper_bound", 0.0, 100.0, "unknown"),
    ],
)
def test_a_bound_says_what_is_known(batch: float, status: str, low: float, high: float, kind: str) -> None:
    got = verdict(batch, status=status, low=low, high=high, reason="a reason", advice="measure more")
    assert got.kind == kind
    assert f"{'more' if status == 'lower_bound' else 'less'} than 100 images" in got.headline
    assert "A reason. Measure more." in got.detail


def test_a_verdict_says_where_the_noise_scale_is_going() -> None:
    known = {"b_simple": 400.0, "low": 390.0, "high": 410.0}
    grows = verdict(400, **known, doubling_windows=60.0).detail
    assert "doubles every 60 windows: if this goes on, the batch becomes small in about 60 windows" in grows
    assert (
        "halves every 30 windows: if this goes on, the batch becomes large in about 30 windows"
        in verdict(400, **known, doubling_windows=-30.0).detail
    )
    already = verdict(100, **known, doubling_windows=60.0).detail
    assert "doubles every 60 windows." in already
    assert "becomes" not in already


def test_no_factor_of_our_own_is_claimed_for_the_proxy() -> None:
    assert "0.1 to 20 times B_simple" in verdict(128, b_simple=410.0, low=330.0, high=520.0).detail


def test_no_verdict_without_data() -> None:
    nothing = verdict(32, status="unresolved", reason="no window has ended yet")
    assert nothing.kind == "unknown"
    assert nothing.detail == "No window has ended yet."
