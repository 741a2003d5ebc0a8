"""A small run of each benchmark: it ends, its numbers are not absurd, and its page is written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import long_run, noise_scale, norm, planning, scaling
from tests.new_process import Python

pytestmark = pytest.mark.slow


def ran(main: Any, folder: Path, name: str, *options: str) -> tuple[dict[str, Any], str]:
    """The numbers and the page that a benchmark has written."""
    main([*options, "--out", str(folder)])
    return json.loads((folder / f"{name}_cpu.json").read_text()), (folder / f"{name}_cpu.md").read_text()


def test_noise_scale(tmp_path: Path) -> None:
    results, page = ran(noise_scale.main, tmp_path, "noise_scale", "--quick", "--only", "sonde")
    alone, ddp, accumulating = (row for row in results["rows"] if row["title"] == "sonde")
    for row in (alone, ddp, accumulating):
        assert row["cost"]["window_seconds"] > 0
        for weights in results["exact"]:
            # 2 runs of 40 windows are good to about 10 %; wrong conventions would be off by a factor.
            assert abs(row["accuracy"][weights]["trace_cov"]["mean"]) < 0.4
    assert alone["extra_collectives"] is None
    assert ddp["extra_collectives"] == accumulating["extra_collectives"] == 1
    assert all(row["title"] in page for row in results["rows"])


def test_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row of each question."""
    all_of_them = list(scaling.questions("cpu", quick=True))
    firsts = {question: (question, setup, entry) for question, setup, entry in reversed(all_of_them)}
    assert set(firsts) == {"ranks", "cut", "metric", "tokens", "tensors"}
    monkeypatch.setattr(scaling, "questions", lambda *_, **__: iter(firsts.values()))
    found, page = ran(scaling.main, tmp_path, "scaling", "--quick")
    assert all(row["cost"]["window_seconds"] > 0 for (row,) in found["rows"].values())
    assert "| FSDP2 over 2 ranks | sonde |" in page


def test_norm(tmp_path: Path) -> None:
    found, page = ran(norm.main, tmp_path, "norm", "--quick")
    for result in found["results"]:
        assert {"torch", "sonde", "sonde, planned"} <= set(result["steady"])
    assert found["at_scale"]["collectives"] == 1
    assert "these numbers mean nothing" in page


def test_long_run(tmp_path: Path) -> None:
    found, page = ran(long_run.main, tmp_path, "long_run", "--readings", "60")
    assert 60 * 500 < found["found"]["log_bytes"] < 60 * 5_000
    assert "| 60 |" in page


def test_planning() -> None:
    with Python("-m", "benchmarks.planning", "--quick", folder=Path(__file__).parents[2]) as python:
        done = python.wait()
    assert done.status == 0, done.err[-3000:]
    rows = json.loads(done.out.strip().splitlines()[-1])
    cells = [(name, cut) for name in planning.QUICK_SHAPES for cut in planning.CUTS]
    assert [(row["shape"], row["cut"]) for row in rows] == cells
    for row in rows:
        assert (row["gathering_seconds"] > 0) == (row["cut"] == "FSDP2") == (row["kept_bytes"] is None)


@pytest.mark.filterwarnings("ignore")  # other packages cause various warnings when they run
def test_entropy(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs trl: pip install '.[trl]'")
    from benchmarks import entropy, entropy_cost

    found, page = ran(entropy.main, tmp_path, "entropy", "--quick")
    for t in found["accuracy"]["trials"]:  # from 6 prompts the truth may be missed, but not by far
        if t["how"] == "finite step":
            assert abs(t["delta"] - t["truth"]) < 6 * math.hypot(t["se"], t["truth_se"]), t
    said = found["cost"]["said"]
    exact = said["step, a backward for every prompt"]["delta"]
    for name, of in said.items():
        # The finite step has no baseline, so it is another estimate from the same 4 prompts.
        bound = of["first_se"] if name == entropy_cost.OURS else 0.02 * abs(exact)
        assert abs(of["delta"] - exact) < bound, name
    assert set(found["memory"]) == {"training micro-batch", entropy_cost.OURS}
    assert "these numbers mean nothing" in page
