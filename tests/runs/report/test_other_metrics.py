"""A run that measured its noise scale in several metrics: the report draws each, and the log reads back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sonde
from sonde.runs.report.write import write_report
from tests.batch_size.loops import attached, small_model, train
from tests.runs.report.visible_text import visible_text


def test_every_metric_has_a_curve(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    log = sonde.RunLog(sonde.JsonlSink(tmp_path), every=5)
    with attached(model, optimizer, metric=("adam", "sign", "euclidean"), log=log) as probe:
        train(model, probe, optimizer, windows=40)
        sign = probe.reading("sign")
    text = visible_text(write_report(tmp_path))
    section = text.split("The noise scale of the same gradients in other metrics")[1]
    for name in ("sign", "euclidean"):
        assert f"noise scale now, metric '{name}'" in section
    assert "gns/adam/b_simple" not in text
    assert "metric: adam, sign, euclidean" in text
    last = sonde.read_run(tmp_path).readings[-1].metrics
    assert last["gns/sign/grad_sq"] == pytest.approx(sign.grad_sq, rel=1e-6)
