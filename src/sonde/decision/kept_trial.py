"""The trial that is kept beside the log of a run: a time curve, and of which model and unit it is."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from sonde.decision.facts import Facts
from sonde.decision.time_curve import TimeCurve, Timing

TRIAL_NAME = "trial.json"
_SCHEMA = 2


def trial_text(curve: TimeCurve, facts: Facts) -> str:
    """The text of the file.

    Args:
        curve: that was tried.
        facts: of the run that it was tried for.
    """
    known = {"unit": facts.unit, "model": facts.model, "timings": [vars(each) for each in curve.timings]}
    too_large = curve.too_large if math.isfinite(curve.too_large) else None
    return json.dumps({"schema": _SCHEMA, **known, "too_large": too_large})


def with_trial(facts: Facts, folder: Path) -> Facts:
    """The facts of a run with the time curve of the trial beside its log, if there is one.

    Where it cannot be used, a note says so.

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
    return replace(facts, curve=curve)


def _read(file: Path, facts: Facts) -> TimeCurve:
    """The curve of a file.

    Raises:
        ValueError: with what the file is in place of a curve of this run.
    """
    try:
        known = json.loads(file.read_text())
        own = {"schema": _SCHEMA, "unit": facts.unit, "model": facts.model}
        others = [f"of another {name}, {known[name] or 'none'}" for name, value in own.items() if known[name] != value]
        too_large = math.inf if known["too_large"] is None else float(known["too_large"])
        curve = TimeCurve(tuple(Timing(**each) for each in known["timings"]), too_large)
    except (ArithmeticError, KeyError, OSError, TypeError, ValueError):
        others = ["damaged, or of another version"]
    if others:
        raise ValueError(others[0])
    return curve
