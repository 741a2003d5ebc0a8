from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs trl: pip install '.[trl]'")

from benchmarks.entropy import main
from benchmarks.entropy_cost import OURS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # other packages cause various warnings when they run
def test_the_quick_benchmark_of_the_entropy_runs_end_to_end(tmp_path: Path) -> None:
    main(["--quick", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "entropy_cpu.json").read_text())
    assert found["quick"]
    trials = found["accuracy"]["trials"]
    assert {(t["step"], t["scale"]) for t in trials} == {(0, 1.0), (0, 0.1)}
    assert {t["how"] for t in trials} == {"finite step", "first order"}
    for t in (t for t in trials if t["how"] == "finite step"):  # from 6 prompts the truth may be missed, but not by far
        assert abs(t["delta"] - t["truth"]) < 6 * math.hypot(t["se"], t["truth_se"]), t
    [row] = found["lengths"]
    assert (row["tokens"], row["batches"]) == (8, 2)
    assert 0 < row["support"] <= 1
    said = found["cost"]["said"]
    exact = said["step, a backward for every prompt"]["delta"]
    for name, of in said.items():
        # The finite step has no baseline, so it is another estimate from the same 4 prompts.
        assert abs(of["delta"] - exact) < (of["first_se"] if name == OURS else 0.02 * abs(exact)), name
        assert of["se"] > 0
    assert all(math.isfinite(s) and s > 0 for of in found["cost"]["seconds"].values() for s in of)
    assert set(found["memory"]) == {"training micro-batch", OURS}
    assert "these numbers mean nothing" in (tmp_path / "entropy_cpu.md").read_text()
