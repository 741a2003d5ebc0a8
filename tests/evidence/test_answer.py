"""Words of what branches show; where they are shown is tested with the command and the page."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from sonde.commands.branch_result import print_result
from sonde.evidence.answer import advice, batch_rows, headline, over_b_crit, scale_rows, times, verdict
from sonde.evidence.branches import Proxy
from sonde.evidence.stats.branched_batch import UnitsRatio
from sonde.stats.intervals import RatioInterval
from tests.runs.report.plausible_branches import curve_of, diverged, plausible_branches


def test_verdicts() -> None:
    def said(*numbers: float | None, logs: tuple[float, ...] = (0.0,)) -> str:
        middle, low, high = numbers
        return verdict(UnitsRatio(32, logs, middle, low, high), 0.2)

    assert said(1.0, 0.9, 1.2) == "as good"
    assert said(1.2, 1.1, 1.3) == "not resolved"
    assert said(1.5, 1.3, 1.7) == "needs more"
    assert said(math.inf, 1.3, math.inf, logs=(0.2, math.inf)) == "1 of 2 too slow"
    assert said(None, None, None) == "not compared"
    assert said(1.0, None, None) == "interval not known"


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (RatioInterval("resolved", 50.0, 200.0, ratio=100.0), "0.500 (0.200 to 1.33)"),
        (RatioInterval("lower_bound", 50.0, math.inf), "more than 0.200"),
        (RatioInterval("upper_bound", 0.0, 200.0), "less than 1.33"),
        (RatioInterval("unresolved", None, None), "not known"),
    ],
)
def test_a_noise_scale_over_b_crit(scale: RatioInterval, expected: str) -> None:
    assert over_b_crit(scale, RatioInterval("resolved", 150.0, 250.0, ratio=200.0)) == expected


def test_a_ratio_is_written_with_its_interval() -> None:
    assert times(UnitsRatio(64, (0.2,), 1.2, 1.1, 1.3)) == "1.20× (1.10 to 1.30)"
    assert times(UnitsRatio(64, (0.2,), 1.2, None, None)) == "1.20×"
    assert times(UnitsRatio(64, (math.inf,), math.inf, math.inf, math.inf)) == "unbounded"
    assert times(UnitsRatio(64, (), None, None, None)) == "not known"


def test_a_batch_that_failed_has_a_row() -> None:
    found = plausible_branches()
    none = tuple(replace(b, state="failed") if b.batch == 64 else b for b in found.branches)
    rows = {row[0]: row[1:] for row in batch_rows(replace(found, branches=none))}
    assert rows["64"] == ("0.002", "not known", "0 of 3", "not compared")
    assert rows["16"] == ("0.001", "1", "3 of 3", "reference")


def test_why_the_law_gives_nothing_stands_in_its_row() -> None:
    steep = plausible_branches((16.0, 18.0), proxies=(Proxy("B_noise", "", 90.0, 160.0, 120.0),))
    changed = [replace(b, curve=curve_of(400, b.seed)) if b.batch == 18 else b for b in steep.branches]
    _, law, noise = scale_rows(replace(steep, branches=tuple(changed)))
    assert law[1] == "not known yet (the ratio of units rises faster than the law allows)"
    assert noise == ("B_noise", "120 (90 to 160)", "not known")


def test_without_an_answer_the_reason_is_said_once() -> None:
    one_seed = plausible_branches(seeds=1)
    assert headline(one_seed) == "The critical batch size is not known yet."
    assert advice(one_seed) == "Run more branches. Too few seeds can be compared: use 3 seeds or more, or train longer."
    assert [*scale_rows(one_seed)][1] == ("B_crit by these branches", "not known yet", "–")


def test_what_is_not_known_of_the_script_comes_first() -> None:
    doubt = {"lr": "why", "batch": "why"}
    known, unknown = plausible_branches(unverified=doubt), plausible_branches(seeds=1, unverified=doubt)
    assert headline(known).startswith("If the script uses {lr} and {batch} as given, which is not known, the critical")
    assert headline(unknown).endswith(" not known yet, nor whether the script uses {lr} and {batch}.")
    assert advice(known).startswith("See first whether the script uses what it is given")


@pytest.mark.parametrize("state", ["failed", "cut off"])
def test_a_branch_that_failed_is_to_be_repeated(state: Any) -> None:
    """Its seed is missing, and would be missing with more seeds too."""
    found = plausible_branches((16.0, 64.0), seeds=2)
    broken = tuple(replace(b, state=state) if (b.batch, b.seed) == (64, 1) else b for b in found.branches)
    assert advice(replace(found, branches=broken)) == "Mend or repeat the branches that did not finish."
    more = plausible_branches()
    broken = tuple(replace(b, state=state) if (b.batch, b.seed) == (64, 1) else b for b in more.branches)
    assert advice(replace(more, branches=broken)).startswith(
        "Mend or repeat the branches that did not finish. A batch size of up to"
    )


def test_a_verdict_leaves_the_head_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    found = plausible_branches(unit="units", proxies=())
    broken = tuple(replace(b, curve=diverged()) if (b.batch, b.seed) == (128, 1) else b for b in found.branches)
    print_result(replace(found, branches=broken), Console(width=80))
    out = " ".join(capsys.readouterr().out.split())
    assert "batch size rate units over the reference's finished verdict 16 0.001" in out
    assert "1 of 3 diverged" in out
