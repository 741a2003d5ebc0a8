"""The records of the noise-scale probe: a reading every few windows, and alerts."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sonde.batch_size.pace import Cost, WindowCosts
from sonde.batch_size.stats.columns import (
    METRICS,
    NOISE_SCALE,
    NORM,
    OF_EACH_METRIC,
    OF_INTERVAL,
    OF_WINDOW,
    OF_WINDOWS,
    further_columns,
    in_metric,
)
from sonde.batch_size.stats.norm_watch import OwnNorm
from sonde.batch_size.stats.reading import NoiseScaleReading
from sonde.batch_size.stats.tracker import NoiseScaleTracker
from sonde.batch_size.stats.window_row import Drop, SolvedWindow, WindowRow
from sonde.probe import ReportSection
from sonde.record_values import as_json, json_number, spacing
from sonde.records import METRIC_NAME, RunLog, logger
from sonde.stats.columns import taken
from sonde.wording import percent

_PATIENCE = 10
_ALARM_AFTER = dict.fromkeys(("no_second_moment", "no_gradient", "step_alone"), math.inf)
_ALARM_AFTER |= dict.fromkeys(("loss_scale", "several_backwards"), _PATIENCE)
"""Windows in a row that are dropped for the same reason, until it is cause for alarm; 1 for other reasons.

A GradScaler finds its scale by overflows, and what reads gradients learns from the first piece that has several
backwards."""
_GROUPS_EVERY = 10
"""Readings between two with groups, which take most of a reading's time. The first ten have them too."""


@dataclass(frozen=True)
class KnownOfWindow:
    """What the host knows of a measured window when it ends.

    Attributes:
        number: of the window in training, from 1.
        time: its end, in seconds since the epoch.
        seconds: host time spent inside the probe since the measured window before.
        tap: where its gradients were read.
        every: one window in so many is measured at that time, on average.
        n_ended: windows that the pace of this probe had seen end, with this one.
        rate: the learning rate, once it has arrived with the numbers; None where it is not known.
    """

    number: int
    time: float
    seconds: float
    tap: str
    every: int = 1
    n_ended: int = 0
    rate: float | None = None


@dataclass(frozen=True)
class MeasuredWindow:
    """One window with all of its numbers on the host.

    Attributes:
        rows: the numbers that were measured, in each metric; the first is the one that checks use.
        known: what the host knew of it.
        scalars: by name: the user's own, and those of a clip, under their metric names.
        costs: what ranks have spent since the measured window before, summed over ranks.
        frozen: the numbers of `FrozenWatch`, summed over ranks; [2].
        examples: the numbers of its single examples, by name; empty where the probe does not read them.
        own_norm: the loop's own norm of the gradient; None without one, and of a model that is not cut over ranks.
    """

    rows: Sequence[WindowRow]
    known: KnownOfWindow
    scalars: Mapping[str, float]
    costs: WindowCosts = field(default_factory=WindowCosts)
    frozen: Tensor | None = None
    examples: Mapping[str, Tensor] = field(default_factory=dict)
    own_norm: OwnNorm | None = None

    @property
    def row(self) -> WindowRow:
        """The numbers in the first metric."""
        return self.rows[0]


@dataclass
class _Interval:
    """Sums since the last reading was written."""

    start: float
    windows: int = 0
    seconds: float = 0.0
    units: float = 0.0
    scalars: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    alerts: dict[str, str] = field(default_factory=dict)

    def numbers(self, now: float, units_seen: float, cost: Cost) -> dict[str, object]:
        """What columns take from it, at the time of a reading."""
        elapsed = now - self.start
        return {
            "cost": cost,
            "seconds_per_window": self.seconds / self.windows,
            "fraction": self.seconds / elapsed if elapsed > 0 else None,
            "units_seen": units_seen,
            "units_per_second": self.units / elapsed if elapsed > 0 else None,
        }


class NoiseScaleLog:
    """Writes a noise-scale probe's records to the log of its run; keeps the last of each alert on every rank.

    Args:
        tracker: where readings come from.
        log: of the run.
        setup: what was found at attach, for people.
        cost: what measuring costs now.
        further: trackers of the metrics after the headline, by name.
    """

    def __init__(
        self,
        tracker: NoiseScaleTracker,
        log: RunLog,
        setup: Mapping[str, object],
        cost: Callable[[], Cost],
        further: Mapping[str, NoiseScaleTracker],
    ) -> None:
        self.alerts: dict[str, str] = {}
        self._tracker, self._log, self._cost, self._further = tracker, log, cost, further
        self._units_seen = 0.0
        self._pieces: dict[str, object] = {}
        self._window = self._n_readings = 0
        self._last_drop, self._n_same_drops = "", 0
        self._goes_on = False
        """Whether a saved state was loaded, so that this start goes on with the run before it."""
        self._lacks_groups = False
        """Whether the last reading was written without its groups."""
        self._has_groups, self._optimizer = bool(setup.get("groups")), setup.get("optimizer_kind", "")
        self._interval = _Interval(start=time.time())
        log.begin(
            "reading",
            unit=tracker.unit,
            setup=setup,
            metrics={**METRICS, **further_columns(tracker.further_units, tracker.unit, further)},
            sections=_sections(further),
        )

    def window(self, window: MeasuredWindow, drop: Drop | None, norm: float | None) -> None:
        """Add a window that the tracker has taken; write a reading when one is due.

        Args:
            window: its numbers.
            drop: why the tracker left it out; None if it was averaged.
            norm: the plain norm of its gradient, as the tracker knows it; None if it does not.
        """
        # A measured window stands for the windows since the one before too.
        before, n_windows = self._window, max(window.known.number - self._window, 1)
        n_units = n_windows * window.row.n_units
        self._window, self._pieces = (
            window.known.number,
            {"per_window": self._tracker.n_pieces, "tap": window.known.tap},
        )
        self._interval.seconds += window.known.seconds
        # The norm that a clip measured wins: it covers parameters that the probe does not measure.
        scalars: dict[str, float | None] = {NORM: norm, **window.scalars}
        known = {name: v for name, v in scalars.items() if v is not None and (name != NORM or math.isfinite(v))}
        self._count(n_windows, n_units if math.isfinite(n_units) else 0.0, known)
        if drop is None and self._log.log_windows and self._tracker.last is not None:
            self._write("window", **self._window_record(window, self._tracker.last))
        self._n_same_drops = self._n_same_drops + 1 if drop and drop.kind == self._last_drop else 1
        self._last_drop = drop.kind if drop else ""
        if drop is not None and self._n_same_drops >= self._alarm_after(drop.kind):
            self.alert(drop.kind, f"window {window.known.number} was dropped: {drop.reason}")
        every = spacing(self._log.every, window.known.number)
        if window.known.number // every > before // every:
            self.reading(window.known.time)

    def passed(self, number: int, scalars: Mapping[str, float]) -> None:
        """Count the windows after the last measured one, at the end of a run.

        Args:
            number: of the last window of training.
            scalars: the user's own, averaged over these windows.
        """
        if (n_windows := number - self._window) <= 0 or not self._window:  # no window's numbers have come
            return
        self._window = number
        self._count(n_windows, n_windows * (self._tracker.units_per_window or 0.0), scalars)

    def _count(self, n_windows: int, n_units: float, scalars: Mapping[str, float]) -> None:
        self._interval.windows += n_windows
        self._interval.units += n_units
        self._units_seen += n_units
        for name, value in scalars.items():
            self._interval.scalars[name].append(value)

    def _alarm_after(self, kind: str) -> float:
        if kind == "single_piece" and self._tracker.windows:  # the last window of an epoch may be short
            return _PATIENCE
        return _ALARM_AFTER.get(kind, 1)

    def alert(self, name: str, message: str, *, window: int | None = None) -> None:
        """Note that something looks wrong: in the next reading, and as an alert the first time that `name` occurs.

        Args:
            name: of the alert.
            message: what looks wrong, and what to do.
            window: the one that has shown it; by default the last one that was taken in, 0 before the first.
        """
        self._interval.alerts[name] = message
        is_known, self.alerts[name] = name in self.alerts, message
        if is_known:
            return
        if self._log.is_first_rank:
            logger.warning("sonde: %s", message)
        self._write("alert", window=self._window if window is None else window, name=name, message=message)

    def reading(self, now: float, *, is_last: bool = False) -> None:
        """Write the present reading with the means since the last one.

        Args:
            now: seconds since the epoch.
            is_last: whether none follows, so that it has groups.
        """
        interval = self._interval
        if interval.windows == 0:
            return
        if not (self._n_readings or self._goes_on):
            self._write("fresh")
        self._n_readings += 1
        has_turn = self._n_readings <= _GROUPS_EVERY or self._n_readings % _GROUPS_EVERY == 0
        is_due = self._has_groups and (is_last or has_turn)
        self._lacks_groups = self._has_groups and not is_due
        # Ranks that write nothing need the total alone, for its alerts.
        with_groups = is_due and self._log.is_first_rank
        reading = self._tracker.reading(with_groups=with_groups)
        cost = self._cost()
        self._alert_if_wrong(reading, cost)
        since = interval.numbers(now, self._units_seen, cost)
        metrics = reading.metrics() | dict.fromkeys(OF_WINDOWS) | taken(OF_INTERVAL, since)
        for metric, tracker in self._further.items():
            of_metric = taken(OF_EACH_METRIC, tracker.reading(with_groups=False))
            metrics |= {in_metric(name, metric): value for name, value in of_metric.items()}
        metrics |= {name: json_number(sum(values) / len(values)) for name, values in interval.scalars.items()}
        self._write(
            "reading",
            window=self._window,
            status=reading.status,
            reason=reading.reason,
            advice=reading.advice,
            metrics=metrics,
            **({"groups": as_json(reading.groups)} if with_groups else {}),
            **({"optimizer_changed": True} if reading.optimizer != self._optimizer else {}),
            dropped=dict(reading.dropped),
            alerts=interval.alerts,
            pieces=self._pieces,
        )
        self._interval = _Interval(start=now)

    def write_at_once(self, window: int, name: str, value: float) -> None:
        """Write one scalar now. `sonde branch` compares losses at their own step, not averaged until the next reading.

        Args:
            window: windows that have ended since this start.
            name: of the scalar.
            value: the number; one that is not finite is written as null.
        """
        self._write("metrics", window=window, metrics={name: json_number(value)})

    def _alert_if_wrong(self, reading: NoiseScaleReading, cost: Cost) -> None:
        for name, message in reading.doubts.items():  # too few data are not wrong
            self.alert(name, message)
        if cost.is_over:
            assert cost.share is not None
            assert cost.budget is not None
            self.alert(
                "over_budget",
                f"measuring takes {percent(cost.share)} of the run's time, more than the budget of "
                f"{percent(cost.budget)}, even at one window in {cost.every}. Windows are too short: raise budget=, or "
                "put more work into each window",
            )

    def _write(self, kind: str, **content: object) -> None:
        self._log.write(kind, **content)
        self.alerts |= self._log.alerts  # of a sink that has failed

    def end(self, reason: str) -> None:
        """Write a reading of the windows since the last one, with its groups, and end this probe's part of the log."""
        self.reading(time.time(), is_last=True)
        if self._lacks_groups and self._log.is_first_rank:
            self._write("details", window=self._window, groups=as_json(self._tracker.reading().groups))
        self._log.leave("reading", reason, window=self._window)

    def _window_record(self, window: MeasuredWindow, solved: SolvedWindow) -> dict[str, object]:
        """A window on its own, from which readings can be made again."""
        metrics = {
            **_of_window("", solved),
            "gns/effective_units": json_number(solved.effective_units),
            "gns/learning_rate": json_number(window.known.rate),
            "cost/every": window.known.every,
        }
        for name, tracker in self._further.items():
            metrics |= _of_window(name, tracker.last)
        groups = {
            name: {key: json_number(getattr(group, key)) for key in ("trace_cov", "grad_sq")}
            for name, group in zip(self._tracker.groups, solved.per_group if self._has_groups else (), strict=False)
        }
        return {"window": window.known.number, "time": window.known.time, "metrics": metrics, "groups": groups}

    def state_dict(self) -> dict[str, float | int]:
        """How far the run has come."""
        return {"window": self._window, "units_seen": self._units_seen}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Go on counting where another run stopped."""
        self._window, self._units_seen = int(state["window"]), float(state["units_seen"])
        self._goes_on = True


class Scalars:
    """Averages scalars by name until a measured window ends, which may be a thousand windows later: only sums are held.

    Args:
        log: of the run; a scalar must not have the name of a metric that its probes write.
    """

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._sums: dict[str, float | Tensor] = {}
        self._n: dict[str, int] = {}

    def add(self, name: str, value: float | Tensor) -> None:
        """Take one scalar.

        Raises:
            ValueError: for a tensor of more than one element, another type, a name that sonde itself writes, or a name
                that some trackers refuse.
        """
        if self._log.has_metric(name):
            raise ValueError(f"{name!r} is measured by sonde: log yours under another name")
        if not re.fullmatch(METRIC_NAME, name):
            raise ValueError(f"a scalar's name may hold letters, digits, '_' and '/', got {name!r}: rename it")
        if not isinstance(value, (int, float, Tensor)):
            raise ValueError(f"log({name}=...) takes a number or a 0-dim tensor, got {value!r}")
        if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
            raise ValueError(
                f"log({name}=...) takes a real number or a 0-dim tensor, "
                f"got {value.dtype} of shape {tuple(value.shape)}"
            )
        self.note(name, value)

    def note(self, name: str, value: float | Tensor) -> None:
        """Take one scalar that is known to be one: a number or a real tensor of one element."""
        if isinstance(value, Tensor):
            # A copy, since the caller may go on adding to it; in fp32, which has every kind of arithmetic.
            value = value.detach().reshape(()).to(torch.float32, copy=True)
        self._sums[name] = self._sums.get(name, 0.0) + value
        self._n[name] = self._n.get(name, 0) + 1

    def take(self) -> dict[str, float | Tensor]:
        """The mean of each scalar since the last call. The scalars are then forgotten."""
        sums, n = self._sums, self._n
        self._sums, self._n = {}, {}
        return {name: total / n[name] for name, total in sums.items()}


def _of_window(metric: str, solved: SolvedWindow | None) -> dict[str, float | None]:
    """tr Σ and |G|² of one window; None where it was dropped."""
    numbers = taken(OF_WINDOW, None if solved is None else solved.total)
    return {in_metric(name, metric): value for name, value in numbers.items()}


def _sections(names: Iterable[str]) -> tuple[ReportSection, ...]:
    """The report's section with the noise scale in each further metric; none without them."""
    curves = tuple(in_metric(NOISE_SCALE, name) for name in names)
    text = (
        "The noise scale of the same gradients in other metrics, now, as above. The "
        "verdict speaks of the first metric alone."
    )
    return (ReportSection("Noise scale in other metrics", text, curves),) if curves else ()
