"""Runs as JSON for programs: the same names in `sonde watch`, `compare` and `report`. docs/runs.md lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sonde.decision.decide import Decision, decide
from sonde.runs.compare.side_by_side import ComparedRun, thinned
from sonde.runs.facts import facts_of_run
from sonde.runs.losses import last_loss
from sonde.runs.report.verdicts import failed_checks, verdict_panels
from sonde.runs.run import PROMPT_NOISE, AnyReading, Reading, Run
from sonde.stats.intervals import RatioInterval, logged_interval


def alone(run: Run, label: str) -> ComparedRun:
    """A run that is not compared."""
    return ComparedRun("", label, thinned(run))


def run_as_json(each: ComparedRun, whole: Run) -> dict[str, Any]:
    """A run at its last reading, with the decision of `sonde advise`.

    Args:
        each: the run.
        whole: all that its log holds.
    """
    found = {"name": each.label, "log": str(whole.path), "began": whole.headers[0].time, "ended": whole.ended}
    found |= {"remarks": whole.remarks, "unit": each.unit, "batch": None, "steps": 0, "units": 0, "seconds": 0.0}
    found |= {"b_simple": None, "b_simple_average": None, "loss": None, "metrics": {}}
    if each.readings:
        last = each.readings[-1]
        now = last.now if isinstance(last, Reading) else logged_interval(last.metrics, PROMPT_NOISE)
        found |= {"batch": each.batch, **place(each, last), "b_simple": _noise(now), "metrics": last.metrics}
        found["b_simple_average"] = _noise(last.of_run) if isinstance(last, Reading) else None
    if (loss := last_loss(each.run)) is not None:
        found["loss"] = {"name": loss.name, "value": loss.value, **place(each, loss.reading)}
    found["alerts"] = [{"message": f.message, "when": f.when} for f in failed_checks(whole) if not f.is_over]
    found["panels"] = verdict_panels(whole)
    return found | decided(lambda: decide(facts_of_run(whole), logs=[whole.path.parent]))


def place(each: ComparedRun, reading: AnyReading) -> dict[str, float | None]:
    """Where a reading lies."""
    units, seconds = (each.position(reading, by) for by in ("units", "time"))
    return {"steps": reading.window, "units": units, "seconds": seconds}


def _noise(known: RatioInterval) -> dict[str, Any]:
    return {"status": known.status, "value": known.ratio, "low": known.low, "high": known.high, "reason": known.reason}


def decided(decision: Callable[[], Decision]) -> dict[str, Any]:
    """What `sonde advise --json` prints; null with the reason where nothing can be decided."""
    try:
        return {"decision": decision(), "why_none": ""}
    except ValueError as error:
        return {"decision": None, "why_none": str(error)}
