"""What several runs show together, in words: the same sentences and rows for the terminal and for the page."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sonde.decision.decide import Decision, decide
from sonde.decision.pool import pool
from sonde.evidence.answer import Row
from sonde.runs.compare.side_by_side import AXES, ENTROPY, By, ComparedRun, Comparison
from sonde.runs.facts import facts_of_runs
from sonde.runs.losses import last_loss
from sonde.runs.report.how_measured import setting_text
from sonde.runs.report.verdicts import VerdictPanel, verdict_panels
from sonde.runs.run import Reading
from sonde.wording import duration, number, shorten

_NOTHING = "The runs cannot be compared yet: they have too little in common."
_OF_NO_USE = ("start", "groups", "log_every")
"""Settings that are left out: `sonde run` writes another start for each run, and the others do not change training."""


def summary(found: Comparison) -> VerdictPanel:
    """Which run did best at equal units, steps and time, and the decision that all logs together give."""
    axes = sorted(AXES, key=lambda by: by != found.by)
    bests = [best for by in axes if (best := lowest(found, by)) is not None]
    said = [sentence for _, sentence in bests]
    entropies = {run: of[-1][1] for run in found.runs if (of := run.curve(ENTROPY, "steps"))}
    least = min(found.runs, key=lambda run: entropies.get(run, math.inf))
    if found.loss is None and entropies:
        said = [f"{least.letter} has the least entropy, {number(entropies[least])} nats a token."]
    basis = f"{len(found.runs)} runs, A first. Intervals hold at 95 % for these very runs: another seed is not in them."
    first, *others = said or [_NOTHING]
    commands: tuple[str, ...]
    chosen = bests[0][0] if bests else least
    action, commands = f"By {chosen.letter}'s log: {verdict_panels(chosen.run)[0].action}", ()
    if chosen.run.readings:
        try:
            together = decision(found)
            action, commands = together.sentence, (together.command,) if together.command else ()
        except ValueError as error:
            others.append(f"All logs together give no decision: {error}.")
    return VerdictPanel("measured", "Compared", action, first, " ".join(others), basis, (), commands)


def decision(found: Comparison) -> Decision:
    """The decision that `sonde advise` prints of the same logs.

    Raises:
        ValueError: for runs that give no decision together, as those of different models or without a noise scale.
    """
    runs = [each.run for each in found.runs]
    return decide(pool(facts_of_runs(runs)), logs=[run.path.parent for run in runs])


def lowest(found: Comparison, by: By) -> tuple[ComparedRun, str] | None:
    """The run with the lowest loss at an equal place on an axis, and a sentence; None where no run is below all."""
    if (loss := found.loss) is None:
        return None

    def lower(one: ComparedRun, other: ComparedRun) -> ComparedRun:
        of = found.beside(other, one, loss, by)
        return other if of is not None and of.value < 0 else one

    least = functools.reduce(lower, [run for run in found.runs if run.curve(loss, by)])
    others = [(of, run) for run in found.runs if run is not least and (of := found.beside(run, least, loss, by))]
    if not others or min(of.value for of, _ in others) < 0:  # each pair is compared where both have got to
        return None
    of, second = min(others, key=lambda each: each[0].value)
    among = sorted([least.letter, *(run.letter for _, run in others)])
    where = f"At equal {_noun(by, found.unit)}, {least.letter}'s {shorten(loss)} is the lowest"
    where += f" of {', '.join(among)}" if len(among) < len(found.runs) else ""
    doubt = ", which cannot be distinguished from 0" if of.low is not None and of.low <= 0 else ""
    return least, f"{where}: {second.letter}'s is {of} higher{doubt}."


def _noun(by: By, unit: str) -> str:
    return unit if by == "units" else by


# Rows of tables. The first is the head.


def run_rows(found: Comparison) -> Iterator[Row]:
    """Each run by itself."""
    yield "run", "at last", "batch", "steps", found.unit, "time", "measuring", "noise scale now", "over the run"
    for each in found.runs:
        run, last = each.run, each.readings[-1]
        seen, cost = each.position(last, "units"), last.metrics.get("cost/share")
        cells = ["–" if value is None else number(value) for value in (each.batch, last.window, seen)]
        cells += [duration(each.position(last, "time") or 0.0), "–" if cost is None else f"{number(100 * cost, 2)} %"]
        cells += [last.now.in_words, last.of_run.in_words] if isinstance(last, Reading) else ["–", "–"]
        loss = last_loss(run)
        said = "–" if loss is None else f"{shorten(loss.name)} {number(loss.value)}"
        yield each.name, verdict_panels(run)[-1].badge if run.policy else said, *cells


def beside_rows(found: Comparison) -> Iterator[Row]:
    """Every other run minus the first, at equal units, steps and time."""
    first, *others = found.runs
    yield "", f"minus {first.letter}'s", *(f"at equal {_noun(by, found.unit)}" for by in AXES)
    for name in found.values:
        for run in others:
            if any(cells := [found.beside(run, first, name, by) for by in AXES]):
                yield run.letter, shorten(name), *("–" if of is None else str(of) for of in cells)


def reached_rows(found: Comparison) -> Iterator[Row]:
    """What each run took to the lowest loss that all have reached."""
    yield f"to {shorten(found.loss or '')} {number(found.common_loss)}", *(_noun(by, found.unit) for by in AXES)
    for run in found.runs if found.loss else ():
        if (at := found.to_common_loss(run)) is None:
            yield run.letter, "–", "–", "–"
        else:
            yield run.letter, number(at.units), number(at.steps), "–" if at.seconds is None else duration(at.seconds)


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
