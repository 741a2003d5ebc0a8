from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_quick_benchmark_of_the_norm_runs_end_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.norm", "--quick", "--out", str(tmp_path)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, capture_output=True, timeout=280)
    found = json.loads((tmp_path / "norm_cpu.json").read_text())
    assert found["quick"]
    for result in found["results"]:
        assert {"torch", "sonde", "sonde, planned"} <= set(result["steady"])
        for name, seconds in result["steady"].items():
            assert all(s > 0 for s in seconds), name
    assert found["at_scale"]["collectives"] == 1
    assert "these numbers mean nothing" in (tmp_path / "norm_cpu.md").read_text()
