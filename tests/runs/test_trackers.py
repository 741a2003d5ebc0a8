"""Sonde's numbers in experiment trackers: the real ones, offline, read back from what they stored."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import sonde
from sonde.log.trackers import FunctionSink, MlflowSink, TrackioSink, WandbSink, known_metrics, sinks_for
from tests.batch_size.loops import Recording, small_model, train
from tests.new_process import in_new_process

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
    {"kind": "header", "time": 1000.0, "run": "r"},
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
    record = reading(5, 7.0, **{"layers.0": 1.0, "layers_0": 2.0, "größe": None, "": 4.0})
    assert known_metrics(record) == {
        "gns/b_simple": 7.0,
        "grad/norm": 5.0,
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


def test_no_run_is_begun_before_there_are_numbers(mlflow: Any) -> None:
    """The user may begin one after attach, and MLflow refuses a second active run."""
    sink = MlflowSink()
    for record in RECORDS[:2]:
        sink.write(record)
    assert mlflow.active_run() is None
    with mlflow.start_run() as run:
        for record in RECORDS[2:]:
            sink.write(record)
        sink.close()
        assert mlflow.active_run() is not None
    assert mlflow.get_run(run.info.run_id).data.tags["sonde/alert/same_data"] == "ranks share data"


def rows_of_wandb(file: Path) -> list[dict[str, Any]]:
    """The rows of history in an offline run's file: LevelDB's log format, blocks of chunks, behind 7 bytes of W&B's."""
    from wandb.proto import wandb_internal_pb2

    content, at, whole, rows = file.read_bytes(), 7, b"", []
    while at < len(content):
        left = 2**15 - at % 2**15
        if left < 7:  # the rest of a block has no room for a chunk
            at += left
            continue
        _, n, kind = struct.unpack("<IHB", content[at : at + 7])
        whole, at = whole + content[at + 7 : at + 7 + n], at + 7 + n
        if kind not in (1, 4):  # a whole record, or the last chunk of one
            continue
        record, whole = wandb_internal_pb2.Record.FromString(whole), b""
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


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
    rows = rows_of_wandb(file)
    found = [(row["sonde/window"], row["gns/b_simple"]) for row in rows if "gns/b_simple" in row]
    assert found == [(20, 38.0), (15, 36.0)]
    assert [row["_step"] for row in rows if "loss" in row] == [110, 120, 121]  # the user's steps stay
    assert all("gns/b_simple_high" not in row for row in rows)


def _logged_to_trackio(folder: Path) -> list[tuple[int, dict[str, float]]]:
    os.environ["TRACKIO_DIR"] = str(folder)  # read when trackio is first imported, as by transformers
    import trackio

    run = trackio.init(project="p", name="r", embed=False, auto_log_cpu=False, auto_log_gpu=False)
    sink, _ = sinks_for(run, Path())
    assert isinstance(sink, TrackioSink)
    write(sink)
    write(sinks_for("trackio", Path())[0])  # by its name too: the run is the active one
    run.finish()
    with contextlib.closing(sqlite3.connect(folder / "p.db")) as stored:
        return [(step, json.loads(metrics)) for step, metrics in stored.execute("SELECT step, metrics FROM metrics")]


@pytest.mark.slow
def test_trackio(tmp_path: Path) -> None:
    rows = in_new_process(_logged_to_trackio, tmp_path)
    assert rows == 2 * [(int(str(record["window"])), known_metrics(record)) for record in READINGS]
    assert [file.name for file in tmp_path.glob("*.db")] == ["p.db"]  # nothing went to a project of sonde's


@pytest.mark.parametrize("wrong", [7, object(), "wanbd", {"wandb": 1}, [None], Recording])
def test_what_takes_no_records_is_refused_and_what_does_is_named(wrong: object) -> None:
    with pytest.raises(
        ValueError, match=r"use a folder such as 'runs/my-run', one of 'wandb', 'mlflow', 'trackio', 'te"
    ):
        sonde.RunLog(wrong)


@pytest.mark.parametrize(
    ("wrong", "meant"), [("WandB", "'wandb'"), ("wandbb", "'wandb'"), ("wandb,mlflow", r"\['wandb', 'mlflow'\]")]
)
def test_the_misspelt_name_of_a_tracker_is_no_folder(wrong: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"got '{wrong}': did you mean log={meant}\? A folder of that name is 'runs/"):
        sonde.attach(small_model(), unit="rows", log=wrong)
    with pytest.raises(ValueError, match="log must be a folder, got ''"):
        sonde.attach(small_model(), unit="rows", log="")


@pytest.mark.parametrize("folder", ["tensorboard_logs", "wandb-1", "mlflow_2", "my wandb run", "trackers"])
def test_a_folder_may_be_named_after_a_tracker(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sonde.attach(small_model(), unit="rows", log=folder, verbose=False).close()
    assert (tmp_path / folder / "records.jsonl").exists()


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
