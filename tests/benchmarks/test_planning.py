"""The table of what attach itself costs has a row for each shape and cut."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from benchmarks.planning import CUTS, QUICK_SHAPES, SHAPES, model_of

from tests.new_process import Python


def test_the_shapes_have_as_many_tensors_as_the_page_says() -> None:
    sizes = [p.numel() for p in model_of(SHAPES["7B"], "plain").parameters()]
    assert len(sizes) == 291
    assert 6.5e9 < sum(sizes) < 7e9
    experts = list(model_of(SHAPES["mixture of experts"], "plain").parameters())
    assert abs(len(experts) - 10_000) < 100
    assert all(p.device == torch.device("meta") for p in experts)


def test_every_row_is_measured() -> None:
    with Python("-m", "benchmarks.planning", "--quick", folder=Path(__file__).parents[2]) as python:
        done = python.wait()
    assert done.status == 0, done.err[-3000:]
    *shown, numbers = done.out.strip().splitlines()
    rows = json.loads(numbers)
    assert [(row["shape"], row["cut"]) for row in rows] == [(name, cut) for name in QUICK_SHAPES for cut in CUTS]
    assert len(shown) == 2 + len(rows)
    for row in rows:
        assert row["tensors"] == sum(1 for _ in model_of(QUICK_SHAPES[row["shape"]], "plain").parameters())
        assert row["seconds"] > 0
        assert (row["gathering_seconds"] > 0) == (row["cut"] == "FSDP2") == (row["kept_bytes"] is None)
        assert row["kept_bytes"] is None or row["kept_bytes"] > 1000
