"""`sonde.measure` in one process, compared with whole gradients and with the exact noise scale of a data set."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sonde
from tests.batch_size.checkpoint.regression import Batch, batches, by_hand, draw, endless, loss, model_of
from tests.batch_size.loops import Recording


def measure(model: nn.Module, data: Any, **options: Any) -> sonde.Measurement:
    return sonde.measure(model, options.pop("loss", loss), data, **{"unit": "rows", "verbose": False} | options)


@pytest.mark.shows("measure", "one process")
def test_the_reading_is_that_of_whole_gradients() -> None:
    model, data = model_of(), batches([4] * 30)
    measurement = measure(model, data)
    reading = measurement.reading
    (total,) = by_hand(model, [data])
    first, last = by_hand(model, [data], [slice(0, 8 * 16 + 16), slice(8 * 16 + 16, None)])
    # fp32 gradients, and the two sides round differently: a few 1e-7 of S and B, amplified by their difference.
    assert (reading.trace_cov, reading.grad_sq) == pytest.approx(total, rel=1e-5)
    assert list(reading.groups) == ["0", "2"]
    assert (reading.groups["0"].trace_cov, reading.groups["0"].grad_sq) == pytest.approx(first, rel=1e-5)
    assert (reading.groups["2"].trace_cov, reading.groups["2"].grad_sq) == pytest.approx(last, rel=1e-5)
    assert (measurement.ended, measurement.n_batches, measurement.n_units) == ("data ended", 30, 120)
    assert reading.windows == 5
    assert measurement.loss == pytest.approx(sum(loss(model, batch).item() for batch in data) / 30, rel=1e-6)


def test_batches_of_different_sizes_weigh_as_they_should() -> None:
    sizes = [4, 4, 7, 1, 2, 5, 3, 3, 6, 4, 9, 2, 4]
    model, data = model_of(), batches(sizes)
    measurement = measure(model, data)
    # 2, 4 and 6 batches; the last one is alone, and has nothing to be compared with.
    (expected,) = by_hand(model, [data])
    assert (measurement.reading.trace_cov, measurement.reading.grad_sq) == pytest.approx(expected, rel=1e-5)
    assert (measurement.n_units, measurement.n_batches) == (sum(sizes[:12]), 12)


def test_units_and_weights_are_the_users() -> None:
    """Twice the units for the same gradients: twice tr Σ per unit. Equal weights in place of units: another average."""
    model, data = model_of(), batches([4, 4, 7, 1, 2, 5, 3, 3, 6, 4, 9, 2])
    usual = measure(model, data).reading
    double = measure(model, data, units=lambda b: 2 * len(b[0])).reading
    assert double.trace_cov == pytest.approx(2 * usual.trace_cov, rel=1e-5)
    assert double.grad_sq == pytest.approx(usual.grad_sq, rel=1e-5)
    scaled = measure(model, data, weight=lambda b: 0.25 * len(b[0])).reading
    assert (scaled.trace_cov, scaled.grad_sq) == pytest.approx((usual.trace_cov, usual.grad_sq), rel=1e-5)
    alike = measure(model, data, weight=1.0, units=4).reading
    assert abs(alike.trace_cov / usual.trace_cov - 1) > 0.01
    tensors = measure(model, data, weight=lambda b: torch.tensor(len(b[0])), units=lambda b: torch.tensor(len(b[0])))
    assert tensors.reading.trace_cov == pytest.approx(usual.trace_cov, rel=1e-5)


def test_it_stops_when_the_interval_is_as_narrow_as_was_asked_for() -> None:
    data = draw(3000, torch.Generator().manual_seed(1))
    for until in (0.5, 0.2):
        seen: list[sonde.Measurement] = []
        measurement = measure(model_of(), endless(data, 8, seed=2), until=until, on_window=seen.append)
        known = measurement.reading
        assert measurement.ended == "precise"
        assert measurement.precision is not None
        assert measurement.precision <= until
        assert known.low >= (1 - until) * known.b_simple  # type: ignore[operator]
        assert known.high <= (1 + until) * known.b_simple  # type: ignore[operator]
        assert [m.ended for m in seen] == [None] * len(seen)
        assert [m.reading.windows for m in seen] == list(range(1, known.windows + 1))
        # No earlier window would have done, but for those too few to trust.
        assert all(m.precision is None or m.precision > until for m in seen[11:-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_of_weights(dtype: torch.dtype) -> None:
    model, data = model_of(), batches([4] * 90)
    expected = measure(model, data).reading
    cast = copy.deepcopy(model).to(dtype)
    reading = measure(cast, [(x.to(dtype), y.to(dtype)) for x, y in data]).reading
    assert reading.dropped == {}
    # bf16 keeps 8 bits of each gradient; what was rounded looks like noise.
    rel = 0.02 if dtype == torch.bfloat16 else 1e-4
    assert reading.trace_cov == pytest.approx(expected.trace_cov, rel=rel)
    assert reading.grad_sq == pytest.approx(expected.grad_sq, rel=5 * rel, abs=rel * expected.trace_cov / 90)


def test_windows_stop_growing_where_gradients_have_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sums in bf16 lose what is added last."""
    monkeypatch.setattr("sonde.batch_size.measure._LONGEST_IN_16_BITS", 6)
    model, data = model_of(), batches([4] * 30)
    assert measure(model, data).reading.windows == 5  # of 2, 4, 6, 8, 10
    in_bf16 = [(x.bfloat16(), y.bfloat16()) for x, y in data]
    assert measure(model.bfloat16(), in_bf16).reading.windows == 6  # of 2, 4, 6, 6, 6, 6


@pytest.mark.shows("measure", "torch.compile")
def test_autocast_and_a_compiled_model() -> None:
    model, data = model_of(), batches([4] * 30)
    expected = measure(model, data).reading

    def in_bf16(m: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(m, batch)

    assert measure(model, data, loss=in_bf16).reading.trace_cov == pytest.approx(expected.trace_cov, rel=0.02)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    assert measure(compiled, data).reading.trace_cov == pytest.approx(expected.trace_cov, rel=1e-5)


def test_the_data_of_a_long_window_are_freed() -> None:
    alive: list[int] = []

    class Counted(Tensor):
        def __del__(self) -> None:
            alive.pop()

    def data() -> Any:
        for x, y in batches([4] * 90):
            alive.append(1)
            most.append(len(alive))
            yield x.as_subclass(Counted), y

    most: list[int] = []
    measure(model_of(), data(), loss=lambda m, b: loss(m, (b[0].as_subclass(Tensor), b[1])))
    assert max(most) <= 3  # of windows of up to 18


def test_a_log_holds_the_reading_and_the_batch_that_it_judges(tmp_path: Path) -> None:
    sink = Recording()
    log = sonde.RunLog([sink, sonde.JsonlSink(tmp_path)], every=1)
    data = draw(3000, torch.Generator().manual_seed(1))
    measurement = measure(model_of(), endless(data, 8, seed=2), until=0.3, log=log, batch=64)
    last = sink.of_kind("reading")[-1]
    assert last["metrics"]["gns/b_simple"] == measurement.reading.b_simple
    assert last["metrics"]["gns/b_simple_low"] == measurement.reading.low
    assert last["metrics"]["gns/units_per_window"] == 64
    assert last["metrics"]["loss"] == pytest.approx(measurement.loss, rel=0.3)
    assert sink.closed == 1
    run = sonde.read_run(tmp_path)
    assert run.readings[-1].metrics["gns/b_simple"] == pytest.approx(measurement.reading.b_simple, rel=1e-6)
    pytest.importorskip("bokeh", reason="the report needs bokeh")
    assert re.search(r"[Bb]atch of [\d,]+ rows", sonde.write_report(tmp_path).read_text())


def test_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 2))
    measurement = measure(model, batches([4] * 12), verbose=True)
    said = capsys.readouterr().err
    assert "sonde: measuring 210 trainable parameters on cpu, in rows\n" in said
    assert "sonde: 1 dropout layer in train mode: this adds noise" in said
    assert "batch normalisation in train mode" in said
    assert said.endswith(f"sonde: {measurement}\n")
    assert "; the data ended before ± 10 %" in str(measurement)
    measure(model.eval(), batches([4] * 12), verbose=True)
    assert "mode" not in capsys.readouterr().err


def test_dependent_batches_give_a_reason_not_a_number() -> None:
    same = batches([4])[0]
    measurement = measure(model_of(), [same] * 60)
    assert measurement.reading.status == "unresolved"
    assert "same" in str(measurement)
    assert math.isfinite(measurement.n_units)
    assert measurement.ended == "data ended"
