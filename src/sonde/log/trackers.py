"""Sinks for experiment trackers: TensorBoard, W&B, MLflow, trackio, or any function of metrics and a step.

A tracker shows sonde's numbers beside those that a team already looks at. The log that a report is made from is
`JsonlSink`'s. Records come a few windows late, and carry the number of their own window, so a tracker must take a step
that is lower than the last one it was given. W&B does not: there, the window is a metric, and the x axis of the others.
"""

from __future__ import annotations

import html
import importlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from sonde.log.sinks import JsonlSink
from sonde.sink import TRACKERS, Sink
from sonde.version import install_hint

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def _imported(module: str, package: str, sink: object) -> Any:
    """The module of a tracker.

    Raises:
        ImportError: without its package.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{type(sink).__name__} needs {package}: {install_hint(package)}") from error


_READINGS = ("reading", "policy", "metrics")


def known_metrics(record: Mapping[str, object]) -> dict[str, float]:
    """The numbers of a record that are known, also each group's B_simple as `gns_by_group/NAME`.

    Names hold letters, digits, `_` and `/` only, which all trackers take.

    Args:
        record: any record; one without numbers gives none.
    """
    if record["kind"] not in _READINGS:
        return {}
    metrics = cast(Mapping[str, float | None], record["metrics"])
    groups = cast(Mapping[str, Mapping[str, float | None]], record.get("groups", {}))
    names = dict(zip(groups, _group_names(groups), strict=True))
    by_group = {f"gns_by_group/{names[name]}": group["b_simple"] for name, group in groups.items()}
    return {name: value for name, value in {**metrics, **by_group}.items() if value is not None}


def _group_names(groups: Mapping[str, object]) -> Iterator[str]:
    """Names of groups that all trackers take, each different: "layers.0" becomes "layers_0"."""
    taken: set[str] = set()
    for group in groups:
        name = plain = re.sub(r"[^A-Za-z0-9_/]+", "_", group) or "_"
        n = 1
        while name in taken:
            n += 1
            name = f"{plain}_{n}"
        taken.add(name)
        yield name


Log = Callable[[dict[str, float], int], object]
"""Takes metrics by name, and the step they belong to."""
Step = Callable[[int], int]
"""The user's own number of a step, from the number of a window."""

WINDOW = "sonde/window"
"""The metric that is W&B's x axis for the others."""
_LONGEST_TAG = 5000
"""Characters that MLflow takes."""


class _TrackerSink(ABC):
    """Hands over the known metrics of each reading, and alerts.

    The user may begin a run of the tracker after the probe is attached. So nothing is begun before the first metrics,
    and alerts wait for them.

    Args:
        step: gives the user's own number of a step from the number of a window, from 1; None if they are the same.
    """

    def __init__(self, step: Step | None) -> None:
        self._step_of: Step = step or (lambda window: window)
        self._has_begun = False
        self._alerts: list[Mapping[str, object]] = []
        """Those that wait."""

    def write(self, record: Mapping[str, object]) -> None:
        """Take one record; kinds that a tracker has no place for are left out."""
        if record["kind"] == "alert":
            self._alerts.append(record)
        elif metrics := known_metrics(record):
            if not self._has_begun:
                self._begin()
                self._has_begun = True
            self._log(metrics, self._step_of(cast(int, record["window"])), cast(float, record["time"]))
        if self._has_begun:
            for alert in self._alerts:
                window = cast(int, alert["window"])  # 0 before the first
                step, time = self._step_of(window) if window else 0, cast(float, alert["time"])
                self._alert(f"sonde/alert/{alert['name']}", str(alert["message"]), step, time)
            self._alerts.clear()

    def close(self) -> None:  # noqa: B027
        """End what this sink began."""

    def _begin(self) -> None:  # noqa: B027
        """Find the run, or begin one."""

    @abstractmethod
    def _log(self, metrics: dict[str, float], step: int, time: float) -> None:
        """Hand over metrics of a step; `time` in seconds since the epoch."""

    def _alert(self, name: str, message: str, step: int, time: float) -> None:  # noqa: B027
        """Hand over an alert, if the tracker has a place for it."""


class TensorBoardSink(_TrackerSink):
    """Writes readings as scalars at step = window, headers and alerts as text.

    A metric that is not known (null) has no point: the curve has a gap. A group's B_simple is written under
    `gns_by_group/NAME`. TensorBoard is a view: the log that a report is made from is `JsonlSink`'s.

    Args:
        log_dir: the folder TensorBoard is pointed at; or a writer of yours, which is flushed at the end, not closed.
        flush_secs: seconds between two flushes to disk, done by a thread of TensorBoard's own.
        step: gives your own number of a step from the number of a window, from 1; by default they are the same.

    Raises:
        ImportError: without the `tensorboard` package.
    """

    def __init__(
        self, log_dir: str | Path | SummaryWriter, *, flush_secs: int = 10, step: Callable[[int], int] | None = None
    ) -> None:
        super().__init__(step)
        self._is_own = isinstance(log_dir, str | Path)
        self._writer: Any = None if self._is_own else log_dir
        if self._is_own:
            writer = _imported("torch.utils.tensorboard", "tensorboard", self).SummaryWriter
            # Made with the first record: a writer makes a file at once, and every rank may make a sink.
            self._open: Callable[[], SummaryWriter] = lambda: writer(str(log_dir), flush_secs=flush_secs)

    def write(self, record: Mapping[str, object]) -> None:
        """Take one record; kinds that TensorBoard has no place for are left out."""
        if record["kind"] in ("header", "probe"):
            self._begin()
            self._has_begun = True
            self._alert("sonde/run", json.dumps(record, indent=2, ensure_ascii=False), 0, cast(float, record["time"]))
        super().write(record)

    def close(self) -> None:
        """Write out what is pending and close the file."""
        if self._writer is not None:
            (self._writer.close if self._is_own else self._writer.flush)()

    def _begin(self) -> None:
        if self._writer is None:
            self._writer = self._open()

    def _log(self, metrics: dict[str, float], step: int, time: float) -> None:
        for tag, value in metrics.items():
            self._writer.add_scalar(tag, value, global_step=step, walltime=time)

    def _alert(self, name: str, message: str, step: int, time: float) -> None:
        # TensorBoard renders text as Markdown with HTML in it: escaped and in <pre>, it shows as it was written.
        self._writer.add_text(name, f"<pre>{html.escape(message)}</pre>", global_step=step, walltime=time)


class FunctionSink(_TrackerSink):
    """Calls a function with the known metrics of each reading: `FunctionSink(mlflow.log_metrics)`. It gets no alerts.

    Args:
        log: called as `log(metrics, step)`, a dictionary of floats by name and the step they belong to.
        step: gives your own number of a step from the number of a window, from 1; by default they are the same.

    Raises:
        ValueError: for a `log` that cannot be called.
    """

    def __init__(self, log: Log, *, step: Step | None = None) -> None:
        super().__init__(step)
        if not callable(log):
            raise ValueError(f"log must be a function of metrics and a step, got {log!r:.60}")
        self._function = log

    def _log(self, metrics: dict[str, float], step: int, time: float) -> None:
        self._function(metrics, step)


class MlflowSink(_TrackerSink):
    """Writes metrics to an MLflow run, alerts as its tags.

    Args:
        run_id: of the run; by default the active one, or a new one that is begun with the first metrics and ended at
            the end.
        step: as for `FunctionSink`.
        name: of a new run; by default the tracker names it.

    Raises:
        ImportError: without the `mlflow` package.
    """

    def __init__(self, run_id: str | None = None, *, step: Step | None = None, name: str | None = None) -> None:
        super().__init__(step)
        self._mlflow = _imported("mlflow", "mlflow", self)
        self._run_id, self._is_own, self._new_name = run_id, False, name

    def close(self) -> None:
        """End the run, if this sink began it."""
        if self._is_own:
            self._mlflow.end_run()

    def _begin(self) -> None:
        if self._run_id is None:
            active = self._mlflow.active_run()
            self._is_own = active is None
            self._run_id = (active or self._mlflow.start_run(run_name=self._new_name)).info.run_id

    def _log(self, metrics: dict[str, float], step: int, time: float) -> None:
        milliseconds, metric = int(1000 * time), self._mlflow.entities.Metric
        values = [metric(name, value, milliseconds, step) for name, value in metrics.items()]
        self._mlflow.MlflowClient().log_batch(self._run_id, values)

    def _alert(self, name: str, message: str, step: int, time: float) -> None:
        self._mlflow.MlflowClient().set_tag(self._run_id, name, message[:_LONGEST_TAG])


class _RunSink(_TrackerSink):
    """Logs to a run object of a tracker, which is finished at the end if this sink began it."""

    def __init__(self, package: str, run: Any, step: Step | None, name: str | None) -> None:
        super().__init__(step)
        self._package = _imported(package, package, self)
        self._run, self._is_own, self._new_name = run, False, name

    def close(self) -> None:
        """Finish the run, if this sink began it."""
        if self._is_own:
            self._run.finish()


class TrackioSink(_RunSink):
    """Writes metrics to a trackio run, and no alerts.

    Args:
        run: what `trackio.init` returned; it is not finished here. By default the active run, or a new one of the
            project "sonde" that is begun with the first metrics and finished at the end.
        step: as for `FunctionSink`.
        name: of a new run; by default the tracker names it.

    Raises:
        ImportError: without the `trackio` package.
    """

    def __init__(self, run: Any = None, *, step: Step | None = None, name: str | None = None) -> None:
        super().__init__("trackio", run, step, name)

    def _begin(self) -> None:
        if self._run is None:
            self._run = self._package.context_vars.current_run.get()
        if self._run is None:
            self._run, self._is_own = self._package.init(project="sonde", name=self._new_name, embed=False), True

    def _log(self, metrics: dict[str, float], step: int, time: float) -> None:
        self._run.log(metrics, step)


class WandbSink(_RunSink):
    """Writes metrics to a W&B run, against the number of the window as their x axis; alerts to its summary.

    In a run of your own, numbers join the next row that you log, so that your steps stay as they are. If two readings
    come before you log a row, the row has the second.

    Args:
        run: what `wandb.init` returned; it is not finished here. By default the active run, or a new one that is begun
            with the first metrics and finished at the end.
        step: as for `FunctionSink`.
        name: of a new run; by default the tracker names it.

    Raises:
        ImportError: without the `wandb` package.
    """

    def __init__(self, run: Any = None, *, step: Step | None = None, name: str | None = None) -> None:
        super().__init__("wandb", run, step, name)
        self._has_axis: set[str] = set()
        """Metrics whose x axis W&B knows."""

    def _begin(self) -> None:
        if self._run is None:
            self._run = self._package.run
        if self._run is None:
            self._run, self._is_own = self._package.init(name=self._new_name), True
        self._run.define_metric(WINDOW, hidden=True)

    def _log(self, metrics: dict[str, float], step: int, time: float) -> None:
        for name in metrics.keys() - self._has_axis:
            if "/" in name:  # sonde's own: a plain "loss" may be the user's, with an axis of its own
                self._run.define_metric(name, step_metric=WINDOW)
        self._has_axis |= metrics.keys()
        self._run.log({**metrics, WINDOW: step}, commit=self._is_own)

    def _alert(self, name: str, message: str, step: int, time: float) -> None:
        self._run.summary[name] = message


_BY_NAME: dict[str, Callable[..., Sink]] = {"wandb": WandbSink, "mlflow": MlflowSink, "trackio": TrackioSink}
_OF_PACKAGE: dict[str, Callable[[Any], Sink]] = {"wandb": WandbSink, "trackio": TrackioSink}


def sinks_for(given: object, folder: Path) -> tuple[Sink, ...]:
    """What a user gives as a place for records, as sinks.

    Args:
        given: see `RunLog`.
        folder: for the log beside trackers and functions. Whoever gives sinks alone chooses all of them.

    Raises:
        ValueError: for an object that takes no records, naming what does.
        ImportError: for the name of a tracker that is not installed.
    """
    # Not every iterable is a list of places: MLflow's runs, mappings and texts are iterable too.
    places = list(given) if isinstance(given, list | tuple | set | frozenset | Iterator) else [given]
    sinks = [_sink_for(place, folder) for place in places]
    has_log = any(isinstance(sink, JsonlSink) for sink in sinks)
    if not (has_log or all(map(_is_sink, places))):
        sinks.append(JsonlSink(folder))  # a report is made from it
    return tuple(sinks)


def _sink_for(place: Any, folder: Path) -> Sink:
    package = getattr(place, "__name__", "") if isinstance(place, ModuleType) else type(place).__module__
    package = package.partition(".")[0]
    if _is_sink(place):
        return cast(Sink, place)
    if isinstance(place, str) and place in _BY_NAME:
        return _BY_NAME[place](name=folder.name)
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
    names = ", ".join(map(repr, TRACKERS))
    raise ValueError(
        f"a log needs places for records, got {place!r:.60}: use a folder such as 'runs/my-run', one of {names}, a run "
        "or writer of these, a function of metrics and a step, or an object with the methods of sonde.Sink"
    )


def _is_sink(place: object) -> bool:
    return not isinstance(place, type) and all(callable(getattr(place, name, None)) for name in ("write", "close"))
