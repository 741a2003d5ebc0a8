"""The trial that is kept beside the log of a run: a time curve, and of which model and unit it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from sonde.decision.facts import Facts
from sonde.decision.time_curve import TimeCurve, Timing
from sonde.stats.sealed_state import sealed, unsealed
from sonde.wording import duration

TRIAL_NAME = "trial.json"
_AS_LOGGED = 2.0
"""A step of the trial takes so many times that of the log, or less, on the same kind of machine."""


def trial_text(curve: TimeCurve, facts: Facts) -> str:
    """The text of the file.

    Args:
        curve: that was tried.
        facts: of the run that it was tried for.
    """
    timings = [vars(each) for each in curve.timings]
    known = {"unit": facts.unit, "model": facts.model, "timings": timings, "too_large": curve.too_large}
    return json.dumps(sealed(known))


def with_trial(facts: Facts, folder: Path) -> Facts:
    """The facts of a run with the time curve of the trial beside its log, if there is one.

    Where it cannot be used, or another machine seems to have run it, a note says so.

    Args:
        facts: as logged.
        folder: of the log.
    """
    file = folder / TRIAL_NAME
    if not file.exists():
        return facts
    try:
        curve = _read(file, facts)
    except ValueError as error:
        return replace(facts, notes=(*facts.notes, f"{file} is not used: it is {error}. Start the trial again."))
    notes = facts.notes
    if facts.curve is not None:
        here = facts.whole_micro_batch, facts.accumulation, facts.ranks
        logged, tried = (each.of_step(*here)[0].likely for each in (facts.curve, curve))
        if not 1 / _AS_LOGGED < tried / logged < _AS_LOGGED:
            notes += (
                f"A step took {duration(tried)} in the trial, and {duration(logged)} in the log: times are those of "
                "the machine that ran the trial. Try again on the one that trains.",
            )
    return replace(facts, curve=curve, notes=notes)


def _read(file: Path, facts: Facts) -> TimeCurve:
    """The curve of a file.

    Raises:
        ValueError: with what the file is in place of a curve of this run.
    """
    try:
        known = unsealed("trial", json.loads(file.read_text()))
    except (OSError, ValueError):
        raise ValueError("damaged, or of another version") from None
    for name in ("unit", "model"):
        if known[name] != getattr(facts, name):
            raise ValueError(f"of another {name}, {known[name] or 'none'}")
    return TimeCurve(tuple(Timing(**each) for each in known["timings"]), known["too_large"])
