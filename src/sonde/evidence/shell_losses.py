"""The losses of a branch: from its sonde log, or from what it prints. Noise scales beside them come from the log."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sonde.evidence.branches import Proxy
from sonde.evidence.stats.loss_curves import Curve
from sonde.log.lines import last_run, lines_of, parse_record
from sonde.log.sinks import RECORDS_NAME
from sonde.wording import number

STDOUT, STDERR = "stdout.txt", "stderr.txt"
"""Files in a branch's folder with what it has printed."""
STATUS = "status"
"""File that appears in a branch's folder when it has ended, with its exit status."""
_SAME = 0.01
"""Part of the progress by which the checkpoint's own loss may differ from branch to branch: rounding."""
_WANTED = tuple(f'{{"kind":"{kind}"'.encode() for kind in ("header", "metrics", "reading"))
_METRIC = re.compile(r"gns/(?:(\w+)/)?(\w+)")
_OF_TRAINING = {"b_simple": "B_simple, now", "b_simple_average": "B_simple, average"}
_OF_MEASUREMENT = {"b_simple": "B_simple"}
"""Noise scales by the names of their metrics, in the log of a training and in that of `sonde.measure`."""


@dataclass(frozen=True)
class LossSource:
    """Where losses come from.

    Attributes:
        name: of the loss that the script gives to `probe.log`.
        pattern: regular expression for what it prints, with the groups "loss" and "step" or "units"; None for the log.
        first_step: number of the checkpoint's step, if what the script prints counts on from there; None if it begins
            anew, or prints the checkpoint's own loss first.
    """

    name: str = "eval_loss"
    pattern: str | None = None
    first_step: int | None = None

    def __post_init__(self) -> None:
        if self.pattern is None:
            return
        try:
            groups = re.compile(self.pattern).groupindex
        except re.error as error:
            raise ValueError(f"--loss-regex is no regular expression: {error}, got {self.pattern!r}") from None
        if "loss" not in groups or not {"step", "units"} & set(groups):
            raise ValueError(
                f"--loss-regex needs the groups (?P<loss>…) and (?P<step>…) or (?P<units>…), got {self.pattern!r}: for "
                r"'step 20: val loss 1.5', pass 'step (?P<step>\d+): val loss (?P<loss>\S+)'"
            )


@dataclass(frozen=True)
class Losses:
    """What a branch has shown so far.

    Attributes:
        curve: of its losses.
        trained_batch: units of one step as its log has them, or what it prints; None where that is not known.
        problem: why there are no losses, and what to do; empty if there are.
        counts_on: whether the first printed loss was taken as the checkpoint's own, since its step is no first one.
        settings: of the optimizer's groups as its log has them, by placeholder.
    """

    curve: Curve
    trained_batch: float | None = None
    problem: str = ""
    counts_on: bool = False
    settings: Mapping[str, Sequence[float]] = field(default_factory=dict)


def read_losses(folder: Path, batch: float, source: LossSource) -> Losses:
    """The losses in a branch's folder, by units since the branch's own start.

    Args:
        folder: of the branch; it may be running.
        batch: that it was asked for; used where the log does not know its batch.
        source: of the losses.
    """
    logs = _logs(folder)
    trained = next((value for log in logs if (value := _last(log, "gns/units_per_window")) is not None), None)
    if source.pattern is not None:
        return replace(_printed(folder / STDOUT, source, trained, batch), settings=_settings(logs))
    for log in logs:
        own = [record for record in log if record["kind"] == "metrics" and source.name in record["metrics"]]
        if own:
            per_step = trained or batch
            curve = _curve((r["window"] * per_step, r["metrics"][source.name]) for r in own)
            return Losses(curve, trained, settings=_settings(logs))
    return Losses(Curve((), ()), trained, _why_none(logs, source.name))


def _settings(logs: Iterable[Iterable[Mapping[str, Any]]]) -> dict[str, list[float]]:
    headers = [record for log in logs for record in log if record["kind"] == "header"]
    found: dict[str, list[float]] = {}
    for group in (group for header in headers for group in header["setup"].get("optimizer_settings") or ()):
        betas = dict(zip(("beta1", "beta2"), group.get("betas") or (), strict=False))
        for name, value in (group | betas).items():
            if isinstance(value, float):
                found.setdefault(name, []).append(value)
    return found


def _printed(file: Path, source: LossSource, trained: float | None, batch: float) -> Losses:
    assert source.pattern is not None
    has_ended = file.with_name(STATUS).exists()
    text = file.read_text(errors="replace") if file.exists() else ""
    if not has_ended:
        text = text[: text.rfind("\n") + 1]  # the last line may be half written
    matches = (each.groupdict() for each in re.finditer(source.pattern, text))
    found = [each for each in matches if all(each.get(name, "") is not None for name in ("loss", "step", "units"))]
    if not found:
        errors = file.with_name(STDERR)
        if errors.exists() and re.search(source.pattern, errors.read_text(errors="replace")):
            problem = "it prints its losses to stderr: print them to stdout, or run sh -c 'python train.py … 2>&1'"
            return Losses(Curve((), ()), problem=problem)
        return Losses(Curve((), ()), problem=f"nothing that it printed matches --loss-regex: see {file}")
    try:
        losses = [float(each["loss"]) for each in found]
        steps, units = ([float(each[name]) for each in found if name in each] for name in ("step", "units"))
    except ValueError as error:
        return Losses(Curve((), ()), problem=f"--loss-regex matches what is no number ({error}): see {file}")
    if units and steps and steps[-1] > steps[0]:
        trained = trained or (units[-1] - units[0]) / (steps[-1] - steps[0])
    per_step = trained or batch
    places = units or [step * per_step for step in steps]
    counts_on = source.first_step is None and len(places) > 1 and places[0] > places[1] - places[0]
    is_alone = source.first_step is None and len(places) == 1  # it may count on: then its place is far beyond the end
    start = places[0] if counts_on or is_alone else (source.first_step or 0) * per_step
    return Losses(_curve(zip((place - start for place in places), losses, strict=True)), trained, counts_on=counts_on)


def check_starts(seen: Sequence[Losses]) -> None:
    """Check that a first loss which was taken as the checkpoint's own is that of all runs.

    Args:
        seen: losses of runs from one checkpoint. Of the others, the first loss alone is looked at: they may have been
            ended after it.

    Raises:
        ValueError: if they differ, so that printed steps are no steps since the checkpoint.
    """
    firsts = [each.curve.losses[0] for each in seen if each.curve.losses]
    low, high = min(firsts, default=0.0), max(firsts, default=0.0)
    if seen[0].counts_on and high - low > _SAME * max(seen[0].curve.progress, 0.0):
        raise ValueError(
            f"the printed steps count on from the checkpoint, but the first printed losses ({number(low, 4)} to "
            f"{number(high, 4)}) differ, so they are not the checkpoint's own: pass its step as --first-step. If they "
            "are, the held-out data are others each time: evaluate on the same"
        )


def _curve(points: Iterable[tuple[float, float | None]]) -> Curve:
    """Of points in any order; a later loss at the same place counts."""
    by_units = {units: math.nan if loss is None else loss for units, loss in points if units >= 0}
    rising = sorted(by_units.items())
    return Curve(tuple(units for units, _ in rising), tuple(loss for _, loss in rising))


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """Records of a log's last run that hold numbers, and its headers; none of a file that has hardly begun."""
    try:
        skipped = last_run(file, advice="").lines_before
        for number, line in enumerate(lines_of(file, advice="")):
            if number >= skipped and line.startswith(_WANTED) and (record := parse_record(line)) is not None:
                yield record
    except (ValueError, OSError):
        return


def _logs(folder: Path) -> list[list[dict[str, Any]]]:
    return [list(_records(file)) for file in sorted(folder.rglob(RECORDS_NAME))]


def _last(log: Iterable[Mapping[str, Any]], metric: str) -> float | None:
    known = [value for record in log if (value := record.get("metrics", {}).get(metric)) is not None]
    return float(known[-1]) if known and isinstance(known[-1], int | float) else None


def _why_none(logs: Sequence[Sequence[Mapping[str, Any]]], name: str) -> str:
    if not any(logs):
        return (
            f"it has no sonde log: call sonde.attach and probe.log({name}=…) in the script, or pass --loss-regex for "
            "what it prints"
        )
    names = {key for log in logs for record in log if record["kind"] != "header" for key in record["metrics"]}
    own = sorted(key for key in names if "/" not in key)
    there = f"it has {', '.join(own)}" if own else "it has no metric of yours"
    return f"its log has no {name!r}: {there}; call probe.log({name}=…) at each evaluation, or name another by --loss"


def unit_of(folders: Sequence[Path]) -> str:
    """The plural name of the unit in the first log of some branches; empty without a log."""
    records = (record for folder in folders for log in _logs(folder) for record in log)
    return next((str(record["unit"]) for record in records if record["kind"] == "header"), "")


def noise_scales(folders: Sequence[Path]) -> list[Proxy]:
    """What the logs in some folders say at their ends: B_simple in each metric, now and on average.

    Over logs, estimates and ends of intervals are averaged in their logarithms. The interval is not made narrower by
    their number, so it is rather too wide.
    """
    found: dict[tuple[str, str], list[tuple[float | None, float | None, float | None]]] = {}
    for log in (log for folder in folders for log in _logs(folder)):
        setup: dict[str, Any] = next((record["setup"] for record in log if record["kind"] == "header"), {})
        names = _OF_MEASUREMENT if setup.get("fixed_weights") else _OF_TRAINING
        headline = str(setup.get("metric", "")).split(", ")[0]
        numbers = (record["metrics"] for record in log if record["kind"] != "header")
        last = {key: value for metrics in numbers for key, value in metrics.items()}
        for key, value in last.items():
            match = _METRIC.fullmatch(key)
            if match and match[2] in names:
                metric = match[1] or headline
                ends = (value, *(last.get("_".join((key, end))) for end in ("low", "high")))
                found.setdefault((names[match[2]], metric), []).append(ends)
    proxies = [_proxy(name, metric, values) for (name, metric), values in found.items()]
    return [proxy for proxy in proxies if proxy is not None]


def _proxy(name: str, metric: str, values: Sequence[tuple[float | None, float | None, float | None]]) -> Proxy | None:
    middle, low, high = (_mean_of_logs([each[k] for each in values]) for k in range(3))
    if low is None and high is None:
        return None
    return Proxy(name, metric, low or 0.0, high, middle if low and high else None)


def _mean_of_logs(values: Sequence[float | None]) -> float | None:
    """The geometric mean; None unless all are known and positive."""
    logs = [math.log(value) for value in values if value]
    return math.exp(sum(logs) / len(logs)) if logs and len(logs) == len(values) else None
