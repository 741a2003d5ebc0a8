from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.norm import main


@pytest.mark.slow
def test_the_quick_benchmark_of_the_norm_runs_end_to_end(tmp_path: Path) -> None:
    main(["--quick", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "norm_cpu.json").read_text())
    assert found["quick"]
    for result in found["results"]:
        assert {"torch", "sonde", "sonde, planned"} <= set(result["steady"])
        for name, seconds in result["steady"].items():
            assert all(s > 0 for s in seconds), name
    assert found["at_scale"]["collectives"] == 1
    assert "these numbers mean nothing" in (tmp_path / "norm_cpu.md").read_text()
