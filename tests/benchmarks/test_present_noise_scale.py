"""The benchmark of the present noise scale: its committed numbers stand on the pages."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.present_noise_scale import as_table, cells, simulate, summary

ROOT = Path(__file__).parents[2]


def committed(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/results/present_noise_scale.json").read_text())[name]
    return found


def page(name: str) -> str:
    return " ".join((ROOT / "docs" / name).read_text().split())


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}"


def test_the_pages_have_the_numbers_of_the_results() -> None:
    found = [cell["covered"] for cell in committed("moving weights")]
    mean, low, high = percent(statistics.mean(found)), percent(min(found)), percent(max(found))
    assert f"In its {len(found)} settings" in page("batch-size.md")
    assert f"present value in {mean} % of runs on average, and in {low} to {high} % in each" in page("batch-size.md")
    below, above = sum(c < 0.9 for c in found), sum(c > 0.98 for c in found)
    assert f"coverage of the present noise scale, {len(found)} settings" in page("limits.md")
    assert f"{mean} % on average; {below} settings below 90 % ({low} % at worst" in page("limits.md")
    assert f"{above} above 98 % ({high} % at most)" in page("limits.md")
    assert f"{percent(min(found), 0)} to {percent(max(found), 0)} % in {len(found)} settings" in page("limits.md")


def test_the_pages_have_the_numbers_after_a_fall_and_of_heavy_tails() -> None:
    fallen = [cell["covered"] for cell in committed("after a fall")]
    assert f"coverage is {percent(min(fallen))} to {percent(max(fallen))} %" in page("batch-size.md")
    tails = committed("heavy tails")
    for dof, words in ((3, "of runs where Student's t of 3 degrees of freedom"), (5, "with 5 degrees")):
        covered = [cell["covered"] for cell in tails if cell["optimizer"] == f"t, {dof} degrees of freedom"]
        assert f"in {percent(min(covered), 0)} to {percent(max(covered), 0)} % {words}" in page("limits.md")


def test_a_small_run_makes_the_table() -> None:
    windows = simulate("sgd", 0.2, n_runs=3, n_windows=12)
    found = list(cells("sgd", 0.2, windows, checkpoints=(2, 12)))
    assert [(cell.window, cell.part) for cell in found[:3]] == [(2, "total"), (2, "first layer"), (2, "second layer")]
    assert {cell.unknown for cell in found if cell.window == 2} == {1.0}  # two windows have no interval
    assert {cell.covered for cell in found if cell.window == 2} == {1.0}
    assert as_table(found).count("\n") == 4
    assert "Not known, which counts as held" in summary(found)
