"""The user's own rows in a tracker are those without sonde: their steps, their values, and how many there are."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import sonde
from tests.new_process import in_new_process
from tests.runs.wandb_files import rows_of_wandb

N_WINDOWS = 12
Rows = list[tuple[int, dict[str, float]]]


@dataclass(frozen=True)
class Case:
    """A training whose user logs rows of his own; there is a reading at each window but the first."""

    every: int = 1
    """Steps between two rows."""
    has_steps: bool = False
    """Whether rows are given a step."""
    begun_at: int = 0
    """The step before which the user's run begins."""
    attached_at: int = 0
    """The step before which the probe is attached."""
    ends_first: bool = False
    """Whether the user's run ends before the probe is closed."""
    n_after: int = 0
    """Rows after the probe is closed."""
    commits: bool = True
    """Whether a row is logged in one call, rather than in two (W&B)."""


CASES = {
    "no step": Case(),
    "own steps": Case(has_steps=True),
    "every fifth step": Case(every=5),
    "every fifth with its step": Case(every=5, has_steps=True),
    "attached late": Case(attached_at=7),
    "the run ends first": Case(ends_first=True),
    "the run begins after attach": Case(begun_at=1),
    "the run begins after the first readings": Case(begun_at=8),
    "rows after close": Case(n_after=2),
    "the first row after close": Case(every=100, begun_at=1, n_after=2),
    "rows in two calls": Case(commits=False),
}


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.run = SummaryWriter(str(self.folder))

    def log(self, row: dict[str, float], step: int | None, commit: bool) -> None:
        for name, value in row.items():
            self.run.add_scalar(name, value, step)

    def finish(self) -> None:
        self.run.close()

    def rows(self) -> Rows:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(self.folder), size_guidance={"scalars": 0})
        events.Reload()
        return [(scalar.step, {"loss": scalar.value}) for scalar in events.Scalars("loss")]


class Mlflow:
    def __init__(self, folder: Path) -> None:
        import mlflow

        self.module = mlflow
        mlflow.set_tracking_uri(f"file://{folder}")

    def begin(self) -> None:
        self.run = self.module.start_run()

    def log(self, row: dict[str, float], step: int | None, commit: bool) -> None:
        self.module.log_metrics(row, step)

    def finish(self) -> None:
        self.module.end_run()

    def rows(self) -> Rows:
        history = self.module.MlflowClient().get_metric_history(self.run.info.run_id, "loss")
        return [(point.step, {"loss": point.value}) for point in history]


class Trackio:
    def __init__(self, folder: Path) -> None:
        import trackio

        self.module, self.project = trackio, folder.name.replace(" ", "_") + folder.parent.name
        self.file = Path(os.environ["TRACKIO_DIR"]) / f"{self.project}.db"

    def begin(self, **options: Any) -> None:
        options |= {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        self.run = self.module.init(self.project, name="mine", **options)

    def log(self, row: dict[str, float], step: int | None, commit: bool) -> None:
        self.module.log(row, step)

    def finish(self) -> None:
        self.module.finish()

    def rows(self) -> Rows:
        with contextlib.closing(sqlite3.connect(self.file)) as stored:
            rows = stored.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
        return [(step, row) for step, text in rows if "loss" in (row := json.loads(text))]


class Wandb:
    def __init__(self, folder: Path) -> None:
        import wandb

        self.module, self.folder = wandb, folder

    def begin(self) -> None:
        self.folder.mkdir(parents=True)
        self.run = self.module.init(project="mine", dir=self.folder)

    def log(self, row: dict[str, float], step: int | None, commit: bool) -> None:
        if not commit:
            self.module.log({"first": 1.0}, step=step, commit=False)
        self.module.log(row, step=step)

    def finish(self) -> None:
        self.run.finish()

    def rows(self) -> Rows:
        self.module.teardown()  # writes the file
        (file,) = self.folder.glob("wandb/offline-run-*/*.wandb")
        rows = [row for row in rows_of_wandb(file) if any(name in row for name in ("loss", "first"))]
        return [(row["_step"], {name: row[name] for name in row if name in ("loss", "first")}) for row in rows]


class LightningsWandb(Wandb):
    """Lightning's logger of W&B, and rows that the user logs through it."""

    def begin(self) -> None:
        from lightning.pytorch.loggers import WandbLogger

        self.folder.mkdir(parents=True)
        self.run = WandbLogger(project="mine", save_dir=self.folder, offline=True)
        _ = self.run.experiment

    def log(self, row: dict[str, float], step: int | None, commit: bool) -> None:
        if not commit:
            self.run.experiment.log({"first": 1.0}, commit=False)
        self.run.log_metrics(row, step)

    def finish(self) -> None:
        self.run.experiment.finish()


TRACKERS: dict[str, Any] = {
    "tensorboard": TensorBoard,
    "mlflow": Mlflow,
    "trackio": Trackio,
    "wandb": Wandb,
    "wandb by Lightning's logger": LightningsWandb,
}


def train(tracker: Any, case: Case, name: str, folder: Path | None) -> None:
    """A training; with sonde if there is a folder for its log. Only a run that has ended may refuse its numbers."""
    torch.manual_seed(0)
    model = torch.nn.Linear(10, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    probe = None
    for i in range(N_WINDOWS):
        if i == case.begun_at:
            tracker.begin()
        if folder is not None and i == case.attached_at:
            place = name.partition(" ")[0] if case.begun_at else tracker.run
            log = sonde.RunLog([place, folder], every=1)
            options: dict[str, Any] = {"units_per_piece": "first dim", "every": 1, "verbose": False}
            probe = sonde.attach(model, optimizer, unit="rows", log=log, **options)
        for _ in range(4):
            model(torch.randn(4, 10)).square().mean().div(4).backward()
        optimizer.step()
        optimizer.zero_grad()
        if probe is not None:
            probe.log(loss=-1.0)  # by the name of the user's own metric
        if i >= case.begun_at and i % case.every == 0:
            tracker.log({"loss": float(i)}, 3 * i if case.has_steps else None, case.commits)
    if case.ends_first:
        tracker.finish()
    if probe is not None:
        probe.close()
    for i in range(case.n_after):
        tracker.log({"loss": 100.0 + i}, None, case.commits)
    if not case.ends_first:
        tracker.finish()
        assert probe is None or not log.alerts, log.alerts


def rows_by_case(name: str, cases: dict[str, Case], folder: Path) -> tuple[dict[str, Rows], dict[str, Rows]]:
    """The user's rows by case, without sonde and with it."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    os.chdir(folder)
    logging.disable(logging.ERROR)  # a run that has ended takes no more, which is logged
    trackers: dict[str, list[Any]] = {case: [TRACKERS[name](folder / part / case) for part in "ab"] for case in cases}
    for case, options in cases.items():
        for tracker, log in zip(trackers[case], (None, folder / "logs" / case), strict=True):
            train(tracker, options, name, log)
        assert sonde.read_run(folder / "logs" / case).readings[-1].window == N_WINDOWS - options.attached_at
    without, found = ({case: each[i].rows() for case, each in trackers.items()} for i in (0, 1))
    return without, found


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACKERS)
def test_the_users_rows_are_those_without_sonde(name: str, tmp_path: Path) -> None:
    cases = CASES if " " not in name else {case: CASES[case] for case in ("no step", "every fifth with its step")}
    without, found = in_new_process(rows_by_case, name, cases, tmp_path)
    n_rows = dict(zip(CASES, [12, 12, 3, 3, 12, 12, 11, 4, 14, 2, 12], strict=True))
    assert {case: len(rows) for case, rows in without.items()} == {case: n_rows[case] for case in cases}
    assert found == without


def _resumed(folder: Path) -> Rows:
    os.environ["TRACKIO_DIR"] = str(folder)
    tracker = Trackio(folder / "p")
    train(tracker, Case(every=5), "trackio", folder / "log")
    tracker.begin(resume="must")
    tracker.log({"loss": 7.0}, None, True)
    tracker.finish()
    return tracker.rows()


@pytest.mark.slow
def test_a_run_of_trackio_that_is_resumed_goes_on_after_the_users_own_rows(tmp_path: Path) -> None:
    """Though windows are more than the user's rows."""
    assert [step for step, _ in in_new_process(_resumed, tmp_path)] == [0, 1, 2, 3]
