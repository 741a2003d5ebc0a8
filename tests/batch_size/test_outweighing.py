"""One broken batch, end to end: an alert names its window, and the reading is as if it had not been."""

from __future__ import annotations

import torch
from torch import nn

from sonde import NoiseScaleProbe
from tests.batch_size.loops import Recording, attached

SPIKE = 30


def test_a_window_with_inputs_300_times_too_large_does_not_count() -> None:
    readings = {}
    for name in ("broken", "sound"):
        torch.manual_seed(1)
        model, generator = nn.Linear(6, 1), torch.Generator().manual_seed(0)
        with attached(model, horizon=50.0, log_every=1) as probe:
            for window in range(1, 61):
                for _ in range(4):
                    inputs = torch.randn(8, 6, generator=generator)
                    scale = 300.0 if name == "broken" and window == SPIKE else 1.0
                    with probe.piece(units=8):
                        (model(scale * inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
                probe.step()
                model.zero_grad()
                if window == SPIKE and name == "broken":
                    assert probe.reading().b_simple is not None  # at once, before its neighbours are known
            readings[name] = probe.reading()
            if name == "broken":
                assert f"window {SPIKE} had" in probe.alerts["outweighs"]
                assert "It is left out" in probe.alerts["outweighs"]
            else:
                assert probe.alerts == {}
    broken, sound = readings["broken"], readings["sound"]
    assert (broken.set_aside, broken.windows, sound.set_aside) == (1, 60, 0)
    assert broken.b_simple is not None
    assert sound.b_simple is not None
    assert abs(broken.b_simple / sound.b_simple - 1) < 0.1  # one window of 60 is missing
    assert broken.average is not None
    assert sound.average is not None
    assert broken.average.b_simple is not None
    assert sound.average.b_simple is not None
    assert abs(broken.average.b_simple / sound.average.b_simple - 1) < 0.1


def test_a_spike_of_one_small_group_does_not_count_for_that_group() -> None:
    """The second layer's gradient is small beside the first's, and 1,000 times as large in one window."""
    readings, alerts = {}, {}
    for name in ("broken", "sound"):
        torch.manual_seed(1)
        model, generator = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)]), torch.Generator().manual_seed(0)
        with attached(model, horizon=50.0, log_every=1) as probe:
            for window in range(1, 61):
                for _ in range(4):
                    inputs = torch.randn(8, 6, generator=generator)
                    scale = 1e-3 * (1000.0 if name == "broken" and window == SPIKE else 1.0)
                    large, small = (model_(inputs) - inputs.sum(1, keepdim=True) for model_ in model)
                    with probe.piece(units=8):
                        (large.square().mean() + scale * small.square().mean()).backward()
                probe.step()
                model.zero_grad()
            readings[name], alerts[name] = probe.reading(), dict(probe.alerts)
    broken, sound = readings["broken"], readings["sound"]
    assert alerts["sound"] == {}
    assert list(alerts["broken"]) == ["group_outweighs"]
    assert f"window {SPIKE} " in alerts["broken"]["group_outweighs"]
    assert "'1'" in alerts["broken"]["group_outweighs"]
    assert (broken.set_aside, broken.groups["1"].set_aside, broken.groups["0"].set_aside) == (0, 1, 0)
    small, expected = broken.groups["1"].b_simple, sound.groups["1"].b_simple
    assert small is not None
    assert expected is not None
    assert abs(small / expected - 1) < 0.1  # one window of 60 is missing


def train_with_spikes(*, at: tuple[int, ...], windows: int, horizon: float = 50.0) -> tuple[NoiseScaleProbe, Recording]:
    torch.manual_seed(1)
    model, generator, sink = nn.Linear(6, 1), torch.Generator().manual_seed(0), Recording()
    with attached(model, horizon=horizon, sinks=[sink]) as probe:
        for window in range(1, windows + 1):
            for _ in range(4):
                inputs = torch.randn(8, 6, generator=generator)
                with probe.piece(units=8):
                    (
                        model((300.0 if window in at else 1.0) * inputs) - inputs.sum(1, keepdim=True)
                    ).square().mean().backward()
            probe.step()
            model.zero_grad()
    return probe, sink


def test_each_broken_window_is_named() -> None:
    probe, sink = train_with_spikes(at=(40, 90), windows=120)
    assert [a["message"].split(" had")[0] for a in sink.of_kind("alert")] == ["window 40", "window 90"]
    assert "window 90 had" in probe.alerts["outweighs"]


def test_readings_name_a_broken_window_for_one_horizon() -> None:
    _, sink = train_with_spikes(at=(30,), windows=120, horizon=40.0)
    naming = [r["window"] for r in sink.of_kind("reading") if "outweighs" in r["alerts"]]
    assert naming == [40, 50, 60]
    assert sink.of_kind("reading")[-1]["metrics"]["gns/set_aside"] == 1


def test_a_broken_window_at_the_end_of_a_run_is_named_when_the_probe_is_closed() -> None:
    probe, sink = train_with_spikes(at=(58,), windows=60)
    assert [a["window"] for a in sink.of_kind("alert")] == [60]
    assert "window 58 had" in probe.alerts["outweighs"]
