"""What a log says of the next batch size: the same for the report, for `sonde watch` and for `sonde advise`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sonde.batch_size.stats.critical_batch import Estimate, Verdict, are_alike, critical, judge_batch
from sonde.batch_size.stats.next_batch import FROM_HERE_ON, RUN_LIKE_THIS, Advice, Aim, Present, advise_batch
from sonde.batch_size.stats.proxy import Factor, Range, factor_for
from sonde.runs.run import PROMPT_NOISE, PolicyReading, ProbeSetup, Reading, Run, logged_batch, logged_interval
from sonde.stats.intervals import RatioInterval
from sonde.wording import estimate

STEPS = 1000
"""From here on, costs are those of what so many steps with the present batch would learn."""


@dataclass(frozen=True)
class Scope:
    """What advice is about: a run like this one, or from here on.

    Attributes:
        known: the noise scale.
        factor: the critical batch size over it.
        steps: of the training that costs are for.
    """

    known: Estimate
    factor: Factor
    steps: float

    @property
    def critical(self) -> Range:
        """The critical batch size."""
        return critical(self.known, self.factor)


@dataclass(frozen=True)
class Logged:
    """What a log says of the batch size.

    Attributes:
        unit: plural name of the unit.
        setup: of the probe.
        present: the training as it is.
        scopes: what advice is about.
        optimizer: as `proxy.kind_of` names it; empty where it is not known, or its options were changed.
        why_none: why nothing is advised yet; empty where something is.
        metric: of the noise scale.
        tokens: of one unit; None where they were not counted.
        units_seen: by the run.
        batch_changed: whether the batch was another one for a part of the run, so that nothing is said of all of it.
        verdict: of the last reading of the noise scale; None of a log of policies.
    """

    unit: str
    setup: Mapping[str, Any]
    present: Present
    scopes: Mapping[str, Scope]
    optimizer: str
    why_none: str = ""
    metric: str = "euclidean"
    tokens: float | None = None
    units_seen: float = 0.0
    batch_changed: bool = False
    verdict: Verdict | None = None

    def advised(
        self, *, aim: Aim = "balanced", budget: float | None = None, batch: float | None = None
    ) -> dict[str, Advice]:
        """What to do, by scope; nothing where it is too early.

        Args:
            aim: as of `advise_batch`.
            budget: likewise, for a whole run.
            batch: likewise.

        Raises:
            ValueError: as of `advise_batch`, and for a budget where the average over the run is not known.
        """
        if self.why_none:
            return {}
        scopes = {name: scope for name, scope in self.scopes.items() if budget is None or name == RUN_LIKE_THIS}
        if not scopes:
            why = "its batch changed" if self.batch_changed else "its average noise scale is not in the log"
            raise ValueError(f"--budget is for a whole run like this one, and {why}: leave it out")
        return {
            name: advise_batch(
                dataclasses.replace(self.present, steps=scope.steps),
                scope.critical,
                aim=aim,
                budget=budget,
                batch=batch,
            )
            for name, scope in scopes.items()
        }


def logged(
    run: Run,
    *,
    units_per_second: float | None = None,
    cost_per_hour: float | None = None,
    ranks_at_most: int | None = None,
) -> Logged:
    """What the log of a run says of its batch size.

    Args:
        run: as its log has it.
        units_per_second: throughput of all ranks of this run together; None: the median of the log.
        cost_per_hour: of all ranks of this run together.
        ranks_at_most: of the next run; None: as many as this one had.

    Raises:
        ValueError: for a log without readings, and a price without a throughput.
    """
    if run.readings:
        found = _of_readings(run)
    else:
        known = [(r, noise) for r in run.policy if (noise := logged_interval(r.metrics, PROMPT_NOISE)).low is not None]
        if not known:
            raise ValueError(
                f"{run.path} has no reading of the noise scale, which advice on the batch size rests on: train on, or "
                "attach a noise-scale probe"
            )
        found = _of_prompts(run, *known[-1])
    present = found.present
    throughput = units_per_second or present.units_per_second
    if throughput is None and cost_per_hour is not None:
        raise ValueError("--cost-per-hour needs the throughput, which the log lacks: pass --units-per-second too")
    most = ranks_at_most or present.ranks
    present = dataclasses.replace(present, units_per_second=throughput, cost_per_hour=cost_per_hour, ranks_at_most=most)
    return dataclasses.replace(found, present=present)


def _of_readings(run: Run) -> Logged:
    last, probe = run.readings[-1], run.probe("reading")
    units, (batch, _) = last.metrics.get("gns/units_per_window"), logged_batch(last.metrics, probe.unit)
    segment = [r for r in run.readings if r.segment == last.segment]
    changed = _batch_changed(segment)
    verdict, why_none = _judged(last, probe, whole_run=not changed), ""
    if not (batch and units) or not verdict.in_short:
        batch = units = units or 1.0
        why_none = f"{verdict.headline} {verdict.detail}"
    trains, scale = not probe.setup.get("fixed_weights"), units / batch
    optimizer, metric = looked_up(last, probe)
    n_steps = last.window - round(last.metrics.get("gns/first_step") or 1) + 1
    averages = [(RUN_LIKE_THIS, last.average, n_steps)] if trains and not changed else []
    scopes = {
        name: Scope(
            _estimate(known).times(scale),
            factor_for(probe.unit, optimizer, metric, from_here_on=name == FROM_HERE_ON),
            steps,
        )
        for name, known, steps in (*averages, (FROM_HERE_ON, last.now, STEPS))
        if known.status != "unresolved"
    }
    pieces = float(last.pieces.get("per_window") or 1) if trains else 1.0  # windows at fixed weights are no batches
    tokens = last.metrics.get("gns/units_per_window_tokens")
    rates = [rate for r in segment if trains and (rate := r.metrics.get("run/units_per_second"))]
    return Logged(
        unit=probe.unit,
        setup=probe.setup,
        present=_present(probe, units, pieces, statistics.median(rates) if rates else None),
        scopes=scopes,
        why_none=why_none,
        optimizer=optimizer,
        metric=metric,
        tokens=tokens / units if tokens else None,
        units_seen=last.metrics.get("run/units_seen") or 0.0,
        batch_changed=changed,
        verdict=verdict,
    )


def _batch_changed(segment: Sequence[Reading]) -> bool:
    """Whether windows at the end have another number of units than at the beginning. Short ones are not looked at."""
    seen = [(r.window, r.metrics.get("run/units_seen") or 0.0) for r in segment]
    batches = [(after - before) / (b - a) for (a, before), (b, after) in itertools.pairwise(seen) if b > a]
    part = math.ceil(len(batches) / 3)
    ends = [statistics.median(each) for each in (batches[:part], batches[-part:]) if each]
    return bool(ends) and min(ends) > 0 and not are_alike(ends[0], ends[-1])


def _of_prompts(run: Run, last: PolicyReading, noise: RatioInterval) -> Logged:
    """Of a policy whose noise scale was measured in prompts. Its level now is all that the log has."""
    probe = run.probe("policy")
    optimizer = str(probe.setup.get("optimizer_kind") or "")
    batch = float(last.metrics.get("gns_prompts/prompts_per_window") or probe.setup.get("prompts_per_step") or 1)
    factor = factor_for("prompts", optimizer, "euclidean", from_here_on=True)
    return Logged(
        unit="prompts",
        setup=probe.setup,
        present=_present(probe, batch, float(probe.setup.get("ranks") or 1), None),
        scopes={FROM_HERE_ON: Scope(_estimate(noise), factor, STEPS)},
        optimizer=optimizer,
        units_seen=batch * last.window,
    )


def _present(probe: ProbeSetup, units: float, pieces: float, units_per_second: float | None) -> Present:
    ranks = int(probe.setup.get("ranks") or 1)
    return Present(units, 0.0, max(pieces, ranks), ranks, units_per_second)


def _estimate(known: RatioInterval) -> Estimate:
    return Estimate(known.ratio, known.low, known.high)


def _judged(reading: Reading, probe: ProbeSetup, *, whole_run: bool) -> Verdict:
    """The verdict of one reading. It speaks of the whole run where its batch was one and the same."""
    unit, trains = probe.unit, not probe.setup.get("fixed_weights")
    batch, judged = logged_batch(reading.metrics, unit)
    now, average = reading.now, reading.average
    if not batch and reading.status != "unresolved":  # of a checkpoint, without a batch to judge
        known = estimate(now.status, now.ratio, now.low, now.high)
        advice = "No batch size was given to judge: give one by batch= of sonde.measure, or --batch of sonde measure."
        return Verdict("unknown", f"The noise scale is {known} {unit}.", advice)
    if not batch:
        return Verdict(
            "unknown", "No verdict yet: the batch size is not known.", f"{reading.reason or 'No window was measured'}."
        )
    first_step = round(reading.metrics.get("gns/first_step") or 1)
    return judge_batch(
        batch,
        unit=judged,
        now=_estimate(now),
        of_run=_estimate(average) if trains and whole_run else None,
        n_steps=reading.window - first_step + 1 if trains else None,
        first_step=first_step,
        warms_up=bool(reading.metrics.get("gns/warms_up")),
        reason=reading.reason,
        advice=reading.advice,
        optimizer=looked_up(reading, probe)[0],
        metric=looked_up(reading, probe)[1],
    )


def looked_up(reading: Reading, probe: ProbeSetup) -> tuple[str, str]:
    """The optimizer's kind, empty where it is not known or has changed, and the metric: what the study is asked for.

    Args:
        reading: of a log.
        probe: how it was measured.
    """
    optimizer = "" if reading.optimizer_changed else str(probe.setup.get("optimizer_kind") or "")
    return optimizer, str(probe.setup.get("metric") or "euclidean").split(", ")[0]
