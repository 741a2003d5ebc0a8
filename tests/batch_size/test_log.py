"""The records that sinks receive, sinks that fail, and the user's own scalars."""

from __future__ import annotations

import gc
import itertools
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import sonde
from sonde.runs.reader import read_run
from tests.batch_size.loops import Recording, attached, batch, mean_loss, small_model, train
from tests.new_process import Python


def test_the_records_that_sinks_receive() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sink = Recording()
    with attached(model, optimizer, log=sonde.RunLog(sink, every=5, run="a run", metadata={"lr": 0.01})) as probe:
        generator = torch.Generator().manual_seed(0)
        norms, losses = [], []
        for window in range(12):
            for _ in range(3):
                with probe.piece(units=4):
                    loss = mean_loss(model, *batch(4, generator))
                    loss.backward()
            probe.log(loss=loss, lr=0.01)
            norms.append(float(probe.clip_grad_norm_(3.0)))
            losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
            if window == 6:
                assert len(sink.of_kind("reading")) == 1  # one copy each log_every windows, not each window
    (header,) = sink.of_kind("header")
    assert header["run"] == "a run"
    assert header["unit"] == "rows"
    assert header["setup"]["ranks"] == 1
    assert header["metadata"] == {"lr": 0.01}
    assert header["metrics"]["gns/b_simple"]["unit"] == "rows"
    readings = sink.of_kind("reading")
    assert [r["window"] for r in readings] == [5, 10, 12]
    for reading, part in zip(readings, (slice(0, 5), slice(5, 10), slice(10, 12)), strict=True):
        metrics = reading["metrics"]
        assert metrics["loss"] == pytest.approx(sum(losses[part]) / len(losses[part]))
        assert metrics["lr"] == pytest.approx(0.01)
        assert metrics["grad/norm"] == pytest.approx(sum(norms[part]) / len(norms[part]), rel=1e-6)
        assert metrics["grad/clip_fraction"] == sum(n > 3.0 for n in norms[part]) / len(norms[part])
        assert metrics["grad/max_norm"] == 3.0
        assert 0 < metrics["cost/fraction"] < 1
        assert reading["pieces"]["per_window"] == 3
    assert readings[-1]["metrics"]["run/units_seen"] == 12 * 12
    assert sink.of_kind("end")[0]["reason"] == "closed"
    assert sink.closed == 1


def test_the_logged_norm_is_that_before_a_foreign_clip() -> None:
    model, sink, norms = small_model(), Recording(), []
    with attached(model, sinks=[sink], log_every=1) as probe:
        clip = torch.nn.utils.clip_grad_norm_
        train(model, probe, before_step=lambda: norms.append(float(clip(model.parameters(), 0.01))))
    metrics = sink.of_kind("reading")[0]["metrics"]
    assert metrics["grad/norm"] == pytest.approx(norms[0], rel=1e-5)
    assert metrics["grad/clip_fraction"] is None  # the probe did not clip
    assert metrics["grad/max_norm"] is None


def test_cost_counts_every_second_once() -> None:
    model = small_model()
    sink = Recording()
    with attached(model, sinks=[sink], log_every=1) as probe:
        end_piece = probe._reader.tap.end_piece  # type: ignore[union-attr]
        probe._reader.tap.end_piece = lambda: (time.sleep(0.2), end_piece())[1]  # type: ignore[union-attr,assignment]
        train(model, probe, sizes=(4, 4))
    metrics = sink.of_kind("reading")[0]["metrics"]
    assert 0.4 <= metrics["cost/seconds_per_window"] < 0.8  # 0.8 if they were counted twice
    assert metrics["cost/fraction"] <= 1


def test_a_sink_that_cannot_be_closed_does_not_keep_others_open(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Recording):
        def close(self) -> None:
            raise OSError("stuck")

    sound = Recording()
    attached(small_model(), sinks=[Stuck(), sound]).close()
    assert sound.closed == 1
    assert "Stuck could not be closed: stuck" in caplog.text


def test_a_log_that_must_begin_is_raised_at_the_start_and_the_others_are_closed() -> None:
    class Full(Recording):
        must_begin = True

        def write(self, record: Any) -> None:
            raise OSError("disk full")

        def close(self) -> None:
            raise OSError("cannot be closed either")

    sound = Recording()
    with pytest.raises(OSError, match="disk full"):
        attached(small_model(), sinks=[Full(), sound])
    assert sound.closed == 1


def test_any_other_sink_that_fails_at_the_start_is_said_once_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Down(Recording):
        def write(self, record: Any) -> None:
            raise ConnectionError("the tracker is down")

    sound, down, model = Recording(), Down(), small_model()
    with attached(model, sinks=[down, sound]) as probe:
        train(model, probe, torch.optim.SGD(model.parameters(), lr=0.1), windows=20)
    assert {record["kind"] for record in sound.records} >= {"header", "reading", "end"}
    assert caplog.text.count("the tracker is down") == 1
    assert down.closed == 1


def test_metadata_that_is_not_json_is_refused_at_attach(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(ValueError, match="must hold JSON values only"):
        attached(model, optimizer, log=sonde.RunLog(sonde.JsonlSink(tmp_path / "run"), metadata={"model": model}))
    assert not any(p._backward_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert list(tmp_path.glob("run/*")) == []


NEVER_CLOSED = """
import sys, torch, sonde
torch.manual_seed(0)
model = torch.nn.Linear(5, 1)
probe = sonde.attach(model, unit="rows", units_per_piece="first dim", log=sys.argv[1])
for _ in range(8):
    for _ in range(3):
        (model(torch.randn(4, 5)) - 2).square().mean().backward()
    probe.step()
    model.zero_grad()
"""


def test_a_script_that_ends_without_close_leaves_a_whole_log_and_says_its_reading(tmp_path: Path) -> None:
    with Python("-c", NEVER_CLOSED, str(tmp_path / "run"), folder=tmp_path) as python:
        ended = python.wait()
    assert (ended.status, ended.out) == (0, "")
    assert re.fullmatch(
        r"sonde: B_simple .* rows.*, .* over the run, batch 12 rows, 8 windows", ended.err.splitlines()[-1]
    )
    run = sonde.read_run(tmp_path / "run")
    assert run.readings[-1].window == 8
    assert run.ended == "the process ended without probe.close()"


@pytest.mark.parametrize("n_windows", [23, 25, 30])
def test_groups_are_read_seldom_and_the_log_ends_with_those_of_the_last_window(n_windows: int, tmp_path: Path) -> None:
    model, sink = small_model(), Recording()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer, log=sonde.RunLog([sink, sonde.JsonlSink(tmp_path)], every=1)) as probe:
        train(model, probe, optimizer, windows=n_windows)
        last = probe.reading()
    with_groups = [r["window"] for r in sink.of_kind("reading") if "groups" in r]
    assert with_groups == [*range(1, 11), *range(20, n_windows + 1, 10)]
    details = sink.of_kind("details")
    assert [r["window"] for r in details] == ([] if n_windows == 30 else [n_windows])
    written = (details or sink.of_kind("reading"))[-1]["groups"]
    assert written["4"]["b_simple"] == last.groups["4"].b_simple
    assert read_run(tmp_path).readings[-1].groups["4"].grad_sq == last.groups["4"].grad_sq


def test_a_last_reading_whose_turn_has_not_come_has_groups() -> None:
    model, sink = small_model(), Recording()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer, log=sonde.RunLog(sink, every=2)) as probe:
        train(model, probe, optimizer, windows=25)  # 12 readings, and a thirteenth at the end
    with_groups = [r["window"] for r in sink.of_kind("reading") if "groups" in r]
    assert with_groups == [*range(2, 21, 2), 25]
    assert not sink.of_kind("details")


# The user's own scalars.


def logged(*windows: list[Any]) -> list[Any]:
    """The mean of a scalar in each reading, if it is given these values in each window."""
    model, sink = small_model(), Recording()
    with attached(model, sinks=[sink], log_every=1) as probe:
        for values in windows:
            for value in values:
                probe.log(loss=value)
            train(model, probe)
    return [record["metrics"]["loss"] for record in sink.of_kind("reading")]


def test_scalars_of_a_window_are_averaged_whatever_their_type() -> None:
    with torch.inference_mode():
        inference = torch.tensor(8.0)
    several = [1.0, torch.tensor(2.0), torch.tensor(3, dtype=torch.int64), 4, torch.tensor([6.0]).bfloat16(), inference]
    assert logged([torch.tensor(1.0), 4.0], [*several, torch.tensor(11.0)]) == [2.5, 5.0]


def test_a_scalar_is_taken_as_it_is_when_it_is_logged() -> None:
    model, sink, running = small_model(), Recording(), torch.tensor(5.0)
    with attached(model, sinks=[sink], log_every=1) as probe:
        probe.log(loss=running)
        running.zero_()
        train(model, probe)
    assert sink.of_kind("reading")[0]["metrics"]["loss"] == 5.0


def n_single_numbers() -> int:
    """0-dim tensors that are alive."""
    return sum(issubclass(type(thing), torch.Tensor) and thing.dim() == 0 for thing in gc.get_objects())


def test_losses_of_windows_between_are_not_kept_one_by_one() -> None:
    model, sink, alive = small_model(), Recording(), {}
    with attached(model, sinks=[sink], log_every=1, every=64) as probe:
        for step in range(1, 129):
            probe.log(loss=torch.tensor(float(step)))
            train(model, probe)
            if step in (2, 60):
                alive[step] = n_single_numbers()
    assert alive[60] < alive[2] + 10
    ends = [0, *(record["window"] for record in sink.of_kind("reading"))]
    means = [record["metrics"]["loss"] for record in sink.of_kind("reading")]
    assert means == [(first + 1 + last) / 2 for first, last in itertools.pairwise(ends)]
