"""Windows, alerts, state and what sinks receive."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sonde
from sonde import NoiseScaleProbe
from tests.batch_size.loops import (
    Recording,
    attached,
    batch,
    mean_loss,
    piece_losses,
    small_model,
    train,
)

# Windows.


def test_a_single_piece_gives_no_number_and_both_ways_out() -> None:
    model = small_model()
    reading, _ = _single(model)
    assert (reading.windows, reading.b_simple, reading.low) == (0, None, None)
    assert "accumulate gradients over 2 or more micro-batches" in reading.reason
    assert "2 or more data-parallel ranks" in reading.reason
    assert "not known yet" in str(reading)


def _single(model: nn.Module) -> tuple[sonde.NoiseScaleReading, None]:
    with attached(model) as probe:
        with probe.piece(units=4):
            piece_losses(model, [4])[0]().backward()
        probe.step()
        return probe.reading(), None


def test_reading_before_anything() -> None:
    with attached(small_model()) as probe:
        reading = probe.reading()
    assert (reading.status, reading.windows, reading.units_per_window) == ("unresolved", 0, None)
    assert reading.reason == "no window has ended yet"


def test_called_twice_is_said_and_counted_once() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, optimizer) as probe:
        for _ in range(3):
            for loss in piece_losses(model, [4, 4]):
                with probe.piece(units=4):
                    loss().backward()
            norm = probe.clip_grad_norm_(0.5)
            probe.step()
            again = probe.clip_grad_norm_(0.5)
            assert float(norm) > 0.5
            assert float(again) == pytest.approx(0.5, rel=1e-4)
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
        assert (reading.windows, reading.units_per_window) == (3, 8)
        assert "ended twice" in probe.alerts["called_twice"]


def test_never_called_is_said_and_the_pieces_forgotten() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer) as probe:
        for window in range(3):
            for loss in piece_losses(model, [4, 4]):
                with probe.piece(units=4):
                    loss().backward()
            if window:
                probe.step()
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
        assert (reading.windows, reading.dropped) == (2, {})
        assert "call probe.step()" in probe.alerts["never_called"]


def test_a_window_that_is_never_ended_is_said_at_the_end_too() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, optimizer) as probe:
        with probe.piece(units=4):
            piece_losses(model, [4])[0]().backward()
        optimizer.step()
        assert not probe.alerts  # probe.step() may still come: late
    assert "was not ended" in probe.alerts["never_called"]


def test_ended_after_the_optimizers_step_has_one_name_and_no_other() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, optimizer) as probe:
        for _ in range(3):
            for loss in piece_losses(model, [4, 4]):
                with probe.piece(units=4):
                    loss().backward()
            optimizer.step()
            probe.step()
            optimizer.zero_grad()
        reading = probe.reading()
    assert list(probe.alerts) == ["ended_late"]
    assert reading.windows == 0
    [(reason, n)] = reading.dropped.items()
    assert "ended after optimizer.step()" in reason
    assert n == 3


@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1e9, math.inf])
def test_clip_is_torchs(max_norm: float) -> None:
    ours, theirs = small_model(), small_model()
    with attached(ours) as probe:
        for a, b in zip(piece_losses(ours, [4, 4]), piece_losses(theirs, [4, 4]), strict=True):
            with probe.piece(units=4):
                a().backward()
            b().backward()
        got = probe.clip_grad_norm_(max_norm)
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        assert float(got) == pytest.approx(float(expected), rel=1e-6)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)
        assert probe.reading().windows == 1  # measured before the clip


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_clip_refuses_a_bad_threshold_and_touches_nothing(max_norm: float) -> None:
    model = small_model()
    piece_losses(model, [4])[0]().backward()
    before = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    with attached(model) as probe, pytest.raises(ValueError, match="max_norm must be ≥ 0"):
        probe.clip_grad_norm_(max_norm)
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))  # type: ignore[arg-type]


def test_clip_raises_on_a_norm_that_is_not_finite() -> None:
    model = small_model()
    with attached(model) as probe:
        with probe.piece(units=4):
            (piece_losses(model, [4])[0]() * math.nan).backward()
        with pytest.raises(RuntimeError, match="the gradient norm is nan"):
            probe.clip_grad_norm_(1.0, error_if_nonfinite=True)


# Alerts.


def test_same_data_in_all_micro_batches() -> None:
    model = small_model()
    loss = piece_losses(model, [4])[0]
    with attached(model, log_every=1) as probe:
        for _ in range(8):
            for _ in range(3):
                with probe.piece(units=4):
                    loss().backward()
            probe.step()
            model.zero_grad()
        probe.reading()
        assert "the same data" in probe.alerts["same_data"]


def test_an_alert_is_over_with_its_cause() -> None:
    """Raised once, written with every reading of its time, and with none after it."""
    model = small_model()
    sink = Recording()
    losses = piece_losses(model, [4, 4])
    with attached(model, sinks=[sink], log_every=1) as probe:
        for window in range(4):
            for loss in losses:
                with probe.piece(units=4):
                    (loss() * (math.nan if window in (1, 2) else 1.0)).backward()
            probe.step()
            model.zero_grad()
    assert [list(r["alerts"]) for r in sink.of_kind("reading")] == [[], ["not_finite"], ["not_finite"], []]
    assert [a["name"] for a in sink.of_kind("alert")] == ["not_finite"]


def test_healthy_data_raise_no_alert() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer, log_every=1) as probe:
        train(model, probe, optimizer, windows=40)
        assert probe.reading().status == "resolved"
        assert probe.alerts == {}


def test_unresolved_signal_is_said() -> None:
    """Pure noise: the true gradient is 0, so no number of windows finds an upper end."""
    model = nn.Linear(30, 1, bias=False)
    generator = torch.Generator().manual_seed(0)
    with attached(model, log_every=10, units_per_piece=2) as probe:
        for _ in range(60):
            for _ in range(3):
                (model.weight * torch.randn(1, 30, generator=generator)).sum().backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
        assert reading.status != "resolved"
        assert reading.b_simple is None
        assert "cannot yet be distinguished from 0 after 50 windows" in probe.alerts["unresolved"]


# State and records.


def test_state_goes_on_where_it_stopped() -> None:
    def run(model: nn.Module, probe: NoiseScaleProbe, seed: int) -> None:
        train(model, probe, torch.optim.SGD(model.parameters(), lr=0.0), windows=10, seed=seed)

    model = small_model()
    with attached(model, horizon=20.0) as whole:
        run(model, whole, 0)
        run(model, whole, 1)
        expected = whole.reading()
    with attached(model, horizon=20.0) as first:
        run(model, first, 0)
        state, before = first.state_dict(), first.reading()
    with attached(model, horizon=20.0) as second:
        second.load_state_dict(state)
        assert second.reading() == before
        run(model, second, 1)
        got = second.reading()
    # Other elements are compared after a restart, and κ has their rounding: some 1e-8.
    assert (got.b_simple, got.low, got.high) == pytest.approx(
        (expected.b_simple, expected.low, expected.high), rel=1e-6
    )
    assert got.windows == 20
    for name, group in got.groups.items():
        assert group.trace_cov == pytest.approx(expected.groups[name].trace_cov, rel=1e-6)


@pytest.mark.parametrize("change", [{"version": 1}, {"more": 1}, {"averages": {}}, {"run": {"window": 1}}])
def test_foreign_state_is_refused_whole(change: dict[str, Any]) -> None:
    model = small_model()
    with attached(model) as probe:
        train(model, probe, torch.optim.SGD(model.parameters(), lr=0.0), windows=3)
        before = probe.state_dict()
        with pytest.raises(ValueError, match=r"version|unknown keys"):
            probe.load_state_dict(before | change)
        assert probe.state_dict() == before


_DAMAGE: list[tuple[list[str], Any]] = [
    (["run"], None),
    (["run", "window"], -1),
    (["run", "window"], 2.5),
    (["run", "units_seen"], "many"),
    (["averages", "groups"], []),
    (["averages", "total"], 7),
    (["averages", "total", "windows"], True),
    (["averages", "total", "windows"], -3),
    (["averages", "total", "windows"], 0),
    (["averages", "total", "weight"], 0.0),
    (["averages", "total", "sq_weight"], math.nan),
    (["averages", "total", "dev_trace_trace"], -1.0),
    (["averages", "groups", "4", "trace_cov"], None),
    (["averages", "units"], math.inf),
    (["averages", "units_weight"], -1),
    (["averages", "dropped"], ["zero"]),
    (["averages", "dropped"], {"zero": -1}),
]


@pytest.mark.parametrize(("path", "value"), _DAMAGE, ids=str)
def test_damaged_state_is_refused_whole(path: list[str], value: Any) -> None:
    model = small_model()
    with attached(model) as probe:
        train(model, probe, torch.optim.SGD(model.parameters(), lr=0.0), windows=3)
        before = probe.state_dict()
        damaged = place = copy.deepcopy(before)
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(ValueError, match=r"must be|must map|do not fit"):
            probe.load_state_dict(damaged)
        assert probe.state_dict() == before


def test_state_of_another_model_is_refused() -> None:
    with (
        attached(small_model()) as a,
        attached(nn.Linear(2, 2)) as b,
        pytest.raises(ValueError, match="state is of other parameters"),
    ):
        b.load_state_dict(a.state_dict())


def test_what_sinks_receive() -> None:
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
        assert 0 < metrics["cost/fraction"] < 1
        assert reading["pieces"]["per_window"] == 3
    assert readings[-1]["metrics"]["run/units_seen"] == 12 * 12
    assert sink.of_kind("end")[0]["reason"] == "closed"
    assert sink.closed == 1


def test_norm_is_logged_as_it_was_before_somebody_else_clipped() -> None:
    model = small_model()
    sink = Recording()
    norms = []
    with attached(model, sinks=[sink], log_every=1) as probe:
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                loss().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
        probe.step()
    metrics = sink.of_kind("reading")[0]["metrics"]
    assert metrics["grad/norm"] == pytest.approx(norms[0], rel=1e-5)
    assert metrics["grad/clip_fraction"] is None  # not ours to say


def test_an_exception_in_the_loop_is_the_reason_in_the_log() -> None:
    sink = Recording()
    with pytest.raises(KeyError), attached(small_model(), sinks=[sink]):
        raise KeyError("x")
    assert sink.of_kind("end")[0]["reason"] == "stopped by KeyError"


def test_close_removes_every_hook_and_may_be_called_again() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    probe = attached(model, optimizer)
    assert all(p._backward_hooks for p in model.parameters())
    probe.close()
    probe.close()
    assert not any(p._backward_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks


def test_what_attach_prints(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer, verbose=True) as probe:
        said = capsys.readouterr()
        assert said.out == ""
        for part in ("plain", "28,", "1 data-parallel", "rows", "4: 0, 2, 3, 4", "leaf hooks"):
            assert part in said.err
        train(model, probe, optimizer, windows=1)
        probe.reading()
        assert "3 pieces per window, 12 rows in all" in capsys.readouterr().err


def test_a_sink_that_cannot_write_is_dropped_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Full(Recording):
        def write(self, record: Any) -> None:
            if len(self.records) == 2:
                raise OSError(28, "No space left on device")
            super().write(record)

    full, sound = Full(), Recording()
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer, sinks=[full, sound], log_every=1) as probe:
        train(model, probe, optimizer, windows=5)
    assert len(full.of_kind("reading")) == 1
    assert len(sound.of_kind("reading")) == 5
    assert "Full writes no more: [Errno 28]" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused_at_attach(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    model = small_model()
    with pytest.raises(PermissionError):
        attached(model, sinks=[sonde.JsonlSink(tmp_path / "run")])
    assert not any(p._backward_hooks for p in model.parameters())


def test_metadata_that_is_not_json_is_refused_at_attach(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(ValueError, match="must hold JSON values only"):
        attached(model, optimizer, log=sonde.RunLog(sonde.JsonlSink(tmp_path / "run"), metadata={"model": model}))
    assert not any(p._backward_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert list(tmp_path.glob("run/*")) == []


def test_a_closed_probe_says_so() -> None:
    probe = attached(small_model())
    probe.close()
    with pytest.raises(RuntimeError, match="the probe is closed"):
        probe.step()


def test_scalars_of_a_window_are_averaged() -> None:
    model = small_model()
    sink = Recording()
    with attached(model, sinks=[sink], log_every=1) as probe:
        for loss, value in zip(piece_losses(model, [4, 4]), (torch.tensor(1.0), 4.0), strict=True):
            with probe.piece(units=4):
                loss().backward()
            probe.log(loss=value)
        probe.step()
    assert sink.of_kind("reading")[0]["metrics"]["loss"] == 2.5


def test_parameters_replaced_later_are_noticed() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer, log_every=1) as probe:
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
        train(model, probe, optimizer, windows=2)
        assert "0.weight" in probe.alerts["not_watched"]


def test_a_scalar_is_taken_as_it_is_when_it_is_logged() -> None:
    model = small_model()
    sink = Recording()
    running = torch.tensor(5.0)
    with attached(model, sinks=[sink], log_every=1) as probe:
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                loss().backward()
        probe.log(loss=running)
        running.zero_()
        probe.step()
    assert sink.of_kind("reading")[0]["metrics"]["loss"] == 5.0


def test_a_log_that_cannot_be_begun_is_the_error_and_closes_the_others() -> None:
    class Full(Recording):
        def write(self, record: Any) -> None:
            raise OSError("disk full")

        def close(self) -> None:
            raise OSError("cannot be closed either")

    sound = Recording()
    with pytest.raises(OSError, match="disk full"):
        attached(small_model(), sinks=[Full(), sound])
    assert sound.closed == 1


def test_sinks_may_come_from_a_generator() -> None:
    sink = Recording()
    attached(small_model(), sinks=(s for s in [sink])).close()
    assert [r["kind"] for r in sink.records] == ["header", "end"]


def test_a_sink_that_is_dropped_is_closed() -> None:
    class Fills(Recording):
        def write(self, record: Any) -> None:
            if record["kind"] == "end":
                raise OSError("disk full")

    fills = Fills()
    attached(small_model(), sinks=[fills]).close()
    assert fills.closed == 1


@pytest.mark.parametrize(
    ("scalars", "match"),
    [
        ({"a b": 1.0}, "letters, digits"),
        ({"z": torch.zeros((), dtype=torch.complex64)}, "real number"),
    ],
)
def test_scalars_that_no_tracker_takes_are_refused(scalars: dict[str, Any], match: str) -> None:
    with attached(small_model()) as probe, pytest.raises(ValueError, match=match):
        probe.log(**scalars)


def test_state_of_another_unit_or_metric_is_refused() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with attached(model) as rows:
        state = rows.state_dict()
    with attached(model, unit="images") as images, pytest.raises(ValueError, match="of other unit"):
        images.load_state_dict(state)
    with attached(model, optimizer, metric="adam") as adam, pytest.raises(ValueError, match="of other metric"):
        adam.load_state_dict(state)


def test_a_sink_that_cannot_be_closed_does_not_keep_others_open(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Recording):
        def close(self) -> None:
            raise OSError("stuck")

    sound = Recording()
    attached(small_model(), sinks=[Stuck(), sound]).close()
    assert sound.closed == 1
    assert "Stuck could not be closed: stuck" in caplog.text


def test_windows_on_their_way_are_not_added_to_a_loaded_state() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer) as probe:
        train(model, probe, optimizer, windows=5)
        state = probe.state_dict()
        train(model, probe, optimizer, windows=7)
        probe.load_state_dict(state)
        assert probe.reading().windows == 5


def test_parameters_unfrozen_later_are_noticed() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer, log_every=1) as probe:
        train(model, probe, optimizer, windows=2)
        assert "not_watched" not in probe.alerts
        model[0].requires_grad_(True)
        train(model, probe, optimizer, windows=2)
        assert "0.weight" in probe.alerts["not_watched"]


def test_the_batch_size_is_the_present_one() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer, horizon=5.0) as probe:
        train(model, probe, optimizer, windows=20, sizes=(4, 4))
        train(model, probe, optimizer, windows=40, sizes=(16, 16))
        assert probe.reading().units_per_window == pytest.approx(32, abs=0.1)


def test_one_piece_with_all_the_weight_is_dropped() -> None:
    model = small_model()
    with attached(model) as probe:
        for loss, weight in zip(piece_losses(model, [4, 4]), (1.0, 1e-20), strict=True):
            with probe.piece(units=4, weight=weight):
                loss().backward()
        probe.step()
        assert "all the weight" in probe.reading().reason


def test_a_norm_that_is_not_finite_is_counted_before_it_is_raised() -> None:
    model = small_model()
    with attached(model) as probe:
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                (loss() * math.nan).backward()
        with pytest.raises(RuntimeError, match="the gradient norm is nan"):
            probe.clip_grad_norm_(1.0, error_if_nonfinite=True)
        assert list(probe.reading().dropped.values()) == [1]


def test_clip_takes_parameters_unfrozen_after_attach() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    with attached(model) as probe:
        model[0].requires_grad_(True)
        with probe.piece(units=4):
            piece_losses(model, [4])[0]().backward()
        probe.clip_grad_norm_(0.1)
    assert torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]) == pytest.approx(0.1, rel=1e-4)  # type: ignore[misc]


def test_a_child_named_module_is_not_lost() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.module = nn.Linear(3, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x * self.weight)

    model = Outer()
    with attached(model) as probe:
        with probe.piece(units=1):
            model(torch.ones(2, 3)).sum().backward()
        norm = probe.clip_grad_norm_(math.inf)
    assert float(norm) == pytest.approx(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))  # type: ignore[misc]


def test_cost_counts_every_second_once() -> None:
    import time

    model = small_model()
    sink = Recording()
    with attached(model, sinks=[sink], log_every=1) as probe:
        end_piece = probe._taps.tap.end_piece  # type: ignore[union-attr]
        probe._taps.tap.end_piece = lambda: (time.sleep(0.05), end_piece())[1]  # type: ignore[union-attr,assignment]
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                loss().backward()
        probe.step()
    metrics = sink.of_kind("reading")[0]["metrics"]
    assert 0.1 <= metrics["cost/seconds_per_window"] < 0.15
    assert metrics["cost/fraction"] <= 1


NEVER_CLOSED = """
import sys, torch, sonde
model = torch.nn.Linear(5, 1)
probe = sonde.attach(model, unit="rows", log=sonde.RunLog(sonde.JsonlSink(sys.argv[1])), verbose=False)
for _ in range(8):
    for _ in range(3):
        with probe.piece(units=4):
            model(torch.randn(4, 5)).square().mean().backward()
    probe.step()
    model.zero_grad()
"""


def test_a_script_that_ends_without_close_leaves_a_whole_log(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", NEVER_CLOSED, str(tmp_path / "run")], check=True, timeout=120)
    run = sonde.read_run(tmp_path / "run")
    assert run.readings[-1].window == 8
    assert run.ended == "the process ended without probe.close()"
