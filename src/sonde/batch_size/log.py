"""What a probe writes down: one header, a reading every few windows, alerts, an end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sonde.batch_size.stats.reading import GroupReading, find_alerts
from sonde.batch_size.stats.tracker import NoiseScaleTracker
from sonde.batch_size.stats.window_row import Drop
from sonde.records import RecordWriter, Sink, logger

_EXPECTED = {"no_second_moment"}
"""Reasons to drop a window that are no cause for alarm."""


@dataclass(frozen=True)
class WindowFacts:
    """What the host knows of a window, and scalars that came with it.

    Attributes:
        window: its number, from 1.
        time: when it ended, in seconds since the epoch.
        seconds: host time spent inside the probe for it.
        units: units it consumed over all ranks; NaN when not finite.
        n_pieces: its pieces over all ranks.
        tap: where its gradients were read.
        norm: norm of the gradient before clipping; None when not measured.
        clipped: whether the probe clipped it; None when it does not clip.
        scalars: what the user logged.
    """

    window: int
    time: float
    seconds: float
    units: float
    n_pieces: int
    tap: str
    norm: float | None
    clipped: bool | None
    scalars: Mapping[str, float]


@dataclass
class _Mean:
    total: float = 0.0
    n: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.n += 1

    @property
    def value(self) -> float | None:
        return self.total / self.n if self.n else None


@dataclass
class _Interval:
    """Sums since the last reading was written."""

    start: float
    windows: int = 0
    seconds: float = 0.0
    units: float = 0.0
    norms: _Mean = field(default_factory=lambda: _Mean())
    clipped: _Mean = field(default_factory=lambda: _Mean())
    scalars: dict[str, _Mean] = field(default_factory=dict)
    alerts: dict[str, str] = field(default_factory=dict)


class NoiseScaleLog:
    """Writes a probe's records to its sinks, on rank 0; keeps its alerts on every rank.

    Args:
        tracker: where readings come from.
        sinks: where records go; empty on other ranks.
        log_every: windows between readings.
        run: the run's name.
        setup: what was found at attach, for people.
        metadata: the user's own, JSON values.
        quiet: keep alerts, but do not log them.
    """

    def __init__(
        self,
        tracker: NoiseScaleTracker,
        sinks: Sequence[Sink],
        *,
        log_every: int,
        run: str,
        setup: Mapping[str, object],
        metadata: Mapping[str, object],
        quiet: bool,
    ) -> None:
        self.alerts: dict[str, str] = {}
        self._tracker, self._log_every, self._quiet = tracker, log_every, quiet
        self._units_seen = 0.0
        self._pieces: dict[str, object] = {}
        self._window = 0
        self._interval = _Interval(start=time.time())
        self._log = RecordWriter(sinks)
        self._log.begin(run=run, unit=tracker.unit, setup=setup, metadata=metadata)

    def window(self, facts: WindowFacts, drop: Drop | None) -> None:
        """Note a window that the tracker has taken; write a reading when one is due."""
        self._window, self._pieces = facts.window, {"per_window": facts.n_pieces, "tap": facts.tap}
        now = self._interval
        now.windows += 1
        now.seconds += facts.seconds
        if math.isfinite(facts.units):
            now.units += facts.units
            self._units_seen += facts.units
        if facts.norm is not None and math.isfinite(facts.norm):
            now.norms.add(facts.norm)
        if facts.clipped is not None:
            now.clipped.add(facts.clipped)
        for name, value in facts.scalars.items():
            now.scalars.setdefault(name, _Mean()).add(value)
        if drop is not None and drop.kind not in _EXPECTED:
            self.alert(drop.kind, f"window {facts.window} was dropped: {drop.reason}")
        if facts.window % self._log_every == 0:
            self.reading(facts.time)

    def alert(self, name: str, message: str) -> None:
        """Something looks wrong: the reading will say so, and the first time of each name is an alert."""
        self._interval.alerts[name] = message
        if name in self.alerts:
            return
        self.alerts[name] = message
        if not self._quiet:
            logger.warning("sonde: %s", message)
        self._log.write("alert", window=self._window, name=name, message=message)

    def reading(self, now: float) -> None:
        """Write the present reading with the means since the last one."""
        reading, interval = self._tracker.reading(), self._interval
        if interval.windows == 0:
            return
        for name, message in find_alerts(reading).items():
            self.alert(name, message)
        elapsed = now - interval.start
        metrics = reading.metrics() | {
            "grad/norm": interval.norms.value,
            "grad/clip_fraction": interval.clipped.value,
            "cost/seconds_per_window": interval.seconds / interval.windows,
            "cost/fraction": interval.seconds / elapsed if elapsed > 0 else None,
            "run/units_seen": self._units_seen,
            "run/units_per_second": interval.units / elapsed if elapsed > 0 else None,
        }
        metrics |= {name: _finite(mean.value) for name, mean in interval.scalars.items()}
        self._log.write(
            "reading",
            window=self._window,
            status=reading.status,
            reason=reading.reason,
            metrics=metrics,
            groups={name: _group_record(group) for name, group in reading.groups.items()},
            dropped=dict(reading.dropped),
            alerts=interval.alerts,
            pieces=self._pieces,
        )
        self._interval = _Interval(start=now)

    def end(self, reason: str) -> None:
        """Write what is left and close the sinks."""
        self.reading(time.time())
        self._log.write("end", window=self._window, reason=reason)
        self._log.close()

    def state_dict(self) -> dict[str, float | int]:
        """How far the run has come."""
        return {"window": self._window, "units_seen": self._units_seen}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Go on counting where another run stopped."""
        self._window, self._units_seen = int(state["window"]), float(state["units_seen"])


def _group_record(group: GroupReading) -> dict[str, object]:
    return {
        "status": group.status,
        "b_simple": group.b_simple,
        "low": group.low,
        "high": _finite(group.high),
        "grad_sq": group.grad_sq,
        "trace_cov": group.trace_cov,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
