"""The benchmark that compares the demo's verdict with exact values: a tiny run of it, and its committed results."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import get_args

import pytest
from benchmarks.demo_verdict import Checkpoint, as_table, run, summary

from sonde.batch_size.stats.critical_batch import Kind
from sonde.demos.byte_lm.options import DemoOptions, decide

ROOT = Path(__file__).parents[2]


def committed() -> list[Checkpoint]:
    return [Checkpoint(**at) for at in json.loads((ROOT / "benchmarks/results/demo_verdict.json").read_text())]


@pytest.mark.slow
def test_a_tiny_run_compares_readings_with_exact_values(tmp_path: Path) -> None:
    setup = decide(DemoOptions(device="cpu", context=8, batch=8), tmp_path, n_gpus=0, n_cores=2)
    found = list(run(setup, checkpoints=(2, 12), n_blocks=2, sequences_per_block=16))
    assert [at.window for at in found] == [2, 12]
    assert found[0].holds is None  # two windows have no interval
    assert (found[0].verdict, found[0].is_right, found[0].has_decided) == ("unknown", None, False)
    for at in found:
        assert math.isfinite(at.exact)
        assert at.exact_error > 0
        assert at.exact_verdict in get_args(Kind)
    assert as_table(found).count("\n") == 3
    assert "in 2 windows" not in summary(found)
    assert "of 2 windows" in summary(found)


def test_a_verdict_may_be_wrong_right_or_say_nothing() -> None:
    at = committed()[0]
    for verdict, exact, is_right, has_decided in (
        ("too_small", "about_right", False, True),
        ("about_right", "about_right", True, True),
        ("about_right_or_too_small", "about_right", True, False),
        ("about_right_or_too_small", "too_large", False, False),
        ("unknown", "too_large", None, False),
    ):
        changed = dataclasses.replace(at, verdict=verdict, exact_verdict=exact)  # type: ignore[arg-type]
        assert (changed.is_right, changed.has_decided) == (is_right, has_decided)


def test_the_page_of_results_has_them() -> None:
    found = committed()
    results = (ROOT / "benchmarks/results/demo_verdict.md").read_text()
    assert as_table(found) in results
    assert summary(found) in results
