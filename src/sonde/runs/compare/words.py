"""What several runs show together, in words: the same sentences and rows for the terminal and for the page."""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sonde.evidence.answer import Row, in_words
from sonde.runs.compare.beside import Quantity, entropy, noise_at_equal_loss, noise_beside, quantities
from sonde.runs.compare.side_by_side import By, ComparedRun, Comparison
from sonde.runs.compare.stats.differences import ratio_between, side_of_1
from sonde.runs.report.how_measured import setting_text
from sonde.runs.report.verdicts import VerdictPanel, batch_size_panel, entropy_panel
from sonde.wording import count, duration, number, shorten

_ALIKE = 1.01
"""Batches within this factor are the same."""
_AS_LONG = 1.1
"""Runs within this factor are as long as each other: their averages can be compared."""
_AXES: tuple[By, ...] = ("units", "steps", "time")
_NOTHING = "The runs cannot be compared yet: they have too little in common."
_TIMES = "\N{NO-BREAK SPACE}×"
_OF_NO_USE = ("start", "groups", "log_every")
"""Settings that are left out: `sonde run` writes another start for each run, and the others do not change training."""


def summary(found: Comparison) -> VerdictPanel:
    """What the runs show together, and where the next batch is worked out."""
    measured = [run for run in found.runs if run.run.readings]
    by_batch = sorted((run for run in measured if run.batch), key=lambda run: run.batch or 0.0)
    said = sentences(found)
    if by_batch and (by_batch[-1].batch or 0.0) > _ALIKE * (by_batch[0].batch or 0.0):
        said = [*_noise_by_batch(found, by_batch[0], by_batch[-1])] or said
    axes = sorted(_AXES, key=lambda by: by != found.by)
    bests = [best for by in axes if (best := _lowest_loss(found, by)) is not None]
    first, *others = [*said[:4], *(sentence for _, sentence in bests)] or [_NOTHING]
    basis = f"{len(found.runs)} runs, A first. Intervals hold at 95 % for these very runs: another seed is not in them."
    if measured:
        run = next((run for run, _ in bests if run in measured), measured[0]).run
        panel, path = batch_size_panel(run), shlex.quote(str(run.path.parent))
        action = panel.action if panel.kind == "unknown" else f"For the next batch: sonde advise {path}"
    else:
        action, why = _entropy_action(found.runs)
        others.append(why)
    return VerdictPanel("measured", "Compared", action, first, " ".join(others), basis, ())


def _lowest_loss(found: Comparison, by: By) -> tuple[ComparedRun, str] | None:
    """The run with the lowest loss at an equal place on an axis, and a sentence; None where no run is below all."""
    if (loss := _loss(found)) is None:
        return None

    def beside(run: ComparedRun, other: ComparedRun) -> float:
        return of.value if (of := loss.beside(run, other, by)) is not None else 0.0

    runs = [run for run in found.runs if run.series(loss.of, by)]
    lowest = functools.reduce(lambda one, other: other if beside(other, one) < 0 else one, runs)
    above = [(of, run) for run in runs if run is not lowest and (of := loss.beside(run, lowest, by)) is not None]
    if not above or min(of.value for of, _ in above) < 0:  # each pair is compared where both have got to
        return None
    of, second = min(above, key=lambda each: each[0].value)
    among = sorted([lowest.letter, *(run.letter for _, run in above)])
    where = f"At equal {_noun(by, found.unit)}, {lowest.letter}'s {loss.name} is the lowest"
    where += f" of {', '.join(among)}" if len(among) < len(found.runs) else ""
    doubt = ", which cannot be distinguished from 0" if of.low <= 0 else ""
    return lowest, f"{where}: {second.letter}'s is {of} higher{doubt}."


def _loss(found: Comparison) -> Quantity | None:
    return next((each for each in quantities(found) if "loss" in each.name.lower()), None)


def _entropy_action(runs: Sequence[ComparedRun]) -> tuple[str, str]:
    """What to do about the policy that has the least entropy, and which policy that is."""
    known = [(entropies[-1][1], run) for run in runs if (entropies := run.series(entropy, "steps"))]
    if not known:
        return "Measure on: nothing can be advised yet.", "No entropy is known."
    least, run = min(known, key=lambda each: each[0])
    return entropy_panel(run.run).action, f"{run.letter} has the least entropy, {number(least)} nats a token."


def _noise_by_batch(found: Comparison, small: ComparedRun, large: ComparedRun) -> Iterator[str]:
    """Does the noise scale depend on the batch? At equal progress, by the best way that the runs allow."""
    loss, ends = _loss(found), [run.position(run.readings[-1], "units") or 0.0 for run in (small, large)]
    ways = {"At equal loss": noise_at_equal_loss(loss, large, small) if loss else None}
    if max(ends) < _AS_LONG * min(ends) and small.metric == large.metric:
        ways["Over whole runs"] = ratio_between(large.noise_of_run, small.noise_of_run)
    known = [(where, of) for where, of in ways.items() if of is not None and of.low is not None]
    for where, ratio in sorted(known, key=lambda each: each[1].ratio is None)[:1]:  # bounds come last
        rest = "These runs do not tell whether it depends on the batch."
        if side_of_1(ratio):
            rest = "It depends on the batch here."
        elif ratio.ratio and (ratio.low or 0.0) > 1 / 2.0 and (ratio.high or math.inf) < 2.0:
            rest = f"If it depends on the batch, then by less than {number(2.0)} times."
        sizes = [number(run.batch) for run in (large, small)]
        yield f"{where}, the noise scale at batch {sizes[0]} is {in_words(ratio)} times that at {sizes[1]}. {rest}"


def sentences(found: Comparison) -> list[str]:
    """The noise scale, the first loss and the entropy of every run beside the first one."""
    first, *others = found.runs
    said = []
    for run in others:
        if (noise := noise_beside(run, first, found.by)) is not None and noise.ratio.low is not None:
            rest = ", which cannot be distinguished from 1"
            if noise.since is not None:
                side = "larger" if side_of_1(noise.ratio) > 0 else "smaller"
                rest = f", and {side} at each reading since {_place(found, noise.since)}"
            beside = f"{run.letter}'s noise scale is {in_words(noise.ratio)} times {first.letter}'s"
            said.append(f"{beside} at {_place(found, noise.at)}{rest}.")
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
        cells += [duration(each.position(last, "time") or 0.0), "–" if cost is None else f"{number(100 * cost, 2)} %"]
        cells += ["–", "–"] if now is None else [in_words(now), in_words(each.noise_of_run)]
        verdict = batch_size_panel(run) if run.readings else entropy_panel(run)
        yield each.name, verdict.badge, *cells


def beside_rows(found: Comparison) -> Iterator[Row]:
    """Every other run beside the first, at equal units, steps and time."""
    yield "", "", *(f"at equal {_noun(by, found.unit)}" for by in _AXES)
    first, *others = found.runs
    for run in others:
        if any(noises := [noise_beside(run, first, by) for by in _AXES]):
            yield run.letter, "noise scale", *(in_words(of.ratio) + _TIMES if of else "–" for of in noises)
    for each in quantities(found):
        for run in others:
            if any(cells := [each.beside(run, first, by) for by in _AXES]):
                yield run.letter, shorten(each.name), *(f"{of}{_TIMES * each.is_ratio}" if of else "–" for of in cells)


def setting_rows(found: Comparison, longest: int = 60) -> Iterator[Row]:
    """Each setting in the headers that is not the same in all runs, with its values.

    Args:
        found: the runs.
        longest: characters of a value. The middle of a longer one is left out.
    """
    yield "setting", "values"
    settings = [dict(_settings(run)) for run in found.runs]
    for name in dict.fromkeys(name for each in settings for name in each):
        values: dict[str, list[str]] = {}
        for run, each in zip(found.runs, settings, strict=True):
            values.setdefault(each.get(name, "–"), []).append(run.letter)
        if len(values) > 1:
            yield name, "; ".join(f"{shorten(value, longest)} ({', '.join(of)})" for value, of in values.items())


def _settings(run: ComparedRun) -> Iterator[tuple[str, str]]:
    """All settings of a run by name."""
    header, batch = run.run.header, run.batch and number(run.batch, 4)
    first = {"log": str(run.run.path.parent), "batch size": batch, "unit": header.unit}
    for name, value in {**first, **header.setup, **header.metadata, "version of": header.versions}.items():
        if name not in _OF_NO_USE:
            yield from _flat(name, value)


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """A setting, or each that is inside it."""
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        inside = enumerate(value, 1)
    elif value is not None:
        yield name.replace("_", " "), setting_text(value)
    for key, each in inside:
        yield from _flat(f"{name} {key}", each)
