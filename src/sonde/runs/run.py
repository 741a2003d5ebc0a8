"""What a run's log holds, as dataclasses."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sonde.batch_size.stats.columns import AVERAGE, BATCH, NOISE_SCALE
from sonde.batch_size.stats.reading import GroupReading
from sonde.decision.law import as_weighed
from sonde.log.values import Moment
from sonde.policy.stats.attribution import Causes, Share
from sonde.policy.stats.columns import PROMPT_NOISE as PROMPT_NOISE
from sonde.policy.stats.forecast_point import ComparedLoss, Per, Point, forecast_point
from sonde.policy.stats.token_positions import AtPositions
from sonde.probe import ReportSection
from sonde.stats.columns import Description
from sonde.stats.intervals import RatioInterval, Status, logged_interval
from sonde.wording import plural


@dataclass(frozen=True)
class ProbeSetup:
    """How one probe measured.

    Attributes:
        writes: the kind of record that it writes.
        unit: plural name of one independent sample, such as "sequences".
        setup: what was found and chosen: wrapper, ranks, groups in the model's order, budget, …
        metrics: unit and meaning of each metric that the probe writes.
        sections: of the report, as the probe declares them.
    """

    writes: str
    unit: str
    setup: Mapping[str, Any]
    metrics: Mapping[str, Description]
    sections: tuple[ReportSection, ...] = ()


@dataclass(frozen=True)
class Header:
    """One start of the run.

    Attributes:
        time: seconds since 1970.
        run: the run's name; may be empty.
        versions: version of each package.
        metadata: the user's own, any JSON.
        probes: how each probe of the log measured, at least one, in the order in which they began.
    """

    time: Moment
    run: str
    versions: Mapping[str, str]
    metadata: Mapping[str, Any]
    probes: tuple[ProbeSetup, ...]

    def probe(self, writes: str) -> ProbeSetup | None:
        """The probe of this start that writes this kind of record, "reading" or "policy"; None if there is none."""
        return next((probe for probe in self.probes if probe.writes == writes), None)

    @property
    def unit(self) -> str:
        """The unit of the probe that began first."""
        return self.probes[0].unit

    @property
    def setup(self) -> Mapping[str, Any]:
        """The set-up of the probe that began first."""
        return self.probes[0].setup

    @property
    def metrics(self) -> dict[str, Description]:
        """Unit and meaning of each metric that the probes of this start write."""
        return {name: metric for probe in self.probes for name, metric in probe.metrics.items()}


@dataclass(frozen=True)
class AnyReading:
    """Numbers that were measured at a point of the run.

    Attributes:
        segment: index into `Run.headers` of the start it belongs to.
        window: the optimizer step, as it was logged; of the noise scale, the number of windows so far.
        time: seconds since 1970.
        metrics: a number for each name, None where it is not known.
    """

    segment: int
    window: int
    time: Moment
    metrics: Mapping[str, float | None]


@dataclass(frozen=True)
class Reading(AnyReading):
    """One reading of the noise scale, with everything logged beside it.

    Attributes:
        status: how far B_simple is known, see `stats.intervals.RatioInterval`.
        reason: why B_simple is not resolved; empty when it is.
        advice: what would make B_simple known better; empty when it is known well.
        groups: the noise scale of each group of parameters by name, as it was last written: it may be of one of the
            nine readings before.
        groups_window: the window that `groups` are of; 0 if none were written.
        dropped: windows left out so far, by reason.
        alerts: what looked wrong since the reading before, a message by name.
        pieces: how a window was cut into pieces, such as pieces per window.
        optimizer_changed: whether the optimizers are of another kind than the set-up says, as where β is cycled.
    """

    status: Status
    reason: str
    advice: str
    groups: Mapping[str, GroupReading]
    groups_window: int
    dropped: Mapping[str, int]
    alerts: Mapping[str, str]
    pieces: Mapping[str, Any]
    optimizer_changed: bool = False

    @functools.cached_property
    def now(self) -> RatioInterval:
        """The noise scale now, as far as it is known."""
        return replace(logged_interval(self.metrics, NOISE_SCALE), reason=self.reason)

    @property
    def average(self) -> RatioInterval:
        """The noise scale of the run so far, as far as it is known."""
        return logged_interval(self.metrics, AVERAGE)

    @property
    def of_run(self) -> RatioInterval:
        """The noise scale that whole runs are compared by: their average. A checkpoint has no other than now."""
        return self.now if self.average.status == "unresolved" else self.average


@dataclass(frozen=True)
class PolicyReading(AnyReading):
    """The measurements of a policy around an optimizer step.

    Attributes:
        reason: why the forecast is unknown or not to be trusted; empty when it is.
        per: the unit of the forecast, "token" or "response".
        shares: evaluation prompts with their parts of the forecast.
        causes: where the change comes from; None if it was not asked for.
        alerts: a message for each check that failed, by its name.
        positions: quantiles of the tokens' entropies by their position in the response; empty if unknown.
    """

    reason: str
    per: Per
    shares: tuple[Share, ...]
    causes: Causes | None
    alerts: Mapping[str, str]
    positions: tuple[AtPositions, ...]

    @functools.cached_property
    def point(self) -> Point:
        """The forecast beside its truth."""
        return forecast_point(self.window, self.metrics, self.per, self.reason, self.segment)


@dataclass(frozen=True)
class ComparisonReading:
    """Several losses, compared on the same responses.

    Attributes:
        segment: index into `Run.headers` of the start it belongs to.
        window: the optimizer step, from 0 up, as it was passed to `PolicyLog.compared`.
        time: seconds since 1970.
        baseline: the loss that the others are compared with.
        per: the unit of the changes, "token" or "response".
        options: the losses, in the order in which they were passed.
    """

    segment: int
    window: int
    time: Moment
    baseline: str
    per: Per
    options: tuple[ComparedLoss, ...]


@dataclass(frozen=True)
class MetricsReading(AnyReading):
    """Metrics of a probe of the user's own."""


@dataclass(frozen=True)
class Alert:
    """Something that looked wrong for the first time in its start of the run.

    Attributes:
        segment: index into `Run.headers` of the start it belongs to.
        window: when.
        name: which check.
        message: what, in plain words.
    """

    segment: int
    window: int
    name: str
    message: str


@dataclass(frozen=True)
class Run:
    """Everything that a log holds of its last run.

    Attributes:
        path: the log file.
        headers: one per start of the run, at least one; a run that went on from a saved state has several.
        readings: of the noise scale, of all starts, in the order written.
        policy: readings of a policy, in the same order.
        own: metrics of the user's own probes, in the same order.
        alerts: of all starts, in the order written.
        ended: why the last start ended; None while it goes on, or if it was cut off.
        torn: which lines a crash cut off, in words; None if no line is torn.
        earlier_runs: runs in the same log that began before this one; nothing of them is in here.
        comparisons: of losses, of all starts, in the order written.
    """

    path: Path
    headers: tuple[Header, ...]
    readings: tuple[Reading, ...]
    policy: tuple[PolicyReading, ...]
    own: tuple[MetricsReading, ...]
    alerts: tuple[Alert, ...]
    ended: str | None
    torn: str | None
    earlier_runs: int = 0
    comparisons: tuple[ComparisonReading, ...] = ()

    @property
    def header(self) -> Header:
        """The header of the last start."""
        return self.headers[-1]

    def probe(self, writes: str) -> ProbeSetup:
        """How this kind of record was measured, by the last start that has it; the first probe of all if none has."""
        setups = [setup for header in reversed(self.headers) if (setup := header.probe(writes)) is not None]
        return setups[0] if setups else self.header.probes[0]

    @property
    def metrics(self) -> dict[str, Description]:
        """Unit and meaning of each metric that sonde wrote, of all starts."""
        return {name: metric for header in self.headers for name, metric in header.metrics.items()}

    @property
    def sections(self) -> tuple[ReportSection, ...]:
        """The sections of the report that probes declared, of all starts, each title once."""
        declared = [section for header in self.headers for probe in header.probes for section in probe.sections]
        return tuple({section.title: section for section in declared}.values())

    @property
    def measured(self) -> list[AnyReading]:
        """The readings of all kinds, one kind after another."""
        return [*self.readings, *self.policy, *self.own]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured yet."""
        return not self.measured and not self.comparisons

    @property
    def remarks(self) -> list[str]:
        """What to know of the log before its numbers: restarts, runs that were left out, torn lines."""
        restarts, earlier = len(self.headers) - 1, self.earlier_runs
        found = {
            f"restarted {plural(restarts, 'time')}": restarts,
            f"{plural(earlier, 'earlier run')} in the same folder left out": earlier,
            f"a crash damaged the log: {self.torn}": self.torn,
        }
        return [words for words, is_so in found.items() if is_so]

    @property
    def last(self) -> AnyReading | ComparisonReading:
        """The last reading of any kind, of a run that has one."""
        last = [of[-1] for of in (self.readings, self.policy, self.own, self.comparisons) if of]
        return max(last, key=lambda reading: reading.time)

    @property
    def alerts_now(self) -> dict[str, str]:
        """What looks wrong now, by the last reading of each kind that no restart undid: a message by name."""
        last: list[Reading | PolicyReading] = [*self.readings[-1:], *self.policy[-1:]]
        standing = (reading for reading in last if not self.was_undone(reading.segment, reading.window))
        return {name: message for reading in standing for name, message in reading.alerts.items()}

    def was_undone(self, segment: int, window: int) -> bool:
        """Whether a later start of the run began at or before a window of this start: it took that step again."""
        return any(first <= window for later, first in self._first_windows.items() if later > segment)

    @functools.cached_property
    def _first_windows(self) -> dict[int, int]:
        """The lowest window that each start wrote something of."""
        first: dict[int, int] = {}
        written: list[AnyReading | ComparisonReading | Alert] = [*self.measured, *self.comparisons, *self.alerts]
        for each in written:
            first[each.segment] = min(first.get(each.segment, each.window), each.window)
        return first

    @property
    def name(self) -> str:
        """The run's name; the name of its folder if the run was given none."""
        return self.header.run or self.path.resolve().parent.name

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """One metric over the run. Readings that do not know the metric are left out.

        Args:
            metric: its name, such as "gns/b_simple".

        Returns:
            Windows and values, of equal length; both empty for a metric that was never known.
        """
        known = [(r.window, value) for r in self.measured if (value := r.metrics.get(metric)) is not None]
        return [window for window, _ in known], [value for _, value in known]


def logged_batch(metrics: Mapping[str, float | None], unit: str) -> tuple[float | None, str]:
    """The batch size as the noise scale counts it, and the name of what it counts; see `as_weighed`."""
    batch = metrics.get(BATCH)
    return as_weighed(batch, metrics.get("gns/effective_units"), unit) if batch else (None, unit)


def own_value_names(run: Run, readings: Sequence[AnyReading]) -> list[str]:
    """The names of the metrics that the user logged, as far as a reading knows a value. Losses come first."""
    names_of_sonde = run.metrics.keys()
    known = {name: None for reading in readings for name, value in reading.metrics.items() if value is not None}
    return sorted((name for name in known if name not in names_of_sonde), key=lambda name: "loss" not in name.lower())
