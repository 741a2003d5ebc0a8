"""Several runs, read and brought into one unit and onto one axis."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sonde.decision.facts import Reached
from sonde.runs.compare.stats.at_equal import Difference, Points, difference, level_at, reached
from sonde.runs.losses import is_held_out, losses_first
from sonde.runs.names import names_apart, shorten_apart
from sonde.runs.reader import find_records, read_run
from sonde.runs.run import AnyReading, PolicyReading, Run, logged_batch, own_value_names
from sonde.wording import capital, count

By = Literal["units", "steps", "time"]
AXES: tuple[By, ...] = ("units", "steps", "time")
_LETTERS = "ABCDEFGHIJKLMNOPQRST"
_MOST_READINGS = 1000
"""Readings of each run that are compared, more than a figure has pixels. Of more, neighbours are joined."""
_LONGEST = 28
"""Characters of a run's label beside a curve."""
_MOST_VALUES = 4
"""Values of the user's own that are compared."""
_FEWEST = 2
"""Readings of a run, and values of its loss, between which there is something to interpolate."""
_MEAN_SINCE_LAST = ("transformers", "TRL")
"""Trainers whose loss is the mean of all steps since they logged it last, which may be many readings ago."""


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """One of several runs.

    Attributes:
        letter: A, B, C, … in the order in which they were given.
        label: the run's name, or what tells it from others of that name.
        run: with the readings that no restart undid.
    """

    letter: str
    label: str
    run: Run

    @property
    def name(self) -> str:
        """The letter with the run's name."""
        return f"{self.letter} ({self.label})"

    @functools.cached_property
    def readings(self) -> Sequence[AnyReading]:
        """All readings; those of the noise scale, if there are any, come last."""
        return (*self.run.policy, *self.run.readings)

    @property
    def unit(self) -> str:
        """What the run counts."""
        return self.run.probe("reading" if self.run.readings else "policy").unit

    @property
    def batch(self) -> float | None:
        """The batch size at the end, as the noise scale counts it."""
        return logged_batch(self.readings[-1].metrics, self.unit)[0]

    def position(self, reading: AnyReading, by: By) -> float | None:
        """Where a reading lies on an axis; None where it is not known."""
        if by == "units":
            return reading.metrics.get("run/units_seen")
        if by == "steps":
            return float(reading.window)
        return self._seconds[id(reading)]

    @functools.cached_property
    def _seconds(self) -> Mapping[int, float]:
        """Seconds of training until each reading. What lies between two starts does not count, nor does measuring."""
        found, seconds, window = dict[int, float](), 0.0, 0
        until = [header.time for header in self.run.headers]
        for reading in sorted(self.readings, key=lambda r: (r.segment, r.time)):
            seconds += reading.time - until[reading.segment]
            until[reading.segment] = reading.time
            if (measuring := reading.metrics.get("cost/seconds_per_window")) is not None:
                seconds -= measuring * max(reading.window - window, 0)
                window = reading.window
            found[id(reading)] = seconds
        return found

    def placed(self, by: By) -> list[tuple[float, AnyReading]]:
        """The readings whose place on an axis is known and lies beyond those before, each with its place."""
        found: list[tuple[float, AnyReading]] = []
        for reading in self.readings:
            at = self.position(reading, by)
            if at is not None and at > (found[-1][0] if found else 0.0):
                found.append((at, reading))
        return found

    @functools.lru_cache(maxsize=1000)  # noqa: B019 – each run is put beside another one many times
    def curve(self, name: str, by: By) -> Points:
        """A value of the user's own, or the entropy, each at the place that it belongs to.

        A value in a reading is the mean since the reading before, so it belongs to the middle between the two. A
        held-out loss was evaluated somewhere between them: its place is right to half of that.
        """
        readings, points = self.placed(by), []
        goes_on = self.run.probe("reading").setup.get("trainer") in _MEAN_SINCE_LAST and not is_held_out(name)
        # The first reading's stretch is taken to be as long as the next one: a log may begin in the middle of a run.
        since = max(2 * readings[0][0] - readings[1][0], 0.0) if len(readings) > 1 else 0.0
        for at, reading in readings:
            if (value := value_of(name, reading)) is not None:
                points.append((at if isinstance(reading, PolicyReading) else (since + at) / 2, value))
            if value is not None or not goes_on:
                since = at
        return points


def value_of(name: str, reading: AnyReading) -> float | None:
    """A value of the user's own, or the entropy, in a reading; None where it is not known."""
    if name == ENTROPY:
        return reading.point.entropy if isinstance(reading, PolicyReading) else None
    return reading.metrics.get(name)


ENTROPY = "entropy"
"""Of a policy, before a step: it is compared like a loss."""


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

    @functools.cached_property
    def values(self) -> list[str]:
        """What is compared: values that two or more runs logged, held-out losses first, then losses; the entropy."""
        names = {name: None for each in self.runs for name in own_value_names(each.run, each.readings)}
        shared = [name for name in names if sum(len(run.curve(name, "steps")) >= _FEWEST for run in self.runs) > 1]
        return [*losses_first(shared)[:_MOST_VALUES], *[ENTROPY] * (sum(bool(run.run.policy) for run in self.runs) > 1)]

    @property
    def loss(self) -> str | None:
        """The loss that says how far a run has come."""
        return next((name for name in self.values if "loss" in name.lower()), None)

    def beside(self, run: ComparedRun, other: ComparedRun, name: str, by: By) -> Difference | None:
        """A value of a run minus that of another one at the last place that both have reached."""
        return difference(run.curve(name, by), other.curve(name, by))

    @functools.cached_property
    def common_loss(self) -> float | None:
        """The lowest loss that every run with two or more has reached."""
        if self.loss is None:
            return None
        curves = [run.curve(self.loss, "steps") for run in self.runs]
        return max(level_at(curve, curve[-1][0]).value for curve in curves if len(curve) >= _FEWEST)

    def to_common_loss(self, run: ComparedRun) -> Reached | None:
        """What a run took to come down to that loss; None where its curve begins below it, or its units are unknown."""
        curves = [run.curve(self.loss or "", by) for by in ("steps", "units", "time")]
        if self.common_loss is None or len(curves[0]) < _FEWEST:
            return None
        steps, units, seconds = (reached(of, self.common_loss) if of else None for of in curves)
        if steps is None or units is None:
            return None
        return Reached(self.common_loss, steps, units, seconds)


def reached_by(runs: Sequence[Run]) -> list[Reached | None]:
    """What each run took to come down to the lowest loss that all have reached."""
    found = Comparison(tuple(ComparedRun(run.name, run.name, thinned(run)) for run in runs), "steps", ())
    return [found.to_common_loss(run) for run in found.runs]


def read_runs(paths: Sequence[str | Path], *, by: By = "units", any_model: bool = False) -> Comparison:
    """Read the logs of several runs, and say what makes them compare badly.

    Args:
        paths: the folder of each run, or its `.jsonl` file. A log that cannot be read is left out with a notice.
        by: what brings the runs together: "units" seen, "steps" or "time". Where not every run has its units, steps do.
        any_model: whether runs of different models may be compared.

    Raises:
        ValueError: when there are more than 20, fewer than two that can be compared, they count different units, are of
            different models, or have logged one value of their loss.
    """
    if len(paths) > len(_LETTERS):
        raise ValueError(f"up to {len(_LETTERS)} runs are compared, got {len(paths)}: choose those that matter")
    notices: list[str] = []
    runs = list(_readable(paths, notices))
    if len(runs) < 2:
        why = "".join(f"; {notice}" for notice in notices)
        raise ValueError(f"a comparison needs two runs with readings or more, got {len(runs)}{why}")
    labels = shorten_apart(names_apart(runs), _LONGEST)
    compared = tuple(ComparedRun(*each) for each in zip(_LETTERS, labels, runs, strict=False))
    _check_alike(compared, any_model=any_model)
    if by == "units" and not all(run.placed("units") for run in compared if run.run.readings):
        by, notices = "steps", [*notices, "a run did not log the units that it has seen: runs are compared by steps"]
    found = Comparison(compared, by, ())
    _check_common(found)
    return replace(found, notices=tuple(map(capital, [*notices, *_notices(found)])))


def _readable(paths: Sequence[str | Path], notices: list[str]) -> Iterator[Run]:
    seen: set[Path] = set()
    for path in map(Path, paths):
        try:
            file = find_records(path)
            if file.resolve() in seen:
                raise ValueError(f"{path} was given twice")
            seen.add(file.resolve())
            run = read_run(file)
            n = max(len(run.readings), len(run.policy))
            if n < _FEWEST:
                raise ValueError(f"{path} holds {'one' if n else 'no'} reading yet: train on, until it holds two")
            yield thinned(run)
        except (ValueError, OSError) as error:
            notices.append(f"left out: {error}")


def thinned(run: Run) -> Run:
    """The readings that no restart undid; of many, some: 20 long runs do not fill the memory."""
    names = own_value_names(run, [*run.readings[-_MOST_READINGS:], *run.policy[-_MOST_READINGS:]])

    def kept(readings: Sequence[Any]) -> tuple[Any, ...]:
        standing = [r for r in readings if not run.was_undone(r.segment, r.window)]
        n = max(-(-len(standing) // _MOST_READINGS), 1)
        ends = range(len(standing), 0, -n)
        return tuple(_joined(standing[max(end - n, 0) : end], names) for end in ends)[::-1]

    return replace(run, readings=kept(run.readings), policy=kept(run.policy), own=(), comparisons=())


def _joined(readings: Sequence[Any], names: Iterable[str]) -> Any:
    """The last of several readings, with the means of the user's own values."""
    if len(readings) == 1:
        return readings[0]
    means: dict[str, float] = {}
    for name in names:
        if known := [value for r in readings if (value := r.metrics.get(name)) is not None]:
            means[name] = statistics.fmean(known)
    return replace(readings[-1], metrics={**readings[-1].metrics, **means})


def _check_alike(runs: Sequence[ComparedRun], *, any_model: bool) -> None:
    """Refuse runs that count different things, or trained models of different sizes: all that a log says of a model.

    Raises:
        ValueError: for such runs.
    """
    units = {each.letter: each.unit for each in runs}
    if len(set(units.values())) > 1:
        which = ", ".join(f"{letter}: {unit}" for letter, unit in units.items())
        raise ValueError(f"these runs count different units ({which}): log all in one, by unit= of sonde.attach")
    sizes = {each.letter: size for each in runs if (size := each.run.header.setup.get("parameters"))}
    if len(set(sizes.values())) > 1 and not any_model:
        which = ", ".join(f"{letter}: {count(size)}" for letter, size in sizes.items())
        raise ValueError(
            f"these runs trained models of different sizes ({which} parameters), and a batch that is right for one "
            "is no advice for another: compare runs of one model, or pass --any-model"
        )


def _check_common(found: Comparison) -> None:
    """Refuse runs that have logged one value of their loss."""
    logged = [name for each in found.runs for name in own_value_names(each.run, each.readings)]
    if not found.values and (twice := [name for name in logged if logged.count(name) > 1]):
        raise ValueError(
            f"{twice[0]} is compared between two evaluations or more of each run, and these runs have fewer: train on, "
            "or log it more often"
        )


def _notices(found: Comparison) -> Iterator[str]:
    """What each log lacks."""
    for each in found.runs:
        yield from (f"{each.name}: {remark}" for remark in each.run.remarks)
    if not found.loss:
        yield "no loss is compared: log one in two runs or more, by probe.log(loss=loss)"
