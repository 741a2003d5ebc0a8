"""Sinks for experiment trackers: W&B, MLflow, trackio, or any function that takes metrics and a step.

A tracker shows sonde's numbers beside those that a team already looks at. The log that a report is made from is
`JsonlSink`'s. Records come a few windows late, and carry the number of their own window, so a tracker must take a step
that is lower than the last one it was given. W&B does not: there, the window is a metric, and the x axis of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from sonde.runs.known_metrics import known_metrics
from sonde.runs.sinks import JsonlSink
from sonde.runs.tensorboard import TensorBoardSink
from sonde.sink import Sink

Log = Callable[[dict[str, float], int], object]
"""Takes metrics by name, and the step they belong to."""
Step = Callable[[int], int]
"""The user's own number of a step, from the number of a window."""

WINDOW = "sonde/window"
"""The metric that is W&B's x axis for the others."""
_FAMILIES = ("gns", "gns_by_group", "grad", "cost", "run", "entropy")
"""First parts of sonde's metric names."""
_LONGEST_TAG = 5000
"""Characters that MLflow takes."""


class FunctionSink:
    """Calls a function with the known metrics of each reading: `FunctionSink(mlflow.log_metrics)`.

    Args:
        log: called as `log(metrics, step)`, a dictionary of floats by name and the step they belong to.
        step: gives your own number of a step from the number of a window, from 1; by default they are the same.
    """

    def __init__(self, log: Log, *, step: Step | None = None) -> None:
        if not callable(log):
            raise ValueError(f"log must be a function of metrics and a step, got {log!r:.60}")
        self._log, self._step = log, step

    def write(self, record: Mapping[str, object]) -> None:
        """Hand over the numbers of one record, if it has any."""
        if metrics := known_metrics(record):
            window = cast(int, record["window"])
            self._log(metrics, window if self._step is None else self._step(window))

    def close(self) -> None:
        """Nothing is to be closed."""


class MlflowSink:
    """Writes metrics to an MLflow run, alerts as its tags.

    Args:
        run_id: of the run; by default the active one, or a new one that is begun with the first record.
        step: as for `FunctionSink`.

    Raises:
        ImportError: without the `mlflow` package.
    """

    def __init__(self, run_id: str | None = None, *, step: Step | None = None) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise ImportError("MlflowSink needs mlflow: pip install mlflow-skinny, or mlflow") from error
        self._mlflow: Any = mlflow
        self._run_id, self._step, self._is_own = run_id, step, False

    def write(self, record: Mapping[str, object]) -> None:
        """Take one record; kinds that MLflow has no place for are left out."""
        metrics = known_metrics(record)
        if record["kind"] != "alert" and not metrics:  # the user may not have begun a run yet
            return
        client, run_id = self._mlflow.MlflowClient(), self._begin()
        if record["kind"] == "alert":
            client.set_tag(run_id, f"sonde/alert/{record['name']}", str(record["message"])[:_LONGEST_TAG])
            return
        window, time = cast(int, record["window"]), int(1000 * cast(float, record["time"]))
        step = window if self._step is None else self._step(window)
        client.log_batch(run_id, [self._mlflow.entities.Metric(name, v, time, step) for name, v in metrics.items()])

    def close(self) -> None:
        """End the run, if this sink began it."""
        if self._is_own:
            self._mlflow.end_run()

    def _begin(self) -> str:
        if self._run_id is None:
            active = self._mlflow.active_run()
            self._is_own = active is None
            self._run_id = (active or self._mlflow.start_run()).info.run_id
        return cast(str, self._run_id)


class TrackioSink:
    """Writes metrics to a trackio run.

    Args:
        run: what `trackio.init` returned; it is not finished here. By default a new run of the project "sonde", begun
            with the first metrics and finished at the end.
        step: as for `FunctionSink`.

    Raises:
        ImportError: without the `trackio` package.
    """

    def __init__(self, run: Any = None, *, step: Step | None = None) -> None:
        try:
            import trackio
        except ImportError as error:
            raise ImportError("TrackioSink needs trackio: pip install trackio") from error
        self._trackio: Any = trackio
        self._run, self._step, self._is_own = run, step, False

    def write(self, record: Mapping[str, object]) -> None:
        """Hand over the numbers of one record, if it has any."""
        if not (metrics := known_metrics(record)):
            return
        if self._run is None:
            self._run, self._is_own = self._trackio.init(project="sonde"), True
        window = cast(int, record["window"])
        self._run.log(metrics, window if self._step is None else self._step(window))

    def close(self) -> None:
        """Finish the run, if this sink began it."""
        if self._is_own:
            self._run.finish()


class WandbSink:
    """Writes metrics to a W&B run, against the number of the window as their x axis; alerts to its summary.

    In a run of your own, numbers join the next row that you log, so that your steps stay as they are.

    Args:
        run: what `wandb.init` returned; it is not finished here. By default the active run, or a new one that is begun
            with the first record and finished at the end.
        step: as for `FunctionSink`.

    Raises:
        ImportError: without the `wandb` package.
    """

    def __init__(self, run: Any = None, *, step: Step | None = None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError("WandbSink needs wandb: pip install wandb") from error
        self._wandb: Any = wandb
        self._run, self._step, self._is_own, self._has_begun = run, step, False, False

    def write(self, record: Mapping[str, object]) -> None:
        """Take one record; kinds that W&B has no place for are left out."""
        metrics = known_metrics(record)
        if record["kind"] != "alert" and not metrics:  # the user may not have begun a run yet
            return
        run = self._begin()
        if record["kind"] == "alert":
            run.summary[f"sonde/alert/{record['name']}"] = record["message"]
            return
        window = cast(int, record["window"])
        step = window if self._step is None else self._step(window)
        run.log({**metrics, WINDOW: step}, commit=self._is_own)

    def close(self) -> None:
        """Finish the run, if this sink began it."""
        if self._is_own:
            self._run.finish()

    def _begin(self) -> Any:
        if self._run is None:
            self._run = self._wandb.run
        if self._run is None:
            self._run, self._is_own = self._wandb.init(), True
        if not self._has_begun:
            self._has_begun = True
            self._run.define_metric(WINDOW, hidden=True)
            for family in _FAMILIES:
                self._run.define_metric(f"{family}/*", step_metric=WINDOW)
        return self._run


_BY_NAME: dict[str, Callable[[], Sink]] = {"wandb": WandbSink, "mlflow": MlflowSink, "trackio": TrackioSink}
_OF_PACKAGE: dict[str, Callable[[Any], Sink]] = {"wandb": WandbSink, "trackio": TrackioSink}


def sinks_for(given: object, folder: Path) -> tuple[Sink, ...]:
    """What a user gives as a place for records, as sinks.

    Args:
        given: see `RunLog`.
        folder: for the log beside a tracker that is given by its name.

    Raises:
        ValueError: for an object that takes no records, naming what does.
        ImportError: for the name of a tracker that is not installed.
    """
    # Not every iterable is a list of places: MLflow's runs, mappings and texts are iterable too.
    places = list(given) if isinstance(given, list | tuple | set | frozenset | Iterator) else [given]
    sinks = [_sink_for(place, folder) for place in places]
    if any(isinstance(place, str) and place in _NAMES for place in places):
        has_log = any(isinstance(sink, JsonlSink) for sink in sinks)
        sinks += [] if has_log else [JsonlSink(folder)]  # a report is made from it
    return tuple(sinks)


_NAMES = (*_BY_NAME, "tensorboard")


def _sink_for(place: Any, folder: Path) -> Sink:
    package = getattr(place, "__name__", "") if isinstance(place, ModuleType) else type(place).__module__
    package = package.partition(".")[0]
    if _is_sink(place):
        return cast(Sink, place)
    if isinstance(place, str) and place in _BY_NAME:
        return _BY_NAME[place]()
    if isinstance(place, str) and place == "tensorboard":
        return TensorBoardSink(folder)
    if isinstance(place, Path) or (isinstance(place, str) and "/" in place):
        return JsonlSink(place)
    if callable(getattr(place, "add_scalar", None)):
        return TensorBoardSink(place)
    if isinstance(place, ModuleType) and package in ("mlflow", "wandb"):  # their active run
        return _BY_NAME[package]()
    if package in _OF_PACKAGE and callable(getattr(place, "log", None)):
        return _OF_PACKAGE[package](place)
    if package == "mlflow" and hasattr(place, "info"):
        return MlflowSink(place.info.run_id)
    log = getattr(place, "log_metrics", place)  # Lightning's loggers have this method
    if callable(log) and not isinstance(place, type):
        return FunctionSink(log)
    names = ", ".join(map(repr, _NAMES))
    raise ValueError(
        f"sinks must be places for records, got {place!r:.60}: use a folder such as 'runs/my-run', one of {names}, a "
        "run or writer of these, a function of metrics and a step, or an object with the methods of sonde.Sink"
    )


def _is_sink(place: object) -> bool:
    return not isinstance(place, type) and all(callable(getattr(place, name, None)) for name in ("write", "close"))
