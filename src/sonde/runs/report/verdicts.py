"""What the report says first: what looks wrong now, what to do, why, and the numbers behind it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from sonde.batch_size.stats.reading import in_percent
from sonde.decision.decide import Advice, Decision, decide
from sonde.decision.time_curve import nearly_whole
from sonde.policy.stats.entropy_verdict import judge_entropy
from sonde.policy.stats.forecast_point import coverage, steps_kept
from sonde.runs.facts import facts_of_run
from sonde.runs.run import PROMPT_NOISE, Alert, AnyReading, ComparisonReading, PolicyReading, Reading, Run
from sonde.stats.intervals import RatioInterval, logged_interval, unresolved
from sonde.wording import count, number, percent, plural, units

_WATCH = "Watch the reward, and act if it no longer rises."
_CHECK = "Check the reward, and the entropy bonus if there is one."
_OF_ENTROPY = {
    "holds": ("Entropy holds", "Go on: the policy explores as it did."),
    "falling": ("Entropy is falling", _WATCH),
    "fallen": ("Entropy has fallen", _WATCH),
    "rising": ("Entropy is rising", _CHECK),
    "risen": ("Entropy has risen", _CHECK),
    "collapses": ("Entropy collapses", "Act now: the policy has all but stopped exploring."),
    "not_linear": ("Steps too large", "Take smaller steps: lower the learning rate, or use more prompts in each."),
    "unknown": ("Not known yet", "Measure on: nothing can be advised yet."),
}
"""The badge of each verdict, and what to do."""


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
        action: what to do, in one sentence.
        headline: the verdict in one sentence.
        detail: what follows from the verdict, or what it rests on.
        basis: which readings the verdict was made from.
        tiles: the numbers behind it.
        commands: what to set or to run next, in lines.
    """

    kind: str
    badge: str
    action: str
    headline: str
    detail: str
    basis: str
    tiles: tuple[Tile, ...]
    commands: tuple[str, ...] = ()


def verdict_panels(run: Run) -> list[VerdictPanel]:
    """A panel for the batch size if the noise scale was measured, and one for the entropy if a policy was measured."""
    return [*([batch_size_panel(run)] if run.readings else []), *([entropy_panel(run)] if run.policy else [])]


def batch_size_panel(run: Run) -> VerdictPanel:
    """The decision on the batch size, for a run that has at least one reading of the noise scale."""
    probe, last = run.probe("reading"), run.readings[-1]
    unit, found = probe.unit, decide(facts_of_run(run), logs=[run.path.parent])
    basis = f"Judged from the last reading: {position_text(last, unit)}."
    covered = last.metrics.get("gns/covered")
    if covered is not None and covered < 1:
        basis += f" It speaks of parameters with {in_percent(covered)} of the squared gradient."
    basis += "".join(_in_further_units(run, last))
    wait = f"To know the noise scale better, {found.wait}." if found.wait and found.kind != "wait" else ""
    tiles = tuple(_batch_tiles(last, unit, found.leading))
    detail = " ".join(filter(None, [wait, *found.notes]))
    return VerdictPanel(found.kind, found.badge, found.sentence, found.reason, detail, basis, tiles, _next(found))


def _next(found: Decision) -> tuple[str, ...]:
    """What to run next, in lines: the flags and the rate, and the command that says more."""
    lines: list[str] = []
    for change in found.changes:
        lines += [f"{change.scope}:", *change.how] if len(found.changes) > 1 else change.how
        for row in change.rates:
            known = ((each.name, each.now, each.then) for each in row.settings)
            changed = [f"{name} {now:.4g} → {then:.4g}" for name, now, then in known if now and then and now != then]
            lines += [f"{row.optimizer}: {', '.join(changed)}"] if changed else []
    return tuple(filter(None, (*lines, found.command)))


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
        *_OF_ENTROPY[verdict.kind],
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


def _batch_tiles(last: Reading, unit: str, found: Advice | None) -> Iterator[Tile]:
    metrics = last.metrics
    batch = metrics.get("gns/units_per_window")
    scatter = metrics.get("gns/scatter")
    further = ""
    if scatter is not None and scatter < 1:
        further = f"; single steps scatter about it by {number(math.exp(scatter), 2)} times at most"
    yield _noise_scale_tile("Noise scale now", last.now, unit, further=further)
    yield _noise_scale_tile("Average over the run", last.average, unit)
    yield Tile("Batch size", "–" if batch is None else units(nearly_whole(batch), "").strip(), f"{unit} per step")
    if found is not None and found.best is not None:
        time = found.best.time
        note = f"of this one's; between {percent(time.low)} and {percent(time.high)}"
        yield Tile("Time of the next run", percent(time.likely), note)


def _noise_scale_tile(name: str, known: RatioInterval, unit: str, *, further: str = "") -> Tile:
    """A noise scale, as far as it is known."""
    if known.high == 0:
        return Tile(name, "–", "no noise was seen")
    match known.status:
        case "resolved":
            note = f"{unit}; between {number(known.low)} and {number(known.high)}{further}"
            return Tile(name, number(known.ratio), note)
        case "lower_bound":
            return Tile(name, f"> {number(known.low)}", f"{unit}; no upper limit known")
        case "upper_bound":
            return Tile(name, f"< {number(known.high)}", f"{unit}; no lower limit known")
        case "unresolved":
            return Tile(name, "–", f"{unit}; not known yet")


def _policy_tiles(run: Run) -> Iterator[Tile]:
    yield from _entropy_tiles(run)
    so_far = coverage([r.point for r in run.policy])
    note = "not known without fresh rollouts"
    if so_far.n:
        share = f"{percent(so_far.low)} and {percent(so_far.high)}"
        note = f"{so_far.n_held:,} of {so_far.n:,} intervals contain the truth; between {share} of all would"
    yield Tile("Coverage", percent(so_far.fraction) if so_far.n else "–", note)
    noise = [known for r in run.policy if (known := logged_interval(r.metrics, PROMPT_NOISE)).status != "unresolved"]
    yield _noise_scale_tile("Average noise scale", noise[-1] if noise else unresolved(""), "prompts")


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


@dataclass(frozen=True)
class Failed:
    """A check that failed.

    Attributes:
        message: what looked wrong.
        when: in words.
        is_over: whether a later reading found nothing wrong, so that nothing is to be done about it.
    """

    message: str
    when: str
    is_over: bool

    @property
    def in_words(self) -> str:
        """When, and whether it is over."""
        return f"{self.when}; it has passed since" if self.is_over else self.when


def failed_checks(run: Run) -> list[Failed]:
    """Each check that failed, once, in the order in which they failed first."""
    last_alerted: dict[str, int] = {}
    readings: list[Reading | PolicyReading] = [*run.readings, *run.policy]
    for reading in readings:
        last_alerted |= dict.fromkeys(reading.alerts, reading.window)
    now = run.alerts_now
    found = []
    for alerts in sorted(_alerts_by_name(run), key=lambda alerts: alerts[0].window):
        first, last = alerts[0], alerts[-1]
        if first.name in now:
            found.append(Failed(now[first.name], f"since {place_in_words(run, first.window)}", is_over=False))
        elif _is_newer_than_readings(last, run):
            found.append(Failed(last.message, f"since {place_in_words(run, last.window)}", is_over=False))
        else:
            when = place_in_words(run, first.window, last_alerted.get(first.name))
            found.append(Failed(first.message, when, is_over=True))
    return found


def _alerts_by_name(run: Run) -> list[list[Alert]]:
    """The alerts of each check without those that a restart undid; all of them if it undid them all."""
    by_name: dict[str, list[Alert]] = {}
    for alert in run.alerts:
        by_name.setdefault(alert.name, []).append(alert)
    return [[a for a in each if not run.was_undone(a.segment, a.window)] or each for each in by_name.values()]


def _is_newer_than_readings(alert: Alert, run: Run) -> bool:
    """Whether no reading followed that could show that all is well again."""
    if alert.segment < len(run.headers) - 1:
        return False
    return run.last.segment < alert.segment or alert.window > run.last.window


def position_text(reading: AnyReading | ComparisonReading, unit: str) -> str:
    """The point of the run at which a reading was taken, in words."""
    seen = None if isinstance(reading, ComparisonReading) else reading.metrics.get("run/units_seen")
    after = "" if seen is None else f", after {count(seen)} {unit}"
    noun = "step" if isinstance(reading, PolicyReading | ComparisonReading) else "window"
    return f"{noun} {count(reading.window)}{after}"


def place_in_words(run: Run, window: int, until: int | None = None) -> str:
    """A window, or several. It is called a step if only a policy is measured, in which nothing is averaged.

    Args:
        run: with the window.
        window: its number.
        until: the last of several windows; None for one.
    """
    noun = "step" if run.policy and not run.readings else "window"
    if not window:
        return f"before the first {noun}"
    if until is None or until <= window:
        return f"{noun} {count(window)}"
    return f"{noun}s {count(window)} to {count(until)}"
