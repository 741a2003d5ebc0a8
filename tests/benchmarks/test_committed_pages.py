"""Numbers in the pages are those of the results that are committed."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from benchmarks.checkpoint import DIVISIONS, Cell, as_table, cell, gradients_after

from benchmarks import metric_meaning

ROOT = Path(__file__).parents[2]
GROWING = next(iter(DIVISIONS))


def test_what_signs_mean_is_what_a_run_gives() -> None:
    """The rows of signs are closed forms: the same at every run."""
    page = metric_meaning.RESULTS.read_text()
    for row in metric_meaning.rows(metric_meaning.Options(), ["sign"]):
        assert "| " + " | ".join(map(str, row)) + " |" in page


def test_the_windows_of_a_measurement() -> None:
    cells = json.loads((ROOT / "benchmarks/results/checkpoint.json").read_text())
    assert as_table([Cell(**c) for c in cells]) in (ROOT / "benchmarks/results/checkpoint.md").read_text()
    page = " ".join((ROOT / "docs/checkpoint.md").read_text().split())
    held = [c["held"] for c in cells if c["division"] == GROWING]
    assert (
        f"the interval held the exact value in {100 * min(held):.0f} to {100 * max(held):.0f} % of 100 runs in each of "
        f"{len(held)} settings, {100 * statistics.mean(held):.1f} % on average" in page
    )
    examples = {(c["network"], c["until"], c["division"]): c["examples"] for c in cells}
    settings = {key[:2] for key in examples if key[0] != "as initialised"} - {("after 30 steps", 0.1)}
    most = [examples[*s, "always 8"] / examples[*s, GROWING] for s in settings]
    assert f"{min(most):.1f} to {max(most):.1f} times as many examples" in page
    one = cell("as initialised", gradients_after(0)[:4000], 0.5, GROWING, n_runs=5)
    assert (one.windows, one.examples, one.stopped) == (12, 4 * 12 * 13, 1)
