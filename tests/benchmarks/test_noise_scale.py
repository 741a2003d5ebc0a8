from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.accuracy import exact_moments, population
from benchmarks.gpt import TINY, build
from benchmarks.noise_scale import main
from benchmarks.timing import cost

from tests import oracles


# functorch has no batching rule for attention on the CPU, and says so.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_the_exact_moments_are_those_of_the_oracle() -> None:
    model = build(TINY, torch.device("cpu"))
    tokens = population()[:32]
    double = build(TINY, torch.device("cpu")).double()
    per_example = oracles.per_example_gradients(double, lambda loss, _: loss, tokens, tokens)
    expected = oracles.population(per_example)
    exact = exact_moments(model.state_dict(), tokens)
    # Two ways to the same float64 gradients: they differ in the order of sums only.
    assert exact.grad_sq == pytest.approx(expected.grad_sq, rel=1e-10)
    assert exact.trace_cov == pytest.approx(expected.trace_cov, rel=1e-10)


def test_the_cost_is_the_median_ratio() -> None:
    # Slow and fast blocks alike, 2 % each.
    rounds = [[(1.0, 1.02), (2.0, 2.04)], [(1.5, 1.53), (10.0, 10.2)]]
    measured = cost(rounds, n_resamples=100)
    for share in (measured.median, measured.low, measured.high):
        assert share == pytest.approx(0.02)
    assert measured.n_blocks == 4
    assert measured.window_seconds == 1.75
    assert measured.seconds_added == pytest.approx(0.035)


def test_one_slow_block_does_not_move_the_cost() -> None:
    blocks = [(1.0, 1.01)] * 20 + [(1.0, 9.0)]
    measured = cost([blocks, blocks], n_resamples=400)
    assert measured.median == pytest.approx(0.01)
    assert measured.high == pytest.approx(0.01)


@pytest.mark.slow
def test_the_quick_benchmark_runs_end_to_end(tmp_path: Path) -> None:
    main(["--quick", "--only", "sonde", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "noise_scale_cpu.json").read_text())
    assert results["quick"]
    alone, ddp, accumulating = (row for row in results["rows"] if row["title"] == "sonde")
    for row in (alone, ddp, accumulating):
        assert row["cost"]["n_blocks"] == 1
        assert row["cost"]["window_seconds"] > 0
        for weights, exact in results["exact"].items():
            assert exact["grad_sq"] > 0
            # 2 runs of 40 windows are good to about 10 %; wrong conventions would be off by a factor.
            assert abs(row["accuracy"][weights]["trace_cov"]["mean"]) < 0.4
    assert alone["extra_collectives"] is None
    assert ddp["extra_collectives"] == accumulating["extra_collectives"] == 1
    page = (tmp_path / "noise_scale_cpu.md").read_text()
    for row in results["rows"]:
        assert row["title"] in page
    assert f"{results['import_seconds']:.2f} s more than" in page
