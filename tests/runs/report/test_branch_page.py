"""The page of branches: what it says first, its figures and tables, for every outcome."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sonde.evidence.answer import noise_scales, times
from sonde.evidence.branches import Branches
from sonde.evidence.notices import notices
from sonde.runs.report.branch_figures import loss_plot, ratio_plot
from sonde.runs.report.branch_page import branch_page
from sonde.runs.report.figures import Plot
from sonde.runs.report.page import write_page
from sonde.runs.report.write import write_report
from tests.runs.report.plausible_branches import PROXIES, diverged, plausible_branches
from tests.runs.report.visible_text import visible_text

BRANCHES = plausible_branches()


def text_of(branches: Branches, folder: Path) -> str:
    return visible_text(write_page(folder / "report.html", lambda: branch_page(branches)))


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
    text, found, law = text_of(BRANCHES, tmp_path), BRANCHES.critical, BRANCHES.law_critical
    of_64 = next(ratio for ratio in BRANCHES.ratios if ratio.batch == 64)
    noise, half = PROXIES[-1], BRANCHES.of_shorter().critical
    assert (found.low or 0) > 50
    for fact in (
        f"Measured A batch size of up to {int(found.low or 0)} sequences needs at most 20 % more sequences than the "
        "reference, 16.",
        f"The critical batch size is {found.in_words} sequences, at a tolerance of 20 %.",
        f"The first half of the sequences alone would say {half.in_words}. The two agree.",
        f"Batch size 64 {of_64.ratio:.2f}× {of_64.low:.2f} to {of_64.high:.2f}",
        f"64 0.002 {of_64.ratio:.2f}× ({of_64.low:.2f} to {of_64.high:.2f}) 3 of 3 ",
        "16 0.001 1 3 of 3 reference",
        "B crit = (b − 1.2 × 16)/0.2",
        f"B crit by these branches {law.in_words} –",
        f"B noise (euclidean) 205 (160 to 260) {(noise.value or 0) / (law.ratio or 1):.2f} (",
        "from these branches.",
    ):
        assert fact in text, fact


def test_only_a_lower_bound(tmp_path: Path) -> None:
    bound = plausible_branches((16.0, 20.0, 24.0))
    text = text_of(bound, tmp_path)
    assert "Only a lower bound A batch size of up to 24 sequences needs at most" in text
    assert "The critical batch size is more than 24 sequences, at a tolerance" in text
    assert "No batch needs so many units: try larger ones." in text
    assert bound.law_critical.low == pytest.approx((24 - 1.2 * 16) / 0.2)


def test_one_seed_says_what_would_make_it_known(tmp_path: Path) -> None:
    text = text_of(plausible_branches(seeds=1, proxies=()), tmp_path)
    assert (
        "Not known yet Run more branches. Too few seeds can be compared: use 3 seeds or more, or train longer." in text
    )
    assert "No noise scale was measured beside these branches." in text


def test_what_was_noticed_comes_first(tmp_path: Path) -> None:
    text = text_of(with_trouble(), tmp_path)
    assert text.index("Noticed in these branches") < text.index("A batch size of up to")
    sentences = notices(with_trouble())
    assert any("out of memory <b>" in sentence for sentence in sentences)
    assert any("atch 128 diverged" in sentence for sentence in sentences)
    assert all(text.count(" ".join(sentence.split())) == 1 for sentence in sentences)
    assert "128 0.002828 unbounded 3 of 3 1 of 3 diverged" in text
    assert "Noticed in these branches" not in text_of(BRANCHES, tmp_path)


def test_another_answer_at_half_of_the_units(tmp_path: Path) -> None:
    """Curves that agree up to half, and then only the larger batches fall more slowly."""

    def late(batch: float, loss: float, k: int) -> float:
        return loss if k <= 10 or batch == 16 else loss + 0.01 * (k - 10)

    changed = []
    for b in plausible_branches((16.0, 20.0, 24.0, 64.0)).branches:
        losses = tuple(late(b.batch, loss, k) for k, loss in enumerate(b.curve.losses))
        changed.append(replace(b, curve=replace(b.curve, losses=losses)))
    text = text_of(replace(BRANCHES, branches=tuple(changed)), tmp_path)
    assert "The answer depends on the length of the branches" in text


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
    assert {(112.0, 1.0), (50.0, 2.0), (150.0, 3.0), (900.0, 4.0), (205.0, 5.0)} <= {*places}
    assert isinstance(plot, Plot)
    assert f"batch size 64: {times(BRANCHES.ratios[1])}" in plot.in_words
    assert "B_noise (euclidean): 205 (160 to 260) sequences" in plot.in_words
    diverging = ratio_plot(with_trouble(), [])
    assert any(x == 128.0 for x, _ in columns_of(diverging, 0, "x", "y"))
    assert ratio_plot(replace(BRANCHES, branches=()), []) == "No batch size could be compared with the reference."


def test_losses_are_drawn_as_the_mean_of_seeds() -> None:
    plot = loss_plot(BRANCHES)
    points = columns_of(plot, 0, "x", "y")
    of_32 = [b.curve.losses[-1] for b in BRANCHES.branches if b.batch == 32.0]
    assert any(x == 20_000 and y == pytest.approx(sum(of_32) / 3) for x, y in points)
    apart = [
        replace(b, curve=replace(b.curve, units=tuple(u + b.seed + 1 for u in b.curve.units)))
        for b in BRANCHES.branches
    ]
    points = columns_of(loss_plot(replace(BRANCHES, branches=tuple(apart))), 0, "x", "y")
    assert {(20_001 + seed, of_32[seed]) for seed in range(3)} <= {*points}
    assert loss_plot(replace(BRANCHES, branches=())) == "No branch has a loss yet."


def test_the_command_finds_branches_in_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "branches.json"
    file.write_text(json.dumps(BRANCHES.as_json()), encoding="utf-8")
    page = write_report(tmp_path)
    assert page == tmp_path / "report.html"
    assert f"The critical batch size is {BRANCHES.critical.in_words}" in visible_text(page)
    assert write_report(file, tmp_path / "other.html") == tmp_path / "other.html"
    with pytest.raises(ValueError, match="is not a report of sonde"):
        write_report(tmp_path, file)
    file.write_text('{"schema": 2, "unit": "sequences"}')
    with pytest.raises(ValueError, match="does not hold branches: give a folder that `sonde branch` wrote"):
        write_report(tmp_path)
