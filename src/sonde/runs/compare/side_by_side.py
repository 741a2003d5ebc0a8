"""Several runs, read and brought into one unit and onto one axis."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from sonde.evidence.answer import capital
from sonde.runs.reader import find_records, read_run
from sonde.runs.run import AnyReading, Reading, Run, logged_batch, own_value_names
from sonde.stats.intervals import RatioInterval
from sonde.wording import shorten

By = Literal["units", "steps", "time"]
_LETTERS = "ABCDEFGHIJKLMNOPQRST"
_MOST_READINGS = 1000
"""Readings of each run that are compared, more than a figure has pixels. Of more, every second, third, … is."""

T = TypeVar("T")
Series = Sequence[tuple[float, T]]
"""Positions on an axis, rising, each with a value."""


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """One of several runs.

    Attributes:
        letter: A, B, C, … in the order in which they were given.
        run: with the readings that no restart undid.
        unit: the unit that all runs are counted in.
    """

    letter: str
    run: Run
    unit: str

    @property
    def name(self) -> str:
        """The letter with the run's name."""
        return f"{self.letter} ({shorten(self.run.name)})"

    @functools.cached_property
    def readings(self) -> Sequence[AnyReading]:
        """All readings; those of the noise scale, if there are any, come last."""
        return (*self.run.policy, *self.run.readings)

    @property
    def batch(self) -> float | None:
        """The batch size at the end, as the noise scale counts it."""
        batch, _ = logged_batch(self.readings[-1].metrics, self.unit)
        return batch and batch * self._factor(self.readings[-1])

    @property
    def metric(self) -> str:
        """The metric of a run's noise scale."""
        return str(self.run.probe("reading").setup.get("metric") or "euclidean").split(", ")[0]

    @property
    def noise_of_run(self) -> RatioInterval:
        """The noise scale averaged over the run, of a run that has one."""
        return self._in_unit(self.run.readings[-1].of_run, self.run.readings[-1])

    def noise(self, reading: AnyReading) -> RatioInterval | None:
        """The noise scale now; None of a reading of something else."""
        return self._in_unit(reading.now, reading) if isinstance(reading, Reading) else None

    def speed(self, reading: AnyReading) -> float | None:
        """Units per second."""
        speed = reading.metrics.get("run/units_per_second")
        return speed and speed * self._factor(reading)

    def _in_unit(self, known: RatioInterval, reading: Reading) -> RatioInterval:
        factor = self._factor(reading)
        low, high, ratio = (end and end * factor for end in (known.low, known.high, known.ratio))
        return replace(known, low=low, high=high, ratio=ratio)

    def _factor(self, reading: AnyReading) -> float:
        """Units of the common kind in one of the run's own, now; NaN where the log does not say."""
        if self.unit == self.run.probe("reading").unit:
            return 1.0
        own, common = (reading.metrics.get(f"gns/units_per_window{end}") for end in ("", f"_{self.unit}"))
        return common / own if own and common else math.nan

    @functools.cached_property
    def _units_seen(self) -> Mapping[int, float]:
        """Units of the common kind by the window until which they were seen.

        The log counts the run's own units. What was seen since the reading before is converted as it is now, since
        the length of sequences may change in a run.
        """
        found, own_before, seen = {}, 0.0, 0.0
        for reading in self.run.readings:
            own, factor = reading.metrics.get("run/units_seen"), self._factor(reading)
            if own is not None and factor > 0:
                seen += (own - own_before) * factor
                found[reading.window], own_before = seen, own
        return found

    def position(self, reading: AnyReading, by: By) -> float | None:
        """Where a reading lies on an axis; None where it is not known."""
        if by == "units":
            return self._units_seen.get(reading.window) if isinstance(reading, Reading) else None
        if by == "steps":
            return float(reading.window)
        return self._seconds_before[reading.segment] + reading.time - self.run.headers[reading.segment].time

    @functools.cached_property
    def _seconds_before(self) -> Sequence[float]:
        """Seconds of training before each start: the time between the end of a start and the next does not count."""
        last = {r.segment: r.time for r in sorted(self.readings, key=lambda r: r.time)}
        spans = [last.get(k, header.time) - header.time for k, header in enumerate(self.run.headers)]
        return list(itertools.accumulate(spans, initial=0.0))

    @functools.lru_cache(maxsize=1000)  # noqa: B019 – each run is put beside another one many times
    def series(self, value: Callable[[ComparedRun, AnyReading], T | None], by: By) -> Series[T]:
        """A value over the run, where it is known."""
        found: list[tuple[float, T]] = []
        for reading in self.readings:
            at, known = self.position(reading, by), value(self, reading)
            if at is not None and known is not None and at > (found[-1][0] if found else 0.0):
                found.append((at, known))
        return found


@dataclass(frozen=True)
class Comparison:
    """Runs that are compared. The others stand beside the first one.

    Attributes:
        runs: two or more.
        by: the axis of figures and sentences.
        notices: what is wrong with a log, or makes runs compare badly: a sentence each.
    """

    runs: tuple[ComparedRun, ...]
    by: By
    notices: tuple[str, ...]

    @property
    def unit(self) -> str:
        """The unit that all runs are counted in."""
        return self.runs[0].unit

    @property
    def values(self) -> list[str]:
        """The names of what two or more runs have logged by themselves: held-out losses first, then other losses."""
        names = [name for each in self.runs for name in own_value_names(each.run, each.readings)]
        shared = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        return sorted(shared, key=lambda name: ("loss" not in name.lower(), not name.startswith(("eval", "val"))))


def read_runs(paths: Sequence[str | Path], *, by: By = "units") -> Comparison:
    """Read the logs of several runs, and say what makes them compare badly.

    Args:
        paths: the folder of each run, or its `.jsonl` file. A log that cannot be read is left out with a notice.
        by: what brings the runs together: "units" seen, "steps" or "time". Where not every run has its units, steps do.

    Raises:
        ValueError: when there are more than 20, fewer than two that can be compared, they count different units, or
            they have measured nothing in common.
    """
    if len(paths) > len(_LETTERS):
        raise ValueError(f"up to {len(_LETTERS)} runs are compared, got {len(paths)}: choose those that matter")
    notices: list[str] = []
    runs = list(_readable(paths, notices))
    if len(runs) < 2:
        why = "".join(f"; {notice}" for notice in notices)
        raise ValueError(f"a comparison needs two runs with readings or more, got {len(runs)}{why}")
    unit = _common_unit(runs)
    compared = tuple(ComparedRun(letter, run, unit) for letter, run in zip(_LETTERS, runs, strict=False))
    if by == "units" and not all(run.series(lambda *_: True, "units") for run in compared if run.run.readings):
        by, notices = "steps", [*notices, f"a run did not log the {unit} that it has seen: runs are compared by steps"]
    found = Comparison(compared, by, tuple(map(capital, [*notices, *_notices(compared)])))
    if not found.values and max(sum(bool(run.readings) for run in runs), sum(bool(run.policy) for run in runs)) < 2:
        raise ValueError("these runs have measured nothing in common: give runs that have a noise scale, or an entropy")
    return found


def _readable(paths: Sequence[str | Path], notices: list[str]) -> Iterator[Run]:
    seen: set[Path] = set()
    for path in map(Path, paths):
        try:
            file = find_records(path)
            if file.resolve() in seen:
                raise ValueError(f"{path} was given twice")
            seen.add(file.resolve())
            run = read_run(file)
            if not run.readings and not run.policy:
                raise ValueError(f"{path} holds no reading yet")
            yield _thinned(run)
        except (ValueError, OSError) as error:
            notices.append(f"left out: {error}")


def _thinned(run: Run) -> Run:
    """The readings that no restart undid; of many, some: 20 long runs do not fill the memory."""

    def kept(readings: Sequence[Any]) -> tuple[Any, ...]:
        standing = [r for r in readings if not run.was_undone(r.segment, r.window)]
        return tuple(standing[::-1][:: max(-(-len(standing) // _MOST_READINGS), 1)][::-1])

    return replace(run, readings=kept(run.readings), policy=kept(run.policy), own=(), comparisons=())


def _common_unit(runs: Sequence[Run]) -> str:
    """The first unit that all runs count in.

    Raises:
        ValueError: when there is none.
    """
    probes = [run.probe("reading") for run in runs if run.readings] or [run.probe("policy") for run in runs]
    offered: list[tuple[str, ...]] = [(probe.unit, *(probe.setup.get("further_units") or ())) for probe in probes]
    for unit in offered[0]:
        if all(unit in others for others in offered):
            return unit
    units = " and ".join(dict.fromkeys(str(names[0]) for names in offered))
    raise ValueError(
        f"these runs count different units, {units}: log both in each, as by attach(unit=('sequences', 'tokens'))"
    )


def _notices(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """What each log lacks, and what makes noise scales incomparable."""
    for each in runs:
        yield from (f"{each.name}: {remark}" for remark in each.run.remarks)
    measured = [run for run in runs if run.run.readings]
    if len({run.metric for run in measured}) > 1:
        metrics = ", ".join(f"{run.letter}: {run.metric}" for run in measured)
        yield f"noise scales in different metrics ({metrics}) are not compared"
    pieces = {(run.batch or 0.0) / (run.run.readings[-1].pieces.get("per_window") or 1) for run in measured}
    if any(run.run.probe("reading").setup.get("batch_norms") for run in measured) and len(pieces) > 1:
        yield "with batch normalisation, B_simple depends on the size of the pieces, which differs between these runs"
