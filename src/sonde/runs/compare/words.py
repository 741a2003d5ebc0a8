"""What several runs show together, in words: the same sentences and rows for the terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sonde.batch_size.stats.critical_batch import ABOUT_RIGHT, relative_steps
from sonde.evidence.answer import Row, in_words
from sonde.runs.compare.beside import Quantity, entropy, noise_at_equal_loss, noise_beside, quantities
from sonde.runs.compare.side_by_side import By, ComparedRun, Comparison
from sonde.runs.compare.stats.differences import ratio_between, side_of_1
from sonde.runs.report.verdicts import Tile, VerdictPanel, batch_size_panel, entropy_panel
from sonde.stats.intervals import RatioInterval
from sonde.wording import count, duration, interval, number, shorten

_ALIKE = 1.01
"""Batches within this factor are the same."""
_AS_LONG = 1.1
"""Runs within this factor are as long as each other: their averages can be compared."""
_AXES: tuple[By, ...] = ("units", "steps", "time")
_OF_NO_USE = ("start", "groups", "log_every")
"""Settings that are left out: `sonde run` writes another start for each run, and the others do not change training."""


def summary(found: Comparison) -> VerdictPanel:
    """What the runs show together, and what to do next."""
    measured = [run for run in found.runs if run.run.readings]
    by_batch = sorted((run for run in measured if run.batch), key=lambda run: run.batch or 0.0)
    said = sentences(found)
    if by_batch and (by_batch[-1].batch or 0.0) > _ALIKE * (by_batch[0].batch or 0.0):
        said = list(_largest_beside_smallest(found, by_batch[0], by_batch[-1]))
    first, *others = said or ["The runs cannot be compared yet: they have too little in common."]
    basis = f"{len(found.runs)} runs, A first. Intervals hold at 95 % for these very runs: another seed is not in them."
    tiles = tuple(_tile(run) for run in measured)
    action, why = _batch_action(by_batch) if measured else _entropy_action(found.runs)
    return VerdictPanel("measured", "Compared", action, first, " ".join([*others[:4], why]), basis, tiles)


def _tile(run: ComparedRun) -> Tile:
    of, batch = run.noise_of_run, "" if run.batch is None else f", batch {number(run.batch)}"
    value = number(of.ratio) if of.ratio else "–"
    return Tile(f"Noise scale of {run.letter}{batch}", value, f"{interval(of.low, of.high)} {run.unit}")


def _batch_action(by_batch: Sequence[ComparedRun]) -> tuple[str, str]:
    """What the run with the largest batch says of the next one."""
    if not by_batch:
        return "Train on: no batch can be advised.", "No run has a verdict on its batch yet."
    run = by_batch[-1]
    return batch_size_panel(run.run).action, f"sonde advise {run.run.path.parent} has all costs of it."


def _entropy_action(runs: Sequence[ComparedRun]) -> tuple[str, str]:
    """What to do about the policy that has the least entropy, and which policy that is."""
    known = [(entropies[-1][1], run) for run in runs if (entropies := run.series(entropy, "steps"))]
    if not known:
        return "Measure on: nothing can be advised yet.", "No entropy is known."
    least, run = min(known, key=lambda each: each[0])
    return entropy_panel(run.run).action, f"{run.letter} has the least entropy, {number(least)} nats a token."


def _largest_beside_smallest(found: Comparison, small: ComparedRun, large: ComparedRun) -> Iterator[str]:
    """Does the noise scale depend on the batch, what does it promise, and what did the batch do to the loss?"""
    loss = next((each for each in quantities(found) if "loss" in each.name.lower()), None)
    sizes = [number(run.batch) for run in (large, small)]
    known = [(where, of) for where, of in _noise_by_batch(found, loss, small, large) if of and of.low is not None]
    for where, ratio in sorted(known, key=lambda each: each[1].ratio is None)[:1]:  # bounds come last
        rest = "These runs do not tell whether it depends on the batch."
        if side_of_1(ratio):
            rest = "It depends on the batch here: measure it again at the next batch."
        elif ratio.ratio and (ratio.low or 0.0) > 1 / ABOUT_RIGHT and (ratio.high or math.inf) < ABOUT_RIGHT:
            rest = f"If it depends on the batch, then by less than {number(ABOUT_RIGHT)} times."
        yield f"{where}, the noise scale at batch {sizes[0]} is {in_words(ratio)} times that at {sizes[1]}. {rest}"
        if (noise := large.noise_of_run.ratio) and large.batch and small.batch:
            steps = relative_steps(large.batch, small.batch, noise)
            units = f"{number(steps * large.batch / small.batch)} times the {found.unit} of {small.letter}"
            yield f"By its noise scale, {large.letter} needs {number(steps)} times the steps and {units}."
    for by in ("units", "steps"):
        if loss is not None and (of := loss.beside(large, small, by)) is not None:
            yield f"At equal {_noun(by, found.unit)}, {large.letter}'s {loss.name} minus {small.letter}'s is {of}."
            if by == "units" and of.low > 0:
                yield "A learning rate that follows the batch may make up for part of it."


def _noise_by_batch(
    found: Comparison, loss: Quantity | None, small: ComparedRun, large: ComparedRun
) -> Iterator[tuple[str, RatioInterval | None]]:
    """The ratio of two noise scales at equal progress, in several ways, the best one first."""
    if loss is not None:
        yield "At equal loss", noise_at_equal_loss(loss, large, small)
    ends = [run.position(run.readings[-1], "units") or 0.0 for run in (small, large)]
    if max(ends) < _AS_LONG * min(ends) and small.metric == large.metric:
        yield "Over whole runs", ratio_between(large.noise_of_run, small.noise_of_run)
    beside = noise_beside(large, small, found.by)
    yield f"At equal {_noun(found.by, found.unit)}", None if beside is None else beside.ratio


def sentences(found: Comparison) -> list[str]:
    """The noise scale, the first loss and the entropy of every run beside the first one."""
    first, *others = found.runs
    said = []
    for run in others:
        if (noise := noise_beside(run, first, found.by)) is not None and noise.ratio.low is not None:
            beside = f"{run.letter}'s noise scale is {in_words(noise.ratio)} times {first.letter}'s"
            if noise.since is None:
                said.append(f"{beside} at {_place(found, noise.at)}, which cannot be distinguished from 1.")
            else:
                said.append(f"{beside} from {_place(found, noise.since)} on.")
        for each in quantities(found):
            of = None if each.is_ratio else each.beside(run, first, found.by) or each.beside(run, first, "steps")
            if of is not None:
                said.append(f"{run.letter}'s {shorten(each.name)} minus {first.letter}'s is {of}.")
    return said


def _noun(by: By, unit: str) -> str:
    return unit if by == "units" else by


def _place(found: Comparison, at: float) -> str:
    """A position on the axis, in words."""
    if found.by == "time":
        return duration(at)
    return f"step {count(at)}" if found.by == "steps" else f"{number(at)} {found.unit}"


# Rows of tables. The first is the head.


def run_rows(found: Comparison) -> Iterator[Row]:
    """Each run by itself."""
    yield "run", "verdict", "batch", "steps", found.unit, "time", "measuring", "noise scale now", "over the run"
    for each in found.runs:
        run, last = each.run, each.readings[-1]
        seen, cost, now = each.position(last, "units"), last.metrics.get("cost/share"), each.noise(last)
        cells = ["–" if value is None else number(value) for value in (each.batch, last.window, seen)]
        cells += [duration(last.time - run.headers[0].time), "–" if cost is None else f"{number(100 * cost, 2)} %"]
        cells += ["–", "–"] if now is None else [in_words(now), in_words(each.noise_of_run)]
        verdict = batch_size_panel(run) if run.readings else entropy_panel(run)
        yield each.name, verdict.badge, *cells


def beside_rows(found: Comparison) -> Iterator[Row]:
    """Every other run beside the first, at equal units, steps and time."""
    yield "", "", *(f"at equal {_noun(by, found.unit)}" for by in _AXES)
    first, *others = found.runs
    for run in others:
        if any(noises := [noise_beside(run, first, by) for by in _AXES]):
            yield run.letter, "noise scale", *("–" if of is None else f"{in_words(of.ratio)} ×" for of in noises)
    for each in quantities(found):
        times = " ×" if each.is_ratio else ""
        for run in others:
            if any(cells := [each.beside(run, first, by) for by in _AXES]):
                yield run.letter, shorten(each.name), *("–" if of is None else f"{of}{times}" for of in cells)


def setting_rows(found: Comparison) -> Iterator[Row]:
    """Each setting in the headers that is not the same in all runs, with its values."""
    yield "setting", "values"
    settings = [dict(_settings(run)) for run in found.runs]
    for name in dict.fromkeys(name for each in settings for name in each):
        values: dict[str, list[str]] = {}
        for run, each in zip(found.runs, settings, strict=True):
            values.setdefault(each.get(name, "–"), []).append(run.letter)
        if len(values) > 1:
            yield name, "; ".join(f"{shorten(value, 120)} ({', '.join(letters)})" for value, letters in values.items())


def _settings(run: ComparedRun) -> Iterator[tuple[str, str]]:
    """All settings of a run by name."""
    header = run.run.header
    first = {"log": str(run.run.path.parent), "batch size": run.batch and number(run.batch, 4), "unit": header.unit}
    settings: dict[str, Any] = {**first, **header.setup, **header.metadata, "version of": header.versions}
    waiting = list(settings.items())
    while waiting:
        name, value = waiting.pop(0)
        if isinstance(value, Mapping):
            waiting += [(f"{name} {key}", each) for key, each in value.items()]
        elif value is not None and name not in _OF_NO_USE:
            yield name.replace("_", " "), str(value)
