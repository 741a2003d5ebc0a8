"""One log for all probes of a run, whatever their units; a probe of one's own declares its metrics and its section."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sonde
from tests.batch_size.loops import Recording, windows_of_rows
from tests.ranks import Ranks


class DeadUnits:
    """A probe of one's own."""

    METRICS: Mapping[str, sonde.Metric] = {
        "layer/dead_units": sonde.Metric("fraction", "units whose gradient is exactly 0"),
        "layer/never": sonde.Metric("fraction", "never known"),
    }
    SECTION = sonde.ReportSection("Dead <b>units</b>", "How much of the layer has stopped learning.", tuple(METRICS))

    def step(self) -> None:
        pass

    def metrics(self) -> dict[str, float | None]:
        return {"layer/dead_units": 0.25, "layer/never": None}

    def close(self) -> None:
        pass


def test_probes_with_other_units_write_one_log(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    log = sonde.RunLog(sonde.JsonlSink(tmp_path), run="both", every=2)
    noise = sonde.attach(model, unit="sequences", log=log, verbose=False)
    policy = sonde.PolicyLog(log, setup={"wrapper": "a loop"})
    windows_of_rows(noise, model, 4)
    policy.measured(1, {"entropy/evaluation_per_token": 2.0})
    policy.end("sampling ended")
    assert sonde.read_run(tmp_path).ended is None  # the other probe goes on
    windows_of_rows(noise, model, 2)
    noise.close("training ended")
    run = sonde.read_run(tmp_path)
    assert [r.window for r in run.readings] == [2, 4, 6]
    assert [r.metrics["entropy/evaluation_per_token"] for r in run.policy] == [2.0]
    assert (run.header.probe("reading").unit, run.header.probe("policy").unit) == ("sequences", "prompts")
    assert run.header.probe("policy").setup == {"wrapper": "a loop"}
    assert run.header.metrics["gns/trace_cov"].unit == "gradient² · sequences"
    assert run.header.metrics["entropy/evaluation_per_token"].unit == "nats a token"
    assert (run.name, run.ended, len(run.headers)) == ("both", "training ended", 1)
    page = sonde.write_report(tmp_path).read_text()
    assert "Noise scale and batch size" in page
    assert "Entropy of the policy" in page


def test_the_order_in_which_probes_begin_does_not_matter(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    for start in range(2):  # the second start appends
        log = sonde.RunLog(sonde.JsonlSink(tmp_path))
        makers: list[Any] = [
            lambda log=log: sonde.PolicyLog(log),
            lambda log=log: sonde.attach(model, unit="sequences", log=log, verbose=False),
        ]
        made = [make() for make in (makers if start == 0 else makers[::-1])]
        for part in made:
            part.end("done") if isinstance(part, sonde.PolicyLog) else part.close()
    run = sonde.read_run(tmp_path)
    assert [header.probe("reading").unit for header in run.headers] == ["sequences", "sequences"]
    assert [header.probe("policy").unit for header in run.headers] == ["prompts", "prompts"]


def test_a_probe_of_ones_own_gets_its_section(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    log = sonde.RunLog(sonde.JsonlSink(tmp_path), every=1)
    noise, own = sonde.attach(model, unit="rows", log=log, verbose=False), DeadUnits()
    assert isinstance(own, sonde.Probe)
    for step in (1, 2, 3):
        windows_of_rows(noise, model, 1)
        log.measure(own, step)
    noise.close()
    run = sonde.read_run(tmp_path)
    assert [(r.window, r.metrics["layer/dead_units"]) for r in run.own] == [(1, 0.25), (2, 0.25), (3, 0.25)]
    described = run.header.metrics["layer/dead_units"]
    assert (described.unit, described.meaning) == ("fraction", "units whose gradient is exactly 0")
    assert run.series("layer/dead_units") == ([1, 2, 3], [0.25, 0.25, 0.25])
    assert run.ended == "closed"
    page = sonde.write_report(tmp_path).read_text()
    for words in ("Dead &lt;b&gt;units", "How much of the layer has stopped learning.", "layer/dead_units (fraction)"):
        assert words in page, words
    assert "layer/never (fraction)" not in page  # no curve for a metric that was never known


def test_a_log_that_has_ended_takes_no_further_probe(caplog: pytest.LogCaptureFixture) -> None:
    log = sonde.RunLog(Recording())
    sonde.attach(nn.Linear(3, 1), unit="rows", log=log, verbose=False).close()
    with pytest.raises(RuntimeError, match=r"this log has ended, .*: make a new RunLog"):
        sonde.PolicyLog(log)
    log.measure(Fixed({"a": 1.0}), 2)
    assert "the log has ended: the metrics of Fixed are not written" in caplog.text


def test_a_second_probe_that_cannot_be_logged_leaves_the_first_its_log() -> None:
    class RefusesPolicies(Recording):
        must_begin = True

        def write(self, record: Any) -> None:
            if record["kind"] == "probe":
                raise ValueError("no policies here")
            super().write(record)

    sink = RefusesPolicies()
    log, model = sonde.RunLog(sink), nn.Linear(3, 1)
    with sonde.attach(model, unit="rows", log=log, verbose=False) as noise:
        with pytest.raises(ValueError, match="no policies here"):
            sonde.PolicyLog(log)
        windows_of_rows(noise, model, 1)
    assert [r["kind"] for r in sink.records] == ["header", "fresh", "reading", "end"]


def test_log_takes_what_a_run_log_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, calls, sink = nn.Linear(3, 1), list[tuple[dict[str, float], int]](), Recording()
    for log in ("./mine", Path("wandb"), [sink, lambda metrics, step: calls.append((metrics, step))]):
        with sonde.attach(model, unit="rows", log=log, verbose=False) as noise:
            windows_of_rows(noise, model, 3)
    assert [sonde.read_run(name).readings[-1].window for name in ("mine", "wandb")] == [3, 3]
    assert sink.of_kind("reading")
    assert calls[-1][1] == 3
    (beside,) = Path("runs").iterdir()  # the function's, for reports
    assert sonde.read_run(beside).readings[-1].window == 3
    for wrong in (5, True, object()):
        with pytest.raises(ValueError, match="a log needs places for records, got"):
            sonde.attach(model, unit="rows", log=wrong, verbose=False)


def test_trackers_by_name_are_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two logs of one second have a folder each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    model = nn.Linear(3, 1)
    for _ in range(2):
        with sonde.attach(model, unit="rows", log="tensorboard", verbose=False) as noise:
            windows_of_rows(noise, model, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    folders = sorted(Path("runs").iterdir())
    assert [folder.name for folder in folders] == ["now", "now-2"]
    for folder in folders:
        assert sonde.read_run(folder).readings[-1].window == 3
        assert list(folder.glob("events.out.tfevents*"))


def test_options_that_do_not_exist_are_refused() -> None:
    for wrong in ("budgt", "sinks", "log_every"):
        with pytest.raises(TypeError, match=rf"attach\(\) got an unexpected keyword argument '{wrong}'"):
            sonde.attach(nn.Linear(3, 1), unit="rows", **{wrong: 3})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"options must be a sonde\.NoiseScaleOptions, got {'unit': 'rows'}"):
        sonde.NoiseScaleProbe(nn.Linear(3, 1), None, {"unit": "rows"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"options must be a sonde\.EntropyChangeOptions, got {'level': 0.5}"):
        sonde.EntropyChangeProbe(nn.Linear(3, 1), None, {"level": 0.5})  # type: ignore[arg-type]


class Fixed:
    """A probe with given metrics."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self.given = metrics

    def step(self) -> None:
        pass

    def metrics(self) -> Mapping[str, Any]:
        return self.given

    def close(self) -> None:
        pass


def test_a_number_that_json_cannot_hold_is_null_and_costs_no_other_record(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    log = sonde.RunLog(sonde.JsonlSink(tmp_path), every=1)
    noise = sonde.attach(model, unit="rows", log=log, verbose=False)
    own = Fixed({"my/loss": float("nan"), "my/norm": torch.tensor(2.0), "my/range": float("inf")})
    for step in (1, 2):
        windows_of_rows(noise, model, 1)
        log.measure(own, step)
    noise.close()
    run = sonde.read_run(tmp_path)
    assert [r.metrics for r in run.own] == [{"my/loss": None, "my/norm": 2.0, "my/range": None}] * 2
    assert (len(run.readings), run.ended) == (2, "closed")


@pytest.mark.parametrize(
    ("metrics", "window", "message"),
    [
        ({"my loss": 1.0}, 1, "a metric's name may hold letters, digits, '_' and '/', got 'my loss'"),
        ({"gns/b_simple": 1.0}, 1, "another probe of this log writes the metric 'gns/b_simple': rename yours"),
        ({"a": "much"}, 1, "the metric 'a' must be a number or None, got 'much'"),
        ({"a": torch.zeros(2)}, 1, r"the metric 'a' must be a number or None, got tensor\(\[0., 0.\]\): pass a number"),
        ({"a": 10**400}, 1, "the metric 'a' is larger than a 64-bit number can be"),
        ({"a": 1.0}, -1, "window must be the number of an optimizer step, got -1: pass a whole number from 0 up"),
        ({"a": 1.0}, 2.5, "window must be the number of an optimizer step, got 2.5"),
        ({"a": 1.0}, True, "window must be the number of an optimizer step, got True"),
    ],
)
def test_what_would_damage_the_log_is_refused_at_the_door(
    tmp_path: Path, metrics: dict[str, Any], window: Any, message: str
) -> None:
    log = sonde.RunLog(sonde.JsonlSink(tmp_path))
    probe = sonde.attach(nn.Linear(3, 1), unit="rows", log=log, verbose=False)
    with pytest.raises(ValueError, match=message):
        log.measure(Fixed(metrics), window)
    probe.close()
    assert sonde.read_run(tmp_path).own == ()


@pytest.mark.parametrize(("name", "value"), [("ranks", "two"), ("level", [0.95]), ("groups", 5), ("log_every", True)])
def test_a_set_up_that_a_report_could_not_show_is_refused_at_the_door(name: str, value: object) -> None:
    log = sonde.RunLog()
    with pytest.raises(ValueError, match=rf"'{name}' in a set-up must be of the kind .*: give it another name"):
        sonde.PolicyLog(log, setup={name: value})
    sonde.PolicyLog(log, setup={name: None, "wrapper": value}).end("shown as it is")


def test_two_probes_of_one_kind_need_two_logs() -> None:
    log = sonde.RunLog()
    with sonde.attach(nn.Linear(3, 1), unit="rows", log=log, verbose=False):
        with pytest.raises(RuntimeError, match="another probe writes 'reading' records to this log"):
            sonde.attach(nn.Linear(3, 1), unit="rows", log=log, verbose=False)
        with pytest.raises(RuntimeError, match="one of sonde's probes still writes to this log"):
            log.end("done", window=1)


@pytest.mark.parametrize("first", [0, 2])
def test_a_run_in_another_unit_is_a_run_of_its_own(first: int, tmp_path: Path) -> None:
    """Also where the run before has ended before its first reading."""
    model = nn.Linear(3, 1)
    for unit, n in (("sequences", first), ("images", 3)):
        with sonde.attach(model, unit=unit, every=1, log=sonde.RunLog(tmp_path, every=1), verbose=False) as probe:
            windows_of_rows(probe, model, n)
    run = sonde.read_run(tmp_path)
    assert [reading.window for reading in run.readings] == [1, 2, 3]
    assert (run.probe("reading").unit, run.readings[-1].metrics["run/units_seen"]) == ("images", 3 * 8)


def test_a_restart_without_one_of_the_probes_keeps_its_setup(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    log = sonde.RunLog(sonde.JsonlSink(tmp_path), every=1)
    noise = sonde.attach(model, unit="sequences", log=log, verbose=False)
    windows_of_rows(noise, model, 2)
    log.measure(DeadUnits(), 2)
    noise.close()
    policy = sonde.PolicyLog(sonde.RunLog(sonde.JsonlSink(tmp_path)))
    policy.measured(3, {"entropy/evaluation_per_token": 2.0})
    policy.end("done")
    run = sonde.read_run(tmp_path)
    assert (run.probe("reading").unit, run.probe("policy").unit) == ("sequences", "prompts")
    assert {"gns/b_simple", "entropy/evaluation_per_token", "layer/dead_units"} <= run.metrics.keys()
    assert [section.title for section in run.sections] == [DeadUnits.SECTION.title]
    page = sonde.write_report(tmp_path).read_text()
    assert "batch of 8 sequences" in page
    assert "Reward and other logged values" not in page


def _end_without_a_process_group() -> list[str]:
    sink, model = Recording(), nn.Linear(3, 1)
    log = sonde.RunLog(sink, every=1)
    probe = sonde.attach(model, unit="rows", log=log, verbose=False)
    windows_of_rows(probe, model, 1)
    group, dist.group.WORLD = dist.group.WORLD, None  # as destroy_process_group leaves it
    try:
        probe.close()
    finally:
        dist.group.WORLD = group
    return [record["kind"] for record in sink.records]


def test_only_the_first_rank_writes_even_once_its_process_group_is_gone(ranks2: Ranks) -> None:
    assert ranks2(_end_without_a_process_group) == [["header", "fresh", "reading", "end"], []]
