"""Sonde's numbers in experiment trackers: the real ones, offline, read back from what they stored."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import sonde
from sonde.log.trackers import FunctionSink, MlflowSink, TrackioSink, WandbSink, known_metrics, sinks_for
from tests.batch_size.loops import Recording, small_model, train
from tests.new_process import in_new_process
from tests.runs.wandb_files import records_of_wandb, rows_of_wandb

# These packages and what they import cause various warnings.
pytestmark = pytest.mark.filterwarnings("ignore")


def reading(window: int, b_simple: float | None, **groups: float | None) -> dict[str, object]:
    metrics = {"gns/b_simple": b_simple, "gns/b_simple_high": None, "grad/norm": float(window)}
    by_group = {name: {"b_simple": value} for name, value in groups.items()}
    return {"kind": "reading", "time": 1000.0 + window, "window": window, "metrics": metrics, "groups": by_group}


READINGS = [reading(10, None), reading(20, 38.0, **{"layers.0": 30.0}), reading(15, 36.0)]
"""A number that is not known, and a record that comes late."""
ALERT = {"kind": "alert", "time": 1021.0, "window": 20, "name": "same_data", "message": "ranks share data"}
RECORDS = [
    {"kind": "header", "time": 1000.0, "run": "r", "metrics": {"gns/b_simple": {}, "grad/norm": {}}},
    ALERT,
    *READINGS,
    ALERT | {"name": "late", "message": "after the readings"},
    {"kind": "end", "time": 1.0, "window": 20},
]


def write(sink: sonde.Sink) -> None:
    for record in RECORDS:
        sink.write(record)
    sink.close()


def test_known_metrics_have_names_that_all_trackers_take() -> None:
    """A name that the user may have given to a metric of his own has a prefix."""
    record = reading(5, 7.0, **{"layers.0": 1.0, "layers_0": 2.0, "größe": None, "": 4.0})
    assert known_metrics(record, {"gns/b_simple"}) == {
        "gns/b_simple": 7.0,
        "sonde/grad/norm": 5.0,
        "gns_by_group/layers_0": 1.0,
        "gns_by_group/layers_0_2": 2.0,
        "gns_by_group/_": 4.0,
    }
    assert known_metrics(ALERT) == {}


def test_a_function_gets_metrics_and_the_users_own_step() -> None:
    calls: list[tuple[Mapping[str, float], int]] = []
    write(FunctionSink(lambda metrics, step: calls.append((metrics, step)), step=lambda window: 100 + 2 * window))
    assert calls == [
        ({"grad/norm": 10.0}, 120),
        ({"gns/b_simple": 38.0, "grad/norm": 20.0, "gns_by_group/layers_0": 30.0}, 140),
        ({"gns/b_simple": 36.0, "grad/norm": 15.0}, 130),
    ]


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    yield mlflow
    mlflow.set_tracking_uri(before)


def test_mlflow(mlflow: Any) -> None:
    runs = []
    for is_module in (True, False):
        with mlflow.start_run() as run:
            sink, _ = sinks_for(mlflow if is_module else run, Path())
            assert isinstance(sink, MlflowSink)
            write(sink)
            assert mlflow.active_run() is not None  # it is the user's to end
            runs.append(run)
    (own,) = sinks_for("mlflow", Path("runs/mine"))[:1]
    write(own)
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient()
    newest = client.search_runs(["0"], order_by=["attributes.start_time DESC"])[0]
    assert newest.info.run_name == "mine"  # as the log beside it
    for run_id in {run.info.run_id for run in (*runs, newest)}:
        history = client.get_metric_history(run_id, "gns/b_simple")
        assert [(m.step, m.value) for m in history] == [(20, 38.0), (15, 36.0)]
        assert client.get_run(run_id).data.metrics["gns_by_group/layers_0"] == 30.0
        assert client.get_run(run_id).data.tags["sonde/alert/same_data"] == "ranks share data"
        assert client.get_run(run_id).data.tags["sonde/alert/late"] == "after the readings"


@pytest.mark.slow
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="test", dir=tmp_path)
    sink, _ = sinks_for(run, Path())
    assert isinstance(sink, WandbSink)
    for record in RECORDS:
        sink.write(record)
        if record["kind"] == "reading":  # the user's own row, whose step is ahead of sonde's
            run.log({"loss": 1.0}, step=100 + int(str(record["window"])) if record["window"] != 15 else 121)
    sink.close()
    summary = run.summary["sonde/alert/same_data"]
    run.finish()
    wandb.teardown()  # writes the file
    assert summary == "ranks share data"
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    alerts = [record.alert for record in records_of_wandb(file) if record.WhichOneof("record_type") == "alert"]
    assert [(alert.title, alert.text, alert.level) for alert in alerts] == [
        ("sonde: same data", "ranks share data", "WARN"),
        ("sonde: late", "after the readings", "WARN"),
    ]
    rows = rows_of_wandb(file)
    found = [(row["sonde/window"], row["gns/b_simple"]) for row in rows if "gns/b_simple" in row]
    assert found == [(20, 38.0), (15, 36.0)]
    assert [row["_step"] for row in rows if "loss" in row] == [110, 120, 121]  # the user's steps stay
    assert all("gns/b_simple_high" not in row for row in rows)


def _logged_to_trackio(folder: Path) -> list[list[tuple[Any, ...]]]:
    os.environ["TRACKIO_DIR"] = str(folder)  # read when trackio is first imported, as by transformers
    import trackio

    found = []
    for project in ("p", "sonde"):  # a run of the user's, and one that is begun by its name
        run = trackio.init(project="p", name="r", embed=False, auto_log_cpu=False, auto_log_gpu=False)
        sinks = sinks_for(run if project == "p" else "trackio", Path())
        assert isinstance(sinks[0], TrackioSink)
        if project == "p":
            run.log({"loss": 1.0}, step=15)
        else:
            trackio.finish()
        write(sinks[0])
        if project == "p":
            trackio.finish()
        assert trackio.context_vars.current_run.get() is None
        with contextlib.closing(sqlite3.connect(folder / f"{project}.db")) as stored:
            rows = stored.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
            found.append([(step, json.loads(metrics)) for step, metrics in rows])
            found.append(stored.execute("SELECT title, text, level FROM alerts ORDER BY id").fetchall())
    return found


@pytest.mark.slow
def test_trackio(tmp_path: Path) -> None:
    rows, alerts, own_rows, own_alerts = in_new_process(_logged_to_trackio, tmp_path)
    names = {"gns/b_simple", "grad/norm"}
    windows = [int(str(record["window"])) for record in READINGS]
    metrics = [known_metrics(record, names) | {"sonde/window": record["window"]} for record in READINGS]
    assert rows == [(15, {"loss": 1.0}), *zip([10, 15, 15], metrics, strict=True)]
    assert own_rows == list(zip(windows, metrics, strict=True))
    texts = [("sonde: same data", "ranks share data", "warn"), ("sonde: late", "after the readings", "warn")]
    assert (alerts, own_alerts) == (texts, texts)


def test_a_function_of_a_tracker_or_a_method_of_its_run_is_that_tracker(mlflow: Any) -> None:
    """As a function, `run.log` would be called with a step, which moves the steps of the user's rows."""
    import trackio
    import wandb

    run = wandb.init(mode="disabled")
    for place in (run, run.log, wandb, wandb.log):
        assert isinstance(sinks_for(place, Path())[0], WandbSink)
    run.finish()
    for place in (trackio, trackio.log):
        assert isinstance(sinks_for(place, Path())[0], TrackioSink)
    assert isinstance(sinks_for(mlflow.log_metrics, Path())[0], MlflowSink)


def test_alerts_begin_no_run_and_reach_the_users_at_the_end(mlflow: Any) -> None:
    """A run that cannot be measured has alerts alone. The user may begin it after attach: MLflow has one at a time."""
    sink = MlflowSink()
    for record in RECORDS[:2]:
        sink.write(record)
    assert mlflow.active_run() is None
    assert not mlflow.search_runs(output_format="list")
    with mlflow.start_run() as run:
        sink.write(RECORDS[-1])
        sink.close()
        assert mlflow.active_run() is not None
    assert mlflow.get_run(run.info.run_id).data.tags["sonde/alert/same_data"] == "ranks share data"
    assert not mlflow.get_run(run.info.run_id).data.metrics


@pytest.mark.parametrize("wrong", [7, object(), {"wandb": 1}, [None], Recording])
def test_what_takes_no_records_is_refused_and_what_does_is_named(wrong: object) -> None:
    with pytest.raises(
        ValueError, match=r"use a folder such as 'runs/my-run', one of 'wandb', 'mlflow', 'trackio', 'te"
    ):
        sonde.RunLog(wrong)


@pytest.mark.parametrize("word", ["neptune", "comet", "swanlab", "WandB", "wandb,mlflow", "runs1", "my run", ""])
def test_a_bare_word_is_no_folder(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the name of a tracker, perhaps of one that sonde does not write to, or with a mistake."""
    monkeypatch.chdir(tmp_path)
    meant = rf"for a folder, write 'runs/{word or 'my-run'}'; the trackers are 'wandb', .* in a list; for any other "
    for log in (word, [word]):
        with pytest.raises(ValueError, match=rf"got '{word}': .*{meant}.* a function.*: log=lambda metrics, step: run"):
            sonde.attach(small_model(), unit="rows", log=log)
    assert not list(tmp_path.iterdir())
    for folder in (f"./{word}x", Path(f"{word}y")):
        sonde.attach(small_model(), unit="rows", log=folder, verbose=False).close()
        assert (Path(folder) / "records.jsonl").exists()


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_the_name_of_a_tracker_without_its_package_names_the_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"Sink needs {name}: pip install 'gradsonde\[{name}\]'"):
        sonde.attach(small_model(), unit="rows", log=name)
    assert not list(tmp_path.iterdir())


def test_a_log_for_reports_is_beside_whatever_is_no_sink(tmp_path: Path) -> None:
    """Whoever gives sinks alone has chosen all of them."""
    for place in (lambda metrics, step: None, "tensorboard"):
        assert [type(sink) for sink in sinks_for(place, tmp_path)][1:] == [sonde.JsonlSink]
    assert len(sinks_for(Recording(), tmp_path)) == 1
    assert len(sinks_for([lambda metrics, step: None, tmp_path], tmp_path)) == 2


def test_what_a_sink_writes_into_a_record_reaches_no_other_sink(tmp_path: Path) -> None:
    class Writes(Recording):
        def write(self, record: Any) -> None:
            record["metrics"] = {"evil": 1.0}

    log = sonde.RunLog([Writes(), sonde.JsonlSink(tmp_path)], every=1)
    model = small_model()
    with sonde.attach(model, unit="rows", log=log, every=1, verbose=False) as probe:
        train(model, probe, torch.optim.SGD(model.parameters(), lr=0.001), windows=2)
    assert "gns/b_simple" in sonde.read_run(tmp_path).readings[-1].metrics


def test_a_tracker_that_fails_is_reported_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)

    def log(metrics: Mapping[str, float], step: int) -> None:
        raise OSError("no route to the tracker")

    model = small_model()
    probe = sonde.attach(model, unit="rows", log=sonde.RunLog(log, every=1), every=1, verbose=False)
    train(model, probe, torch.optim.SGD(model.parameters(), lr=0.001), windows=5)
    assert "no route to the tracker" in probe.alerts["log_stopped_FunctionSink"]
    assert probe.reading().windows == 5
    probe.close()
    assert sum("no route" in record.message for record in caplog.records if record.levelname == "ERROR") == 1
