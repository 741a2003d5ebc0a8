"""What attach says about a model, its optimizer and its options, and where the report repeats it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import sonde
from sonde.batch_size.setup import NoiseScaleOptions, describe
from sonde.runs.reader import read_run
from sonde.runs.report.how_measured import how_measured
from tests.batch_size.loops import attached, batch, mean_loss, small_model, train
from tests.ranks import Ranks


def with_batch_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def test_batch_normalisation_is_said_at_attach(capsys: pytest.CaptureFixture[str]) -> None:
    model = with_batch_norm()
    with attached(model, verbose=True):
        assert "2 layers: batch normalisation in train mode" in capsys.readouterr().err
    del model[3]
    with attached(model, verbose=True):
        assert " 1 layer: batch normalisation in train mode" in capsys.readouterr().err
    model.eval()  # frozen statistics couple nothing
    with attached(model, verbose=True):
        assert "batch normalisation" not in capsys.readouterr().err


@pytest.mark.parametrize(("model", "is_shown"), [(with_batch_norm(), True), (small_model(), False)])
def test_batch_normalisation_is_in_the_report(model: nn.Sequential, is_shown: bool, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer, log=sonde.RunLog(sonde.JsonlSink(tmp_path), every=1)) as probe:
        for _ in range(2):
            for _ in range(2):
                with probe.piece(units=4):
                    model(torch.randn(4, 12)).square().mean().backward()
            probe.step()
            optimizer.step()
            optimizer.zero_grad()
    rows = {row.term: row.paragraphs for row in how_measured(read_run(tmp_path))}
    assert "optimizer: SGD" in rows["Set-up"]
    assert ("Batch normalisation" in rows) == is_shown
    if is_shown:
        assert "2 layers in train mode" in rows["Batch normalisation"][0]


def b_simple_in_pieces_of(size: int, norm: nn.Module) -> float:
    """tr Σ/|G|² of 4,096 samples at fixed weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), norm, nn.ReLU(), nn.Linear(32, 3))
    generator = torch.Generator().manual_seed(0)
    with attached(model) as probe:
        for _ in range(4096 // (4 * size)):
            for _ in range(4):
                with probe.piece(units=size):
                    mean_loss(model, *batch(size, generator)).backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    assert reading.average is not None
    assert reading.average.ratio is not None
    return reading.average.ratio  # nothing moves, so all windows tell the same


@pytest.mark.parametrize(("norm", "low", "high"), [(nn.BatchNorm1d, 1.3, 1.6), (nn.LayerNorm, 0.85, 1.15)])
def test_batch_normalisation_moves_b_simple_with_the_piece(norm: type[nn.Module], low: float, high: float) -> None:
    # The intervals of both are ± 10 % or so.
    assert low < b_simple_in_pieces_of(4, norm(32)) / b_simple_in_pieces_of(32, norm(32)) < high


def test_the_watched_optimizer_is_said_at_attach(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    for optimizer, said in (
        (torch.optim.SGD(model.parameters()), "SGD\n"),
        (torch.optim.SGD(small_model().parameters()), "SGD, which holds none of these parameters"),
        (torch.optim.SGD(model[3:].parameters()), "SGD, with 4 of 8 trainable parameters"),
        (None, "none given"),
    ):
        with attached(model, optimizer, verbose=True):
            assert said in capsys.readouterr().err


def test_batch_normalisation_that_trains_only_after_attach_is_said_at_the_first_window() -> None:
    """Pretrained models often come in evaluation mode."""
    model = with_batch_norm().eval()
    with attached(model) as probe:
        train(model.train(), probe, windows=2)
        assert "2 layers, 0 of them so at attach: batch normalisation in train mode" in probe.alerts["batch_norm"]


def _sync_batch_norm() -> tuple[dict[str, object], str]:
    model = nn.Sequential(nn.Linear(12, 6), nn.SyncBatchNorm(6), nn.Linear(6, 3))  # DDP takes it on GPUs only
    with attached(model, process_group=dist.group.WORLD) as probe:
        return probe._setup(), describe(probe._setup(), "rows", ["0"])


def test_synchronised_batch_normalisation_has_a_sentence_of_its_own(ranks2: Ranks) -> None:
    for setup, text in ranks2(_sync_batch_norm):
        assert (setup["batch_norms"], setup["sync_batch_norms"]) == (1, 1)
        assert "synchronised batch normalisation couples the samples of all pieces" in text
    with attached(with_batch_norm()) as probe:
        assert probe._setup()["sync_batch_norms"] == 0


# What attach prints, and whole numbers.


def test_the_message_of_attach(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer, verbose=True) as probe:
        printed = capsys.readouterr()
        assert printed.out == ""
        for part in ("plain", "28,", "1 data-parallel", "rows", "4: 0, 2, 3, 4", "leaf hooks"):
            assert part in printed.err
        train(model, probe, optimizer, windows=1)
        probe.reading()
        assert "3 pieces per window, 12 rows in all" in capsys.readouterr().err


@pytest.mark.parametrize("three", [3, numpy.int64(3), torch.tensor(3)])
def test_a_whole_number_may_be_of_another_type(three: int) -> None:
    log = sonde.RunLog(every=three)
    options = NoiseScaleOptions("rows", every=three)
    assert [(n, type(n)) for n in (log.every, options.every)] == [(3, int)] * 2
    of_policy = sonde.EntropyChangeOptions(every=three, micro_batch_prompts=three)
    assert [(n, type(n)) for n in (of_policy.every, of_policy.micro_batch_prompts)] == [(3, int)] * 2


@pytest.mark.parametrize("wrong", [True, numpy.float64(3.0), torch.tensor(3.0), numpy.int64(0), [3], "3"])
def test_what_is_no_whole_number_is_refused(wrong: Any) -> None:
    for make in (lambda: attached(small_model(), every=wrong), lambda: sonde.RunLog(every=wrong)):
        with pytest.raises(ValueError, match="every must be a whole number of windows from 1 up, got"):
            make()
