"""The tables against tensors and ranks, and the device that a benchmark runs on."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from benchmarks.gpt import build
from benchmarks.noise_scale import main as noise_scale

from benchmarks import budget, device, norm, scaling


@pytest.mark.parametrize("main", [noise_scale, norm.main, scaling.main, budget.main])
def test_a_device_that_is_not_there_is_refused(main, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit):
        main(["--device", "hpu"])
    said = " ".join(capsys.readouterr().err.split())
    assert "there is no device 'hpu' on this machine" in said
    assert "pass --device" in said


def test_results_have_the_name_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.stem("norm", "cpu") == "norm_cpu"
    assert device.full_name("cpu") == "cpu"
    monkeypatch.setattr(device, "full_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert device.stem("norm", "cuda") == "norm_nvidia_h100_80gb_hbm3"


def test_models_have_the_tensors_that_the_table_says() -> None:
    import torch

    for n, shape in scaling.SHAPES.items():
        parameters = list(build(shape, torch.device("cpu")).parameters()) if n < 7500 else []
        tensors = len(parameters) or 12 * shape.depth + 4
        assert tensors == pytest.approx(n, rel=0.02)
        assert shape.width % shape.heads == 0


@pytest.mark.slow
def test_the_quick_table_runs_end_to_end(tmp_path: Path) -> None:
    scaling.main(["--quick", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "scaling_cpu.json").read_text())
    assert [row["ranks"] for row in found["rows"]["ranks"]] == [2, 2, 2, 2]
    assert len({row["tensors"] for row in found["rows"]["tensors"]}) == 2
    for row in itertools.chain(*found["rows"].values()):
        assert row["cost"]["window_seconds"] > 0
    assert [row["cut"] for row in found["rows"]["cut"]] == ["FSDP2", "FSDP2", "TP", "TP"]
    assert [row["tokens"] for row in found["rows"]["tokens"]] == [32, 32]
    assert [row["metric"] for row in found["rows"]["metric"]] == ["euclidean", "euclidean, adam, sign, spectral"]
    page = (tmp_path / "scaling_cpu.md").read_text()
    assert "| 2 | sonde, tap=leaf |" in page
    assert "| 2 | sonde, single examples |" in page
