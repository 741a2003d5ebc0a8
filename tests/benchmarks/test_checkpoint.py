"""The benchmark of a measurement's windows: its committed numbers are what the pages say, and it runs."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import DIVISIONS, Cell, as_table, cell, gradients_after

ROOT = Path(__file__).parents[2]
GROWING, *OTHERS = DIVISIONS


def committed() -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/results/checkpoint.json").read_text())
    return cells


def test_the_page_has_the_numbers_of_the_results() -> None:
    page = " ".join((ROOT / "docs/checkpoint.md").read_text().split())
    held = [c["held"] for c in committed() if c["division"] == GROWING]
    assert (
        f"the interval held the exact value in {100 * min(held):.0f} to {100 * max(held):.0f} % of 100 runs in each of "
        f"{len(held)} settings, {100 * statistics.mean(held):.1f} % on average" in page
    )
    examples = {(c["network"], c["until"], c["division"]): c["examples"] for c in committed()}
    settings = {key[:2] for key in examples if key[0] != "as initialised"}
    most = [examples[*s, "always 8"] / examples[*s, GROWING] for s in settings if s != ("after 30 steps", 0.1)]
    assert f"{min(most):.1f} to {max(most):.1f} times as many examples" in page


def test_the_results_are_in_the_table() -> None:
    assert as_table([Cell(**c) for c in committed()]) in (ROOT / "benchmarks/results/checkpoint.md").read_text()


def test_it_runs() -> None:
    gradients = gradients_after(0)[:4000]
    one = cell("as initialised", gradients, 0.5, GROWING, n_runs=5)
    assert one.windows == 12
    assert one.examples == 4 * 12 * 13
    assert one.held >= 0.6
    assert one.stopped == 1
