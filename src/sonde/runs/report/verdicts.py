"""The panels at the top of the report: a verdict, and the numbers behind it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sonde.batch_size.stats.critical_batch import Estimate, Verdict, judge_batch, steps_and_examples
from sonde.batch_size.stats.reading import in_percent
from sonde.policy.stats.entropy_verdict import judge_entropy
from sonde.policy.stats.forecast_point import coverage, steps_kept
from sonde.runs.reader import Reading, Run
from sonde.runs.report.logged_interval import PROMPT_NOISE, logged_batch, logged_interval
from sonde.runs.report.timeline import position_text
from sonde.stats.intervals import RatioInterval
from sonde.wording import estimate, number, percent, plural

_BATCH_BADGES = {
    "too_small": "Batch too small",
    "about_right_or_too_small": "About right or too small",
    "about_right": "Batch about right",
    "about_right_or_too_large": "About right or too large",
    "too_large": "Batch too large",
    "unknown": "No verdict yet",
}
_WIDE = 5.0
"""A cost that may be so many times larger is known by its lower end alone."""
_ENTROPY_BADGES = {
    "holds": "Entropy holds",
    "falling": "Entropy is falling",
    "fallen": "Entropy has fallen",
    "rising": "Entropy is rising",
    "risen": "Entropy has risen",
    "collapses": "Entropy collapses",
    "not_linear": "Steps too large",
    "unknown": "Not known yet",
}


@dataclass(frozen=True)
class Tile:
    """One number.

    Attributes:
        name: what the number is.
        value: the number, in few characters.
        note: its unit, and how far it is known.
    """

    name: str
    value: str
    note: str


@dataclass(frozen=True)
class VerdictPanel:
    """One panel, in plain text.

    Attributes:
        kind: of verdict; it decides the colour.
        badge: the verdict in two or three words.
        headline: the verdict in one sentence.
        detail: what follows from the verdict, or what it rests on.
        basis: which readings the verdict was made from.
        tiles: the numbers behind it.
    """

    kind: str
    badge: str
    headline: str
    detail: str
    basis: str
    tiles: tuple[Tile, ...]


def verdict_panels(run: Run) -> list[VerdictPanel]:
    """A panel for the batch size if the noise scale was measured, and one for the entropy if a policy was measured."""
    return [*([batch_size_panel(run)] if run.readings else []), *([entropy_panel(run)] if run.policy else [])]


def batch_size_panel(run: Run) -> VerdictPanel:
    """The verdict on the batch size, for a run that has at least one reading of the noise scale."""
    unit, last = run.probe("reading").unit, run.readings[-1]
    verdict = judge_reading(last, unit, trains=not run.probe("reading").setup.get("fixed_weights"))
    basis = f"Judged from the last reading: {position_text(last, unit)}."
    needed = round(last.metrics.get("gns/windows_needed") or 0)
    if needed and last.status == "resolved":
        measured = "measured " if (last.metrics.get("cost/every") or 1) > 1 else ""
        basis += f" The interval narrows to about ± 20 % after {needed:,} more {measured}windows."
    covered = last.metrics.get("gns/covered")
    if covered is not None and covered < 1:
        basis += f" It speaks of parameters with {in_percent(covered)} of the squared gradient."
    basis += "".join(_in_further_units(run, last))
    tiles = tuple(_batch_tiles(last, unit))
    return VerdictPanel(verdict.kind, _BATCH_BADGES[verdict.kind], verdict.headline, verdict.detail, basis, tiles)


def _in_further_units(run: Run, last: Reading) -> Iterator[str]:
    """A sentence for each further unit that batches are counted in."""
    for unit in run.probe("reading").setup.get("further_units") or ():
        batch, b_simple = (last.metrics.get(f"gns/{name}_{unit}") for name in ("units_per_window", "b_simple"))
        if batch is not None:
            scale = f", the noise scale {number(b_simple)}" if b_simple is not None else ""
            yield f" In {unit}, the batch is {number(batch)}{scale}."


def entropy_panel(run: Run) -> VerdictPanel:
    """The verdict on the entropy, for a run in which a policy was measured at least once."""
    verdict = judge_entropy([r.point for r in run.policy])
    basis = f"{_entropies_judged(run)} {verdict.basis}".strip()
    return VerdictPanel(
        verdict.kind,
        _ENTROPY_BADGES[verdict.kind],
        verdict.headline,
        verdict.detail,
        basis,
        tuple(_policy_tiles(run)),
    )


def _entropies_judged(run: Run) -> str:
    """From how many entropies the verdict was made."""
    steps = [r.window for r in run.policy if r.point.entropy is not None]
    if not steps:
        return f"Judged from {plural(len(run.policy), 'measured step')} without an entropy."
    return f"Judged from the entropy of {plural(len(steps), 'measured step')}; the last of them is step {steps[-1]:,}."


def judge_reading(reading: Reading, unit: str, *, trains: bool = True) -> Verdict:
    """Judge the batch size by one reading of a log.

    Args:
        reading: for a present verdict the last one.
        unit: plural name of the unit.
        trains: whether it is of a training, and not of a model at fixed weights.
    """
    batch, judged = logged_batch(reading.metrics, unit)
    low = reading.metrics.get("gns/b_simple_low")
    if not batch and reading.status != "unresolved":  # of a checkpoint, without a batch to judge
        known = estimate(reading.status, reading.metrics.get("gns/b_simple"), low, reading.high)
        advice = "No batch size was given to judge: give one by batch= of sonde.measure, or --batch of sonde measure."
        return Verdict("unknown", f"The noise scale is {known} {unit}.", advice)
    if not batch:
        return Verdict(
            "unknown", "No verdict yet: the batch size is not known.", f"{reading.reason or 'No window was measured'}."
        )
    average = logged_interval(reading.metrics, "gns/b_simple_average")
    first_step = round(reading.metrics.get("gns/first_step") or 1)
    return judge_batch(
        batch,
        unit=judged,
        now=Estimate(reading.metrics.get("gns/b_simple"), low, reading.high),
        of_run=Estimate(reading.metrics.get("gns/b_simple_average"), average.low, average.high) if trains else None,
        n_steps=reading.window - first_step + 1 if trains else None,
        first_step=first_step,
        warms_up=bool(reading.metrics.get("gns/warms_up")),
        reason=reading.reason,
        advice=reading.advice,
    )


def _batch_tiles(last: Reading, unit: str) -> Iterator[Tile]:
    metrics = last.metrics
    batch = metrics.get("gns/units_per_window")
    effective, _ = logged_batch(metrics, unit)
    yield _now_tile(last, unit)
    yield _noise_scale_tile("Average over the run", metrics, "gns/b_simple_average", unit)
    yield Tile("Batch size", number(batch, 4), f"{unit} per step")
    # A whole run is compared with other whole runs, so by its average; a checkpoint has no other than now.
    known = logged_interval(metrics, "gns/b_simple_average")
    if known.status == "unresolved" or last.status == "unresolved":
        known = RatioInterval(last.status, metrics.get("gns/b_simple_low"), last.high)
    used = f"{unit[:1].upper()}{unit[1:]} used"
    for name, title in (("steps", "Steps"), ("examples", used)):
        if not effective or known.low is None or known.high is None:
            yield Tile(title, "–", "relative to the fewest possible")
        else:
            yield Tile(title, _cost(effective, known.low, known.high, name), "the fewest possible")


def _now_tile(last: Reading, unit: str) -> Tile:
    """The noise scale of the last reading."""
    low, high = last.metrics.get("gns/b_simple_low"), last.high
    if low is None or high is None or last.status == "unresolved":
        return Tile("Noise scale now", "–", "not known yet")
    if last.status == "resolved":
        note = f"{unit}; between {number(low)} and {number(high)}"
        if (scatter := last.metrics.get("gns/scatter")) is not None and scatter < 1:
            note += f"; single steps scatter about it by {number(math.exp(scatter), 2)} times at most"
        return Tile("Noise scale now", number(last.metrics.get("gns/b_simple")), note)
    if last.status == "lower_bound":
        return Tile("Noise scale now", f"> {number(low)}", f"{unit}; no upper limit known")
    return Tile("Noise scale now", f"< {number(high)}", f"{unit}; no lower limit known")


def _noise_scale_tile(name: str, metrics: Mapping[str, float | None], metric: str, unit: str) -> Tile:
    """A noise scale that the log holds with both ends of its interval, as far as it is known."""
    known = logged_interval(metrics, metric)
    if known.high == 0:
        return Tile(name, "–", "no noise was seen")
    match known.status:
        case "resolved":
            value = number(metrics.get(metric))
            return Tile(name, value, f"{unit}; between {number(known.low)} and {number(known.high)}")
        case "lower_bound":
            return Tile(name, f"> {number(known.low)}", f"{unit}; no upper limit known")
        case "upper_bound":
            return Tile(name, f"< {number(known.high)}", f"{unit}; no lower limit known")
        case "unresolved":
            return Tile(name, "–", f"{unit}; not known yet")


def _cost(batch: float, low: float, high: float, name: str) -> str:
    """Steps or units over the fewest possible, as far as the interval of the noise scale reaches."""

    def at(noise_scale: float) -> float:
        if noise_scale <= 0:
            return 1.0 if name == "steps" else math.inf
        if math.isinf(noise_scale):
            return math.inf if name == "steps" else 1.0
        return float(getattr(steps_and_examples(batch, noise_scale), name))

    least, most = (number(cost, 2) for cost in sorted((at(low), at(high))))
    if max(at(low), at(high)) > _WIDE * min(at(low), at(high)):
        return f"≥ {least}×"
    return f"{least}×" if least == most else f"{least} – {most}×"


def _policy_tiles(run: Run) -> Iterator[Tile]:
    yield from _entropy_tiles(run)
    so_far = coverage([r.point for r in run.policy])
    if so_far.n:
        yield Tile(
            "Coverage", percent(so_far.fraction), f"{so_far.n_held:,} of {so_far.n:,} intervals contain the truth"
        )
    else:
        yield Tile("Coverage", "–", "not known without fresh rollouts")
    noise = [r.metrics for r in run.policy if logged_interval(r.metrics, PROMPT_NOISE).low is not None]
    yield _noise_scale_tile("Average noise scale", noise[-1] if noise else {}, PROMPT_NOISE, "prompts")


def _entropy_tiles(run: Run) -> Iterator[Tile]:
    points = [r.point for r in run.policy]
    kept = steps_kept([p for p in points if p.entropy is not None]).points
    if not kept:
        yield Tile("Entropy", "–", "not measured")
    else:
        first, last = kept[0], kept[-1]
        error = "" if last.entropy_se is None else f" ± {number(last.entropy_se, 2)}"
        begin, now = first.entropy or 0.0, last.entropy or 0.0
        share = f"; {percent(now / begin)} of its first value" if begin > 0 and now >= 0 else ""
        yield Tile("Last measured entropy", number(last.entropy), f"{error} nats a token{share}".strip())
    point = next((p for p in reversed(points) if p.delta is not None), None)
    if point is None:
        yield Tile("Last forecast change", "–", "no forecast was made")
        return
    doubt = "" if point.is_valid else "; not to be trusted"
    note = f"nats by step {point.step:,}; between {number(point.low, 2)} and {number(point.high, 2)}{doubt}"
    yield Tile("Last forecast change", number(point.delta, 2), note)
