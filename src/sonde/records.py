"""What a run writes down: its kinds of record, the metrics with their units, and the log of the run.

A run is a sequence of records, each a JSON object with a `kind`:

- `header`, once, first: versions, the set-up that was found, the name of the unit, metrics, the user's metadata.
- `probe`, once for each further probe of the same log: which records it writes, its set-up, unit and metrics.
- `fresh`, before the first reading of a start that has loaded no saved state: this start is a new run. Readers take the
  last run of a log alone.
- `reading`, every few windows: `metrics` (a number, or null where it is not known), `status`, `reason`, `advice`,
  `pieces`, `dropped`, and `alerts`: what looked wrong since the reading before, a message by name. The first ten
  readings and every tenth after that have `groups` too.
- `details`, when the probe is closed: `groups` of the last reading, if it was written without them.
- `window`, for each window that was averaged, if the log was asked for windows: `metrics` and `groups` of that window
  alone.
- `policy`, around each optimizer step at which a policy's entropy was measured: `window`, `metrics`, `reason`, `per`
  ("token" or "response": the unit of the forecast), `shares` and `causes` (prompts with their parts of the change in
  nats; `causes` is null if they were not asked for), and `alerts`.
- `comparison`, when losses were compared: `window`, `baseline`, `per`, and `options`: of each loss its `name`, forecast
  `change`, paired `difference` from the baseline with its interval, and what this says in `words`.
- `metrics`, when a probe of the user's own is logged: `window` and `metrics`.
- `alert`, when something looks wrong for the first time, with its `name` and a `message` in plain words.
- `end`, when the last probe was closed; a run without it was cut off.

These are the records that sinks get. `JsonlSink` writes each as a line of JSON.
"""

from __future__ import annotations

import itertools
import logging
import os
import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from sonde.log.sinks import BRANCH_FOLDER, JsonlSink
from sonde.log.trackers import sinks_for
from sonde.probe import Probe, ReportSection, RolloutProbe
from sonde.record_values import SCHEMA, check_setup, metric_values, step_number, whole_number
from sonde.sink import GuardedSink
from sonde.stats.columns import Columns
from sonde.version import __version__

logger = logging.getLogger("sonde")

Writes = Literal["reading", "policy", "metrics"]
"""The kind of record that a probe writes."""

LogOrPlaces = Any
"""A `RunLog`, or what it takes as `sinks`: a folder, a tracker's name, run or writer, a function, a `Sink`, several."""

METRIC_NAME = r"[A-Za-z0-9_/]+"
"""What every tracker accepts."""


class RunLog:
    """The log of one run: give the same object to every probe of the run.

    Make it on every rank alike; records are written on rank 0 only, and never by a child that a rank forks. A sink that
    fails gets no more records, the others go on, and training with them; `alerts` tells. A record that a sink refuses
    by a `ValueError` is left out of that sink; after 3 in a row the sink has failed.

    Args:
        sinks: one place for the records, or several: a folder, for the log that reports are made from; "wandb",
            "mlflow", "trackio" or "tensorboard"; a run or writer of one of these; a function that takes metrics and a
            step; or an object with the methods of `Sink`. Beside all but the last, such a log is written in `runs/`.
        run: the run's name.
        metadata: anything worth remembering with the run, JSON values.
        every: windows between two readings of the noise scale. It doubles after 2,000 readings, and each time that
            the run is twice as long again, so that a log of 10 million windows has about 11,000 readings.
        log_windows: also write tr Σ and |G|² of each window alone, for the whole model and for each group, a line
            each, of the kind "window".

    Raises:
        ValueError: for sinks that cannot write, or an `every` below 1.

    Example:
        >>> import sonde
        >>> model = torch.nn.Linear(4, 1)
        >>> log = RunLog(run="my run", every=5)
        >>> with sonde.attach(model, unit="rows", log=log, verbose=False) as probe:
        ...     with probe.piece(units=8):
        ...         model(torch.randn(8, 4)).square().mean().backward()
    """

    def __init__(
        self,
        sinks: Any = (),
        *,
        run: str = "",
        metadata: Mapping[str, object] | None = None,
        every: int = 10,
        log_windows: bool = False,
    ) -> None:
        checked = sinks_for(sinks, folder := _folder_of(run))
        if os.environ.get(BRANCH_FOLDER) and not any(isinstance(sink, JsonlSink) for sink in checked):
            checked = (*checked, JsonlSink(folder))  # `sonde branch` reads the log of each branch
        every = whole_number("every must be a whole number of windows", every)
        self.run, self.metadata, self.every, self.log_windows = run, dict(metadata or {}), every, log_windows
        self.alerts: dict[str, str] = {}
        """Sinks that write no more, or have refused a record: a message by name."""
        self._sinks = tuple(GuardedSink(sink, self.alerts) for sink in checked)
        self._is_first_rank: bool | None = None
        self._pid: int | None = None
        """Of the process in which the log began."""
        self._files = [sink for sink in checked if isinstance(sink, JsonlSink)]
        self._metrics: dict[str, Writes] = {}
        """The kind of record that each metric is written in."""
        self._has_begun = self._has_ended = False
        self._open: set[Writes] = set()
        """The kinds of record whose probes are open."""
        self._own: dict[int, Probe | RolloutProbe] = {}
        """The user's own probes that were measured, by identity; held, so that no other probe gets that identity."""

    @property
    def folder(self) -> Path | None:
        """Of the log that reports are made from; None without one."""
        return next((sink.path.parent for sink in self._files), None)

    @property
    def has_sinks(self) -> bool:
        """Whether records go anywhere still."""
        return any(sink.is_open for sink in self._sinks)

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank writes. Decided when the log begins: the process group may be gone when it ends."""
        if self._is_first_rank is not None:
            return self._is_first_rank
        return not dist.is_initialized() or dist.get_rank() == 0

    @property
    def _may_write(self) -> bool:
        """Whether this is the process whose log it is: rank 0, and no child that rank 0 has forked."""
        return self.is_first_rank and self._pid in (None, os.getpid())

    def write(self, kind: str, **content: object) -> None:
        """Hand one record to the sinks. What a sink raises is logged, and does not end the run."""
        self._hand_over(kind, content, raises=False)

    def _hand_over(self, kind: str, content: Mapping[str, object], *, raises: bool) -> None:
        """Hand one record to the sinks; `raises`: raise what a sink raises that must begin."""
        if self._may_write:
            record = {"kind": kind, "time": time.time(), **content}
            for sink in self._sinks:
                sink.write(record, raises=raises)

    def _close_sinks(self) -> None:
        if self._may_write:
            for sink in self._sinks:
                sink.close()

    def begin(
        self,
        writes: Writes,
        *,
        unit: str,
        setup: Mapping[str, object],
        metrics: Columns,
        sections: Sequence[ReportSection] = (),
    ) -> None:
        """A probe begins to write: the first begins the log with its header, each further one adds a record.

        Args:
            writes: the kind of record that the probe writes.
            unit: plural name of one independent sample.
            setup: what was found, for people; names in `record_values.SETTINGS` have values of these kinds, or None.
            metrics: the probe's metrics, by name.
            sections: further sections of the report.

        Raises:
            RuntimeError: when the log has ended already, or another open probe writes the same kind of record.
            ValueError: for a metric whose name another probe has, or some trackers refuse; for a set-up that a report
                could not show.
            Exception: what a sink with `must_begin` raises, so that the user sees it before training.
        """
        if self._has_ended:
            raise RuntimeError(
                "this log has ended, as every probe that wrote to it was closed: make a new RunLog, or give the folder "
                "in its place, to which one training after another may write"
            )
        if writes in self._open:
            raise RuntimeError(f"another probe writes {writes!r} records to this log: give each a RunLog of its own")
        check_setup(setup)
        self._check_metrics(writes, metrics)
        self._describe(writes, unit, setup, metrics, sections, raises=True)
        self._open.add(writes)

    def _check_metrics(self, writes: Writes, metrics: Iterable[str]) -> None:
        for name in metrics:
            if not re.fullmatch(METRIC_NAME, name):
                raise ValueError(f"a metric's name may hold letters, digits, '_' and '/', got {name!r}: rename it")
            if self._metrics.get(name, writes) != writes:
                raise ValueError(f"another probe of this log writes the metric {name!r}: rename yours")

    def _describe(
        self,
        writes: Writes,
        unit: str,
        setup: Mapping[str, object],
        metrics: Columns,
        sections: Sequence[ReportSection],
        *,
        raises: bool,
    ) -> None:
        """Write the header, or the record of a further probe."""
        described: dict[str, object] = {
            "writes": writes,
            "unit": unit,
            "setup": dict(setup),
            "metrics": {
                name: {"unit": metric.unit.replace("{unit}", unit), "meaning": metric.meaning}
                for name, metric in metrics.items()
            },
        }
        if sections:
            described["sections"] = [asdict(section) for section in sections]
        if self._has_begun:
            self._hand_over("probe", described, raises=raises)
        else:
            versions = {"sonde": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
            described |= {"schema": SCHEMA, "run": self.run, "versions": versions, "metadata": self.metadata}
            self._is_first_rank, self._pid = self.is_first_rank, os.getpid()
            try:
                self._hand_over("header", described, raises=raises)
            except Exception:  # a log without its header is no log
                self._has_ended = True
                self._close_sinks()
                raise
            self._has_begun = True
        self._metrics |= dict.fromkeys(metrics, writes)

    def measure(self, probe: Probe | RolloutProbe, window: int) -> None:
        """Write the present metrics of a probe of your own.

        If its class has `METRICS` (a `Metric` by name), these give the units; if it has a `SECTION` (a
        `ReportSection`), the report draws that, and otherwise one section named after the class. Sinks that fail, and a
        log that has ended, do not end training: they are logged.

        Args:
            probe: the same object every time.
            window: number of the optimizer step, from 0 up.

        Raises:
            ValueError: for a window, metric or name that cannot be written.
        """
        window = step_number("window", window)
        metrics = metric_values(probe.metrics())
        if self._has_ended or not metrics:
            if self._has_ended:
                logger.error("sonde: the log has ended: the metrics of %s are not written", type(probe).__name__)
            return
        if id(probe) not in self._own:
            self._check_metrics("metrics", metrics)
            name = type(probe).__name__
            section = getattr(probe, "SECTION", None) or ReportSection(name, "", tuple(metrics))
            declared: Columns = getattr(probe, "METRICS", {})
            setup, raises = {"probe": name}, not self._has_begun
            self._describe("metrics", "steps", setup, declared, [section], raises=raises)
            self._metrics |= dict.fromkeys(metrics, "metrics")
            self._own[id(probe)] = probe
        self.write("metrics", window=window, metrics=metrics)

    def has_metric(self, name: str) -> bool:
        """Whether a probe of this log writes a metric of that name."""
        return name in self._metrics

    def leave(self, writes: Writes, reason: str, *, window: int) -> None:
        """One of sonde's probes ends. When the last one has, the log ends and its sinks are closed.

        Args:
            writes: the kind of record that the probe wrote.
            reason: why, for the log.
            window: number of the last optimizer step.
        """
        self._open.discard(writes)
        if not self._open:
            self._end(reason, window)

    def end(self, reason: str, *, window: int) -> None:
        """End a log to which only probes of your own write; with one of sonde's probes, it ends when that is closed.

        Args:
            reason: why, for the log.
            window: number of the last optimizer step.

        Raises:
            RuntimeError: while one of sonde's probes is open.
        """
        if self._open:
            raise RuntimeError("one of sonde's probes still writes to this log: close that probe, and the log ends")
        if not self._has_ended:
            self._end(reason, window)

    def _end(self, reason: str, window: int) -> None:
        self._has_ended = True
        self._own = {}
        self.write("end", window=window, reason=reason)
        self._close_sinks()


_made_up: set[Path] = set()
"""Folders of logs without a name."""


def _folder_of(run: str) -> Path:
    """The folder for the log of a run: the time, if the run has no name. Each log of a process has its own then."""
    if run:
        return Path("runs") / run
    now = time.strftime("%Y-%m-%d_%H-%M-%S")
    folder = next(
        f for n in itertools.count(1) if (f := Path("runs") / (now if n == 1 else f"{now}-{n}")) not in _made_up
    )
    _made_up.add(folder)
    return folder


def log_of(log: LogOrPlaces) -> RunLog:
    """The log passed as `log=`.

    Args:
        log: None for a log without sinks.

    Raises:
        ValueError: for something else than a log or places for records.
    """
    if isinstance(log, RunLog):
        return log
    return RunLog(() if log is None else log)
