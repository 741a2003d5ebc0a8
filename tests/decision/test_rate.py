"""The rate for another batch, by rules computed by hand: a whole row, or none."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from sonde.decision.law import Range
from sonde.decision.rate import RateRow, rate_row

KNOWN = Range(100.0, 50.0, 200.0)
ADAMW = {"name": "AdamW", "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def then(row: RateRow) -> dict[str, float | None]:
    return {setting.name: setting.then for setting in row.settings}


def test_adam_has_all_its_settings() -> None:
    row, rise = rate_row(ADAMW, 64, 16, KNOWN), math.sqrt((1 + 100 / 16) / (1 + 100 / 64))
    expected = {"learning rate": 1e-3 * rise, "β₁": 0.6, "β₂": 0.8, "ε": 5e-9, "weight decay": 0.4 / rise}
    expected["warm-up, in steps"] = None
    assert then(row) == pytest.approx(expected)
    assert row.settings[-1].rule == "× 0.250: as long in units as it was"
    assert row.words.endswith("This batch may be too large for it.")
    assert "2205.10287" in row.words


@pytest.mark.parametrize(("batch", "where"), [(8, []), (64, ["may be"]), (256, ["is"])])
def test_it_says_where_the_rule_holds(batch: float, where: list[str]) -> None:
    row = rate_row(ADAMW | {"betas": [0.99, 0.999]}, batch, 16, KNOWN)
    assert re.findall(r"This batch (.*) too large for it\.", row.words) == where


@pytest.mark.parametrize(
    ("betas", "batch", "expected"),
    [
        ([0.9, 0.99], 80, (0.5, 0.95)),
        ([0.9, 0.99], 1024, (0.5, 0.95)),  # an average of two steps is the shortest
        ([0.4, 0.95], 32, (0.4, 0.95)),  # it was shorter already
        ([0.0, 0.95], 8, (0.5, 0.975)),
    ],
)
def test_the_averages_of_adam_are_of_two_steps_or_more(
    betas: list[float], batch: float, expected: tuple[float, float]
) -> None:
    found = then(rate_row(ADAMW | {"betas": betas}, batch, 16, KNOWN))
    assert (found["β₁"], found["β₂"]) == pytest.approx(expected)
    assert found["ε"] == pytest.approx(1e-8 / math.sqrt(batch / 16))


def test_a_batch_that_is_kept_keeps_its_settings() -> None:
    assert rate_row({"name": "Lion"}, 16, 16, KNOWN).words == "The batch is kept, so keep the settings."


@pytest.mark.parametrize(
    ("critical", "factor"),
    [
        (KNOWN, (1 + 100 / 16) / (1 + 100 / 64)),
        (Range(None, 50.0, math.inf), (1 + 50 / 16) / (1 + 50 / 64)),  # the end that is known
        (Range(1e9, 1e8, 1e10), 4.0),  # far below it, by κ
    ],
)
def test_rates_follow_the_critical_batch(critical: Range, factor: float) -> None:
    for name, power in (("SGD", 1.0), ("Muon", 0.5), ("AdamW", 0.5)):
        group = ADAMW | {"name": name, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
        found = then(rate_row(group, 64, 16, critical))
        assert found["learning rate"] == pytest.approx(0.1 * factor**power, rel=1e-6)
        assert name == "AdamW" or (found["momentum"], found["weight decay"]) == (0.9, 0.0)


def test_without_a_middle_the_smaller_rate_is_taken_and_ranges_rise() -> None:
    sgd, wide = {"name": "SGD", "lr": 0.1}, Range(None, 41.0, 10400.0)
    larger, smaller = (
        rate_row(sgd, 512, 128, wide).settings[0],
        rate_row(sgd, 32, 128, Range(64.0, 32.0, 96.0)).settings[0],
    )
    assert larger.then == pytest.approx(0.1 * (1 + 41 / 128) / (1 + 41 / 512))
    assert larger.rule == "× 1.22 [1.22 – 3.86]"
    assert smaller.rule == "× 0.500 [0.438 – 0.625]"
    assert rate_row(sgd, 32, 128, wide).settings[0].then == pytest.approx(0.1 * (1 + 10400 / 128) / (1 + 10400 / 32))


@pytest.mark.parametrize(
    ("group", "batch", "why"),
    [
        ({"name": "Lion", "lr": 1e-4}, 64, "no rule covers Lion"),
        (ADAMW | {"amsgrad": True}, 64, "AdamW and amsgrad"),
        (ADAMW | {"name": "Adam"}, 64, "weight decay that is added to the gradient"),
        ({"name": "AdamW", "lr": 1e-3}, 64, "the log does not say β₁, β₂ and ε"),
        (ADAMW, 1e6, "no rule was tried so far from the batch as it is"),
    ],
)
def test_a_row_that_is_not_known_whole_is_not_printed(group: dict[str, Any], batch: float, why: str) -> None:
    row = rate_row(group, batch, 16, KNOWN)
    assert row.settings == ()
    assert row.words.startswith("The rate is not known: ")
    assert row.words.endswith(f"{why}.")
