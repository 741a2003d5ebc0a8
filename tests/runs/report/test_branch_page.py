"""The page of branches: what it says first, its figures and tables, for every outcome."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sonde.evidence.branches import Branches
from sonde.runs.report.branch_figures import loss_plot, ratio_plot
from sonde.runs.report.branch_page import write_branch_report
from sonde.runs.report.branch_verdict import law_interval, noise_scales, quotient
from sonde.runs.report.figures import Plot
from sonde.runs.report.write import write_report
from sonde.stats.intervals import RatioInterval
from tests.runs.report.plausible_branches import CRITICAL, curve_of, diverged, plausible_branches
from tests.runs.report.visible_text import visible_text

BRANCHES = plausible_branches()


def text_of(branches: Branches, folder: Path) -> str:
    return visible_text(write_branch_report(branches, folder / "report.html"))


def with_trouble() -> Branches:
    """One seed of the largest batch diverged, and a branch failed."""
    changed = []
    for branch in BRANCHES.branches:
        match branch.batch, branch.seed:
            case 128, 1:
                changed.append(replace(branch, curve=diverged()))
            case 64, 2:
                changed.append(replace(branch, state="failed", message="out of memory <b>"))
            case _:
                changed.append(branch)
    return replace(BRANCHES, branches=tuple(changed))


def test_a_measured_critical_batch(tmp_path: Path) -> None:
    text = text_of(BRANCHES, tmp_path)
    for fact in (
        "Measured A batch size of up to 50 sequences needs at most 20 % more sequences than the reference, 16. "
        "The critical batch size is 57.5 (50.3 to 65) sequences, at a tolerance of 20 %.",
        "Read at half of the sequences, it is 59.6 (50.8 to 67.2), which agrees.",
        "Batch size 64 1.22× 1.19 to 1.26",
        "128 0.00283 1.52× (1.48 to 1.56) 3 of 3 0",
        "16 0.00100 1, the reference 3 of 3 0",
        "B crit = (b − 1.2 × 16)/0.2",
        "B crit by these branches 191 (155 to 229) –",
        "B noise (euclidean) 205 (160 to 260) 0.933 (0.597 to 1.43)",
        "The same losses, bit for bit: the checkpoint resumes exactly.",
        "from these branches.",
    ):
        assert fact in text, fact


def test_without_noise_the_page_has_the_law_of_the_losses() -> None:
    """The ratio is (1 + B/200)/(1 + 16/200), 1.2 of it at 59.2; 64 is near, so lines in logs hardly bend there."""
    exact = plausible_branches((16.0, 56.0, 64.0), proxies=())
    curves = [replace(b, curve=curve_of(b.batch, b.seed, scatter=0.0)) for b in exact.branches]
    found = law_interval(replace(exact, branches=tuple(curves)))
    assert found.ratio == pytest.approx(CRITICAL, rel=0.01)


def test_only_a_lower_bound(tmp_path: Path) -> None:
    bound = plausible_branches((16.0, 20.0, 24.0))
    text = text_of(bound, tmp_path)
    assert "Only a lower bound A batch size of up to 24 sequences needs at most" in text
    assert "The critical batch size is more than 24 sequences, at a tolerance" in text
    assert "No batch needs so many units: try larger ones." in text
    assert law_interval(bound).low == pytest.approx((24 - 1.2 * 16) / 0.2)


def test_one_seed_says_what_would_make_it_known(tmp_path: Path) -> None:
    text = text_of(plausible_branches(seeds=1, proxies=()), tmp_path)
    assert "Not known yet Run more branches: the scatter from seed to seed is not known: use 2 seeds or more." in text
    assert "No noise scale was measured beside these branches." in text


def test_diverged_and_failed_branches_are_named(tmp_path: Path) -> None:
    text = text_of(with_trouble(), tmp_path)
    assert "At batch size 128, 1 of 3 seeds diverged. Try a lower learning rate there" in text
    assert "1 of 13 branches did not finish: run the same command again." in text
    assert "Branches that did not finish Branch How it ended Why batch size 64, seed 2 failed out of memory <b>" in text
    assert "128 0.00283 diverged 3 of 3 1" in text


def test_a_reference_that_diverged_or_resumes_otherwise(tmp_path: Path) -> None:
    first, *rest = BRANCHES.branches
    again = replace(rest[-1], curve=replace(rest[-1].curve, losses=(*rest[-1].curve.losses[:-1], 2.0)))
    text = text_of(replace(BRANCHES, branches=(replace(first, curve=diverged()), *rest[:-1], again)), tmp_path)
    assert "The reference diverged in 1 of 4 branches, and nothing can be compared with these" in text
    text = text_of(replace(BRANCHES, branches=(first, *rest[:-1], again)), tmp_path)
    assert "this noise is in every ratio" in text


def test_another_answer_at_half_of_the_units(tmp_path: Path) -> None:
    """Curves that agree up to half, and then only the larger batches fall more slowly."""

    def late(batch: float, loss: float, k: int) -> float:
        return loss if k <= 10 or batch == 16 else loss + 0.01 * (k - 10)

    changed = []
    for b in plausible_branches((16.0, 20.0, 24.0, 64.0)).branches:
        losses = tuple(late(b.batch, loss, k) for k, loss in enumerate(b.curve.losses))
        changed.append(replace(b, curve=replace(b.curve, losses=losses)))
    text = text_of(replace(BRANCHES, branches=tuple(changed)), tmp_path)
    assert "which differs. The answer depends on the length of the branches" in text


def columns_of(plot: Plot | str, number: int, *names: str) -> list[tuple[Any, ...]]:
    """The rows of all glyphs of one figure that have these columns."""
    assert isinstance(plot, Plot)
    data = [renderer.data_source.data for renderer in plot.figures[number].renderers]  # type: ignore[attr-defined]
    return [row for each in data if set(names) == set(each) for row in zip(*(each[n] for n in names), strict=True)]


def test_the_figure_has_every_ratio_and_every_noise_scale() -> None:
    plot = ratio_plot(BRANCHES, noise_scales(BRANCHES))
    points = columns_of(plot, 0, "x", "y")
    bars = columns_of(plot, 0, "x0", "y0", "x1", "y1")
    for ratio in BRANCHES.ratios:
        assert (ratio.batch, ratio.ratio) in points
        assert (ratio.batch, ratio.low, ratio.batch, ratio.high) in bars
    assert (16.0, 1.0) in points
    places = columns_of(plot, 1, "x", "y")
    assert {(112.0, 1.0), (50.0, 2.0), (150.0, 3.0), (205.0, 5.0)} <= {*places}
    assert isinstance(plot, Plot)
    assert "batch size 64: 1.22× (1.19 to 1.26)" in plot.in_words
    assert "B_noise (euclidean): 205 (160 to 260) sequences" in plot.in_words
    diverging = ratio_plot(with_trouble(), [])
    assert any(x == 128.0 for x, _ in columns_of(diverging, 0, "x", "y"))
    assert ratio_plot(replace(BRANCHES, branches=()), []) == "No batch size could be compared with the reference."


def test_losses_are_drawn_as_the_mean_of_seeds() -> None:
    plot = loss_plot(BRANCHES)
    points = columns_of(plot, 0, "x", "y")
    of_32 = [b.curve.losses[-1] for b in BRANCHES.branches if b.batch == 32.0]
    assert any(x == 20_000 and y == pytest.approx(sum(of_32) / 3) for x, y in points)
    assert loss_plot(replace(BRANCHES, branches=())) == "No branch has a loss yet."


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (RatioInterval("resolved", 50.0, 200.0, ratio=100.0), "2 (0.750 to 5)"),
        (RatioInterval("lower_bound", 50.0, math.inf), "less than 5"),
        (RatioInterval("upper_bound", 0.0, 200.0), "more than 0.750"),
        (RatioInterval("unresolved", None, None), "not known"),
    ],
)
def test_b_crit_over_a_noise_scale(scale: RatioInterval, expected: str) -> None:
    assert quotient(RatioInterval("resolved", 150.0, 250.0, ratio=200.0), scale) == expected


def test_a_ratio_that_rises_faster_than_the_law() -> None:
    """By the law no batch below 1.2 × 16 can need a fifth more than one of 16."""
    steep = plausible_branches((16.0, 18.0))
    changed = [replace(b, curve=curve_of(400, b.seed)) if b.batch == 18 else b for b in steep.branches]
    found = law_interval(replace(steep, branches=tuple(changed)))
    assert (found.status, found.reason) == ("unresolved", "the ratio of units rises faster than the law allows")


def test_the_command_finds_branches_in_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "branches.json"
    file.write_text(json.dumps(BRANCHES.as_json()), encoding="utf-8")
    page = write_report(tmp_path)
    assert page == tmp_path / "report.html"
    assert "The critical batch size is 57.5" in visible_text(page)
    assert write_report(file, tmp_path / "other.html") == tmp_path / "other.html"
    with pytest.raises(ValueError, match="is not a report of sonde"):
        write_report(tmp_path, file)
    file.write_text('{"schema": 1, "unit": "sequences"}')
    with pytest.raises(ValueError, match="does not hold branches: give a folder that `sonde branch` wrote"):
        write_report(tmp_path)
