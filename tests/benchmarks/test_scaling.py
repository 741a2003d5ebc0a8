"""The tables against tensors and ranks, and the device that a benchmark runs on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.contestants import Plain
from benchmarks.gpt import sequences
from benchmarks.noise_scale import main as noise_scale
from benchmarks.training import Cut, Run, Setup, draw_windows

from benchmarks import budget, device, norm, scaling
from tests.ranks import Ranks


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


class Differentiates(Plain):
    """Leaves the gradients of a window in place."""

    def step(self) -> None:
        pass


def gradients(setup: Setup) -> dict[str, torch.Tensor]:
    """Of the parameters of this rank's blocks, whole, after one window."""
    run = Run(setup)
    [window] = draw_windows(setup, sequences(setup.shape), 1, seed=1)
    run.train_window(Differentiates(run), window)
    held = {id(p) for p in run.wrapped.parameters()}
    named = {name: p for name, p in run.model.named_parameters() if name.startswith("blocks") and id(p) in held}
    grads: dict[str, Any] = {name: p.grad for name, p in named.items()}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}


def same_windows(cut: Cut) -> tuple[Setup, Setup]:
    """Of a model that is cut over ranks, and of one process."""
    n_ranks = 4 if cut == "HSDP" else 2
    setup = Setup(n_ranks, 1, micro_batches=2, sequences=2, shape=scaling.QUICK_SHAPES[28], cut=cut)
    return setup, dataclasses.replace(setup, ranks=1, cut="DDP", micro_batches=2 * setup.data_ranks)


@pytest.mark.parametrize("cut", ["DDP", *scaling.CUTS_OF_TWO, "HSDP"])
def test_a_model_that_is_cut_has_the_gradient_of_one_process(request: pytest.FixtureRequest, cut: Cut) -> None:
    setup, alone = same_windows(cut)
    ranks: Ranks = request.getfixturevalue(f"ranks{setup.ranks}")
    expected, found = gradients(alone), ranks(gradients, setup)
    assert set().union(*found) == set(expected)
    for grads in found:
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
def test_the_quick_table_has_a_row_for_each_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_them = list(scaling.questions("cpu", quick=True))
    assert [setup.cut for question, setup, _ in all_of_them if question == "cut"] == [*scaling.CUTS_OF_TWO]
    firsts = {question: (question, setup, entry) for question, setup, entry in reversed(all_of_them)}
    assert set(firsts) == {"ranks", "cut", "metric", "tokens", "tensors"}
    monkeypatch.setattr(scaling, "questions", lambda *_, **__: iter(firsts.values()))
    scaling.main(["--quick", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "scaling_cpu.json").read_text())
    for (row,) in found["rows"].values():
        assert row["cost"]["window_seconds"] > 0
    assert "| FSDP2 over 2 ranks | sonde |" in (tmp_path / "scaling_cpu.md").read_text()
