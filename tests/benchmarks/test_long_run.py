from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.long_run import main


@pytest.mark.slow
def test_the_benchmark_of_a_long_run_runs_end_to_end(tmp_path: Path) -> None:
    main(["--readings", "60", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "long_run_cpu.json").read_text())["found"]
    assert 60 * 500 < found["log_bytes"] < 60 * 5_000
    assert 3e7 < found["peak_bytes"] < 3e8
    assert "| 60 |" in (tmp_path / "long_run_cpu.md").read_text()
