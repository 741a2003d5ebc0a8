from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs trl: pip install '.[trl]'")

from benchmarks.entropy import main


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # other packages cause various warnings when they run
def test_the_quick_benchmark_of_the_entropy_runs_end_to_end(tmp_path: Path) -> None:
    main(["--quick", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "entropy_cpu.json").read_text())
    assert found["quick"]
    trials = found["accuracy"]["trials"]
    assert {(t["step"], t["scale"]) for t in trials} == {(0, 1.0), (0, 0.1), (2, 1.0), (2, 0.1)}
    for whole, tenth in zip(trials[:2], trials[2:4], strict=True):  # one evaluation batch, one step and a tenth of it
        assert tenth["delta"] == pytest.approx(0.1 * whole["delta"], rel=0.02)
    said = found["cost"]["said"]
    exact = said["step, a backward for every prompt"]["delta"]
    for name, of in said.items():
        assert of["delta"] == pytest.approx(exact, rel=0.02), name
        assert of["se"] > 0
    assert all(math.isfinite(s) and s > 0 for of in found["cost"]["seconds"].values() for s in of)
    assert set(found["memory"]) == {"training micro-batch", "sonde, update='step'"}
    assert "these numbers mean nothing" in (tmp_path / "entropy_cpu.md").read_text()
