"""What a run writes down: its kinds of record, the metrics with their units, the sinks, and the log of the run.

A run is a sequence of records, each a flat JSON object with a `kind`:

- `header`, once, first: versions, the set-up that was found, the name of the unit, metrics, the user's metadata.
- `probe`, once for each further probe of the same log: which records it writes, its set-up, unit and metrics.
- `reading`, every few windows: `metrics` (a number, or null where it is not known), `groups`, `status`, `reason`,
  `dropped`, and `alerts`: what looked wrong since the reading before, a message by name.
- `policy`, around each optimizer step at which a policy's entropy was measured: `window`, `metrics`, `reason`, `per`
  ("token" or "response": the unit of the forecast), `shares` and `causes` (prompts with their parts of the change in
  nats; `causes` is null if they were not asked for), and `alerts`.
- `metrics`, when a probe of the user's own is logged: `window` and `metrics`.
- `alert`, when something looks wrong for the first time, with its `name` and a `message` in plain words.
- `end`, when the last probe was closed; a run without it was cut off.
"""

from __future__ import annotations

import logging
import math
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from sonde.deprecation import warn_deprecated
from sonde.probe import Metric, Probe, ReportSection, RolloutProbe
from sonde.version import __version__

logger = logging.getLogger("sonde")

SCHEMA = 1
"""Raised when a reader of older records could misunderstand newer ones."""

Writes = Literal["reading", "policy", "metrics"]
"""The kind of record that a probe writes."""


class Sink(Protocol):
    """A place for records. Called on rank 0 only, when a window ends; it should return soon."""

    def write(self, record: Mapping[str, object]) -> None:
        """Take one record; its values are JSON values."""

    def close(self) -> None:
        """No record follows."""


class RunLog:
    """The log of one run: give the same object to every probe of the run.

    Make it on every rank alike; records are written on rank 0 only. A sink that fails gets no more records, the others
    go on, and training with them.

    Args:
        sinks: one sink, or several.
        run: the run's name.
        metadata: anything worth remembering with the run, JSON values.
        every: windows between two readings of the noise scale.

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
        sinks: Sink | Iterable[Sink] = (),
        *,
        run: str = "",
        metadata: Mapping[str, object] | None = None,
        every: int = 10,
    ) -> None:
        given: object = (sinks,) if callable(getattr(sinks, "write", None)) else sinks
        self._sinks: tuple[Sink, ...] = tuple(given) if isinstance(given, Iterable) else ()
        if not isinstance(given, Iterable) or any(not callable(getattr(s, "write", None)) for s in self._sinks):
            raise ValueError(f"sinks must be a sink or a list of sinks, got {sinks!r}: sonde.JsonlSink('runs/my-run')")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of windows from 1 up, got {every!r}")
        self.run, self.metadata, self.every = run, dict(metadata or {}), every
        self._names: set[str] = set()
        self._n_begun = self._n_open = 0
        self._own: dict[int, Probe | RolloutProbe] = {}

    @property
    def has_sinks(self) -> bool:
        """Whether records go anywhere still."""
        return bool(self._sinks)

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank writes."""
        return not dist.is_initialized() or dist.get_rank() == 0

    def begin(
        self,
        writes: Writes,
        *,
        unit: str,
        setup: Mapping[str, object],
        metrics: Mapping[str, Metric],
        sections: Sequence[ReportSection] = (),
    ) -> None:
        """A probe begins to write: the first begins the log with its header, each further one adds a record.

        Args:
            writes: the kind of record that the probe writes.
            unit: plural name of one independent sample.
            setup: what was found, for people.
            metrics: those that the probe writes, by name.
            sections: of the report, beyond those that the report makes by itself.

        Raises:
            RuntimeError: when the log has ended already.
            Exception: that of a sink: better known before training than after.
        """
        if self._n_begun and not self._n_open:
            raise RuntimeError("this log has ended, as every probe that wrote to it was closed: make a new RunLog")
        described: dict[str, object] = {
            "unit": unit,
            "setup": dict(setup),
            "metrics": {n: {"unit": m.unit.format(unit=unit), "meaning": m.meaning} for n, m in metrics.items()},
        }
        if sections:
            described["sections"] = [asdict(section) for section in sections]
        if self._n_begun:
            self.write("probe", writes=writes, **described)
        else:
            versions = {"sonde": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
            metadata = self.metadata
            self.write(
                "header", schema=SCHEMA, run=self.run, writes=writes, versions=versions, metadata=metadata, **described
            )
        self._names |= metrics.keys()
        self._n_begun, self._n_open = self._n_begun + 1, self._n_open + 1

    def write(self, kind: str, **content: object) -> None:
        """Hand one record to the sinks."""
        if not self.is_first_rank:
            return
        record = {"kind": kind, "time": time.time(), **content}
        for sink in self._sinks:
            try:
                sink.write(record)
            except Exception as error:  # a full disk or a tracker that is down must not end a run that has begun
                if kind == "header":
                    self._close_sinks(self._sinks)
                if kind in ("header", "probe"):
                    raise
                logger.error("sonde: %s writes no more: %s", type(sink).__name__, error)
                self._close_sinks([sink])

    def measure(self, probe: Probe | RolloutProbe, window: int) -> None:
        """Write the present metrics of a probe of your own.

        If its class has `METRICS` (a `Metric` by name), these give the units; if it has a `SECTION` (a
        `ReportSection`), the report draws that, and otherwise one section named after the class.

        Args:
            probe: the same object every time.
            window: number of the optimizer step, from 1.
        """
        metrics = probe.metrics()
        if id(probe) not in self._own:
            name = type(probe).__name__
            section = getattr(probe, "SECTION", None) or ReportSection(name, "", tuple(metrics))
            declared = getattr(probe, "METRICS", {})
            self.begin("metrics", unit="steps", setup={"probe": name}, metrics=declared, sections=[section])
            self._own[id(probe)] = probe
        self.write("metrics", window=window, metrics=dict(metrics))

    def has_metric(self, name: str) -> bool:
        """Whether a probe of this log writes a metric of that name."""
        return name in self._names

    def end(self, reason: str, *, window: int) -> None:
        """A probe ends. When the last one has, the log ends and its sinks are closed.

        Args:
            reason: why, for the log.
            window: number of the last optimizer step.
        """
        self._n_open -= 1
        if self._n_open <= len(self._own):  # probes of the user's own have no end of their own
            self._n_open, self._own = 0, {}
            self.write("end", window=window, reason=reason)
            self._close_sinks(self._sinks)

    def _close_sinks(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sink for sink in self._sinks if sink not in sinks)
        for sink in sinks:
            try:
                sink.close()
            except Exception as error:  # the others must be closed too; what was written stays
                logger.error("sonde: %s could not be closed: %s", type(sink).__name__, error)


def json_number(value: float | None) -> float | None:
    """A number as records hold it: JSON has no NaN and no infinity, so these become None."""
    return value if value is not None and math.isfinite(value) else None


def log_of(log: RunLog | None, deprecated: dict[str, Any], *, every: int = 10) -> RunLog:
    """The log that a probe is given, which may also be given as its older spelling did.

    Args:
        log: as the call gives it now; None for a log without sinks.
        deprecated: keywords that the call does not list; those of the older spelling are taken out.
        every: windows between readings, if neither spelling says.

    Raises:
        TypeError: for both at once.
    """
    old = {name: deprecated.pop(name) for name in ("sinks", "run", "metadata", "log_every") if name in deprecated}
    if not old:
        return RunLog(every=every) if log is None else log
    if log is not None:
        raise TypeError(f"log= has its own {next(iter(old)).removeprefix('log_')}: give it to sonde.RunLog")
    words = ", ".join(f"{name.removeprefix('log_')}=…" for name in old)
    warn_deprecated(", ".join(f"{name}=…" for name in old), f"log=sonde.RunLog({words})")
    return RunLog(
        old.get("sinks", ()), run=old.get("run", ""), metadata=old.get("metadata"), every=old.get("log_every", every)
    )
