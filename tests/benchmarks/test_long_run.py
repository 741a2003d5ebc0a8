from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_benchmark_of_a_long_run_runs_end_to_end(tmp_path: Path) -> None:
    options = ["--readings", "300", "--again", "2", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.long_run", *options]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, capture_output=True, timeout=280)
    found = json.loads((tmp_path / "long_run_cpu.json").read_text())["found"]
    assert found.keys() == {"300", "600"}
    assert all(value > 0 for result in found.values() for value in result.values())
    assert "| 300 |" in (tmp_path / "long_run_cpu.md").read_text()
