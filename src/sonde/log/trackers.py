"""Sinks for experiment trackers: TensorBoard, W&B, MLflow, trackio, or any function of metrics and a step.

A tracker shows sonde's numbers beside those that a team already looks at. The log that a report is made from is
`JsonlSink`'s. Records come a few windows late, and carry the number of their own window.

The user's own rows stay as they are without sonde. W&B and trackio number the rows that come without a step. So in a
run of the user's, no row of sonde's takes a number. TensorBoard and MLflow number nothing.
"""

from __future__ import annotations

import contextvars
import functools
import html
import importlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, ClassVar, cast

from sonde.log.sinks import JsonlSink
from sonde.sink import Sink
from sonde.version import install_hint

Step = Callable[[int], int]
"""The user's own number of a step, from the number of a window."""

WINDOW = "sonde/window"
"""The metric that is the x axis of the others where the tracker numbers rows itself."""
_LONGEST_TAG = 5000
"""Characters that MLflow takes."""
_LONGEST_TITLE = 63
"""Characters that W&B takes for the title of an alert."""


def known_metrics(record: Mapping[str, Any], declared: Collection[str] = ()) -> dict[str, float]:
    """The numbers of a record that are known, also each group's B_simple as `gns_by_group/NAME`.

    Names hold letters, digits, `_` and `/` only, which all trackers take: "layers.0" becomes "layers_0". The user may
    log a "loss" of his own to the same run, so names that no header declares begin with "sonde/".

    Args:
        record: any record; one without numbers gives none.
        declared: the metrics of the run's headers.
    """
    if record["kind"] not in ("reading", "policy", "metrics"):
        return {}
    named = {name if name in declared else f"sonde/{name}": value for name, value in record["metrics"].items()}
    for group, values in record.get("groups", {}).items():
        name = plain = "gns_by_group/" + (re.sub(r"[^A-Za-z0-9_/]+", "_", group) or "_")
        n = 1
        while name in named:  # two groups whose names differ in other letters
            n += 1
            name = f"{plain}_{n}"
        named[name] = values["b_simple"]
    return {name: value for name, value in named.items() if value is not None}


class _TrackerSink:
    """Hands over the known metrics of each reading, and alerts.

    The user may begin a run of the tracker after the probe is attached. So nothing is begun before the first metrics,
    and texts wait for a run. A run that was given, or is active, is the user's, and is not ended here. A new one does
    not become the active run, so that what the user begins later is no part of it.

    Args:
        run: of the tracker; by default the active one, or else a new one, which is ended at the end.
        step: gives the user's own number of a step from the number of a window, from 1; by default they are the same.
        name: of a new run; by default the tracker names it.

    Raises:
        ImportError: without the tracker's package.
    """

    MODULE: ClassVar[str] = ""
    """Of the tracker; its last part is the package."""

    def __init__(self, run: Any = None, *, step: Step | None = None, name: str | None = None) -> None:
        self._run, self._new_name, self._is_own = run, name, False
        self._step_of: Step = step or (lambda window: window)
        self._names: set[str] = set()
        """Metrics that a header declares."""
        self._texts: list[tuple[str, str, int, float]] = []
        """Those that wait for a run: tag, text, window, time."""
        if run is None:
            _ = self._module  # without its package, an error now rather than at the first metrics

    @functools.cached_property
    def _module(self) -> Any:
        try:
            return importlib.import_module(self.MODULE)
        except ImportError as error:
            package = self.MODULE.rpartition(".")[2]
            raise ImportError(f"{type(self).__name__} needs {package}: {install_hint(package)}") from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record; kinds that a tracker has no place for are left out."""
        if record["kind"] in ("header", "probe"):
            self._names |= record.get("metrics", {}).keys()
        elif record["kind"] == "alert":
            self._texts.append((f"sonde/alert/{record['name']}", record["message"], record["window"], record["time"]))
        elif metrics := known_metrics(record, self._names):
            if not self._has_run():
                self._run, self._is_own = self._new(), True
            self._log(metrics, self._step_of(record["window"]), record["time"])
        if self._run is not None:
            self._write_texts()

    def close(self) -> None:
        """Hand over what waits. End the run, if this sink began it."""
        if self._has_run():
            self._write_texts()
        if self._is_own:
            self._end()

    def _has_run(self) -> bool:
        if self._run is None:
            self._run = self._active()
        return self._run is not None

    def _write_texts(self) -> None:
        while self._texts:
            tag, text, window, time = self._texts.pop(0)
            self._alert(tag, text, self._step_of(window) if window else 0, time)  # 0 before the first window

    # A tracker is what follows: how to find a run, begin it, log, alert, end.

    def _active(self) -> Any:
        """The user's active run; None without one."""

    def _new(self) -> Any:
        """A new run."""

    def _log(self, metrics: dict[str, float], step: int, time: float) -> None:
        """Hand over metrics of a step; `time` in seconds since the epoch."""

    def _alert(self, tag: str, text: str, step: int, time: float) -> None:
        """Hand over an alert, if the tracker has a place for it."""

    def _end(self) -> None:
        self._run.finish()


class FunctionSink(_TrackerSink):
    """Calls a function with the known metrics of each reading: `FunctionSink(mlflow.log_metrics)`. It gets no alerts.

    Args:
        log: called as `log(metrics, step)`, a dictionary of floats by name and the step they belong to.
        step: gives your own number of a step from the number of a window, from 1; by default they are the same.

    Raises:
        ValueError: for a `log` that cannot be called.
    """

    def __init__(self, log: Callable[[dict[str, float], int], object], *, step: Step | None = None) -> None:
        if not callable(log):
            raise ValueError(f"log must be a function of metrics and a step, got {log!r:.60}")
        super().__init__(log, step=step)

    def _log(self, metrics: dict[str, float], step: int, time: float) -> None:
        self._run(metrics, step)


class TensorBoardSink(_TrackerSink):
    """Writes readings as scalars at step = window, headers and alerts as text.

    A metric that is not known (null) has no point: the curve has a gap. A group's B_simple is written under
    `gns_by_group/NAME`. TensorBoard is a view: the log that a report is made from is `JsonlSink`'s.

    Args:
        place: the folder TensorBoard is pointed at; or a writer of yours, which is not closed.
        step: as for `FunctionSink`.

    Raises:
        ImportError: without the `tensorboard` package.
    """

    MODULE = "torch.utils.tensorboard"

    def __init__(self, place: Any, *, step: Step | None = None) -> None:
        is_folder = isinstance(place, str | Path)
        super().__init__(None if is_folder else place, step=step, name=str(place) if is_folder else None)

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record; kinds that TensorBoard has no place for are left out."""
        if record["kind"] in ("header", "probe"):
            self._texts.append(("sonde/run", json.dumps(record, indent=2, ensure_ascii=False), 0, record["time"]))
        super().write(record)

    def _new(self) -> Any:
        return self._module.SummaryWriter(self._new_name, flush_secs=10)

    def _end(self) -> None:
        self._run.close()

    def _log(self, metrics: dict[str, float], step: int, time: float) -> None:
        for tag, value in metrics.items():
            self._run.add_scalar(tag, value, global_step=step, walltime=time)

    def _alert(self, tag: str, text: str, step: int, time: float) -> None:
        # TensorBoard renders text as Markdown with HTML in it: escaped and in <pre>, it shows as it was written.
        self._run.add_text(tag, f"<pre>{html.escape(text)}</pre>", global_step=step, walltime=time)


class MlflowSink(_TrackerSink):
    """Writes metrics to an MLflow run, alerts as its tags: MLflow has no alerts.

    Args:
        run: id of the run; by default the active one, or a new one that is begun with the first metrics and ended at
            the end.
        step: as for `FunctionSink`.
        name: of a new run; by default the tracker names it.

    Raises:
        ImportError: without the `mlflow` package.
    """

    MODULE = "mlflow"

    def _active(self) -> Any:
        active = self._module.active_run()
        return active and active.info.run_id

    def _new(self) -> Any:
        # Not by start_run: while a run is active, MLflow refuses the one that the user begins, and a log_metric of his
        # without a run would land in it.
        experiment = self._module.tracking.fluent._get_experiment_id()
        return self._module.MlflowClient().create_run(experiment, run_name=self._new_name).info.run_id

    def _end(self) -> None:
        self._module.MlflowClient().set_terminated(self._run)

    def _log(self, metrics: dict[str, float], step: int, time: float) -> None:
        milliseconds, metric = int(1000 * time), self._module.entities.Metric
        values = [metric(name, value, milliseconds, step) for name, value in metrics.items()]
        self._module.MlflowClient().log_batch(self._run, values)

    def _alert(self, tag: str, text: str, step: int, time: float) -> None:
        self._module.MlflowClient().set_tag(self._run, tag, text[:_LONGEST_TAG])


class TrackioSink(_TrackerSink):
    """Writes metrics to a trackio run, and alerts as its alerts.

    In a run of your own, numbers lie at the step of your last row, or at their own window if that is lower; before
    your first row at -1. So your rows keep their steps. The metric `sonde/window` can be chosen as the x axis.

    Args:
        run: what `trackio.init` returned; it is not finished here. By default the active run, or a new one of the
            project "sonde" that is begun with the first metrics and finished at the end.
        step: as for `FunctionSink`.
        name: of a new run; by default the tracker names it.

    Raises:
        ImportError: without the `trackio` package.
    """

    MODULE = "trackio"

    def _active(self) -> Any:
        return self._module.context_vars.current_run.get()

    def _new(self) -> Any:
        # In a copy of the context, where trackio keeps the active run.
        return contextvars.copy_context().run(self._module.init, "sonde", name=self._new_name, embed=False)

    def _log(self, metrics: dict[str, float], step: int, time: float) -> None:
        # trackio goes on after the highest step that a run has, also when the run is resumed.
        highest = step if self._is_own else self._run._next_step - 1
        self._run.log({**metrics, WINDOW: step}, min(step, highest))

    def _alert(self, tag: str, text: str, step: int, time: float) -> None:
        self._run.alert(_title(tag), text)  # a warning, by default


class WandbSink(_TrackerSink):
    """Writes metrics to a W&B run, against the number of the window as their x axis. Alerts are its alerts, and lie in
    its summary, which the run's page shows.

    In a run of your own, numbers join the row that you log next, so that your steps stay as they are. If two readings
    come before you log a row, the row has the second. Those after your last row are a row at the end, so a run that is
    resumed goes on one step later.

    Args:
        run: what `wandb.init` returned, or Lightning's `WandbLogger`; it is not finished here. By default the active
            run, or a new one that is begun with the first metrics and finished at the end.
        step: as for `FunctionSink`.
        name: of a new run; by default the tracker names it.

    Raises:
        ImportError: without the `wandb` package.
    """

    MODULE = "wandb"

    _known: frozenset[str] = frozenset()
    """Metrics whose x axis W&B knows."""

    def _active(self) -> Any:
        return self._module.run

    def _new(self) -> Any:
        run = self._module.init(name=self._new_name, reinit="create_new")
        self._module.setup().remove_active_run(run)  # or else W&B returns it when the user begins a run
        return run

    @property
    def _experiment(self) -> Any:
        return getattr(self._run, "experiment", self._run)  # of Lightning's logger

    def _log(self, metrics: dict[str, float], step: int, time: float) -> None:
        row = {**metrics, WINDOW: step}
        for name in row.keys() - self._known:
            axis = None if name == WINDOW else WINDOW
            self._experiment.define_metric(name, step_metric=axis, hidden=axis is None)
        self._known |= row.keys()
        self._experiment.log(row, commit=self._is_own)

    def _alert(self, tag: str, text: str, step: int, time: float) -> None:
        self._experiment.alert(_title(tag), text, level="WARN")
        self._experiment.summary[tag] = text


def _title(tag: str) -> str:
    """The title of an alert: `sonde/alert/same_data` is "sonde: same data"."""
    return f"sonde: {tag.rpartition('/')[2].replace('_', ' ')}"[:_LONGEST_TITLE]


_SINKS: dict[str, type[_TrackerSink]] = {sink.MODULE: sink for sink in (WandbSink, MlflowSink, TrackioSink)}
_NAMES = ", ".join(map(repr, (*_SINKS, "tensorboard")))


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
    if _is_sink(place):
        return cast(Sink, place)
    if isinstance(place, str | Path):
        return _sink_named(place, folder)
    if callable(getattr(place, "add_scalar", None)):
        return TensorBoardSink(place)
    owner = getattr(place, "__self__", place)  # of a run's own log(), which would take a number
    packages = _packages_of(owner)
    if callable(log := getattr(owner, "log_metrics", None)) and any("lightning" in package for package in packages):
        return WandbSink(owner) if "wandb" in packages else FunctionSink(log)
    for sink in (_SINKS[package] for package in packages if package in _SINKS):
        if isinstance(owner, ModuleType) or callable(owner):
            return sink()  # for the active run
        if hasattr(owner, "info"):  # a run of MLflow's
            return sink(owner.info.run_id)
        if callable(getattr(owner, "log", None)):
            return sink(owner)
    if callable(place) and not isinstance(place, type):
        return FunctionSink(place)
    raise ValueError(
        f"a log needs places for records, got {place!r:.60}: use a folder such as 'runs/my-run', one of {_NAMES}, a "
        "run or writer of these, a function of metrics and a step, or an object with the methods of sonde.Sink"
    )


def _sink_named(place: str | Path, folder: Path) -> Sink:
    """A text with a separator of paths is a folder. A bare word is rather the name of a tracker, known or not."""
    if isinstance(place, Path) or "/" in place or os.sep in place:
        return JsonlSink(place)
    if place == "tensorboard":
        return TensorBoardSink(folder)
    if place in _SINKS:
        return _SINKS[place](name=folder.name)
    raise ValueError(
        f"log must be a folder or a tracker that sonde writes to, got {place!r}: for a folder, write "
        f"'runs/{place or 'my-run'}'; the trackers are {_NAMES}, several of them in a list; for any other "
        "tracker pass a function of metrics and a step: log=lambda metrics, step: run.log(metrics, step=step)"
    )


def _packages_of(place: object) -> set[str]:
    """Where a module, a function or an object's class come from; for Lightning's loggers the tracker's name too."""
    if isinstance(place, ModuleType | FunctionType):
        return {(place.__name__ if isinstance(place, ModuleType) else place.__module__).partition(".")[0]}
    modules = [kind.__module__.split(".") for kind in type(place).__mro__]
    return {module[0] for module in modules} | {module[-1] for module in modules if "loggers" in module}


def _is_sink(place: object) -> bool:
    return not isinstance(place, type) and all(callable(getattr(place, name, None)) for name in ("write", "close"))
