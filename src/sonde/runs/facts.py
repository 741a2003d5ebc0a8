"""What the log of a run says of its batch size, for the decision."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from sonde.decision.facts import Facts, facts_of
from sonde.decision.kept_trial import with_trial
from sonde.decision.law import are_alike
from sonde.decision.time_curve import TimeCurve, Timing, nearly_whole
from sonde.runs.compare.side_by_side import reached_by
from sonde.runs.names import names_apart
from sonde.runs.run import PROMPT_NOISE, PolicyReading, ProbeSetup, Reading, Run
from sonde.stats.intervals import RatioInterval, logged_interval

_FEWEST_READINGS = 3
"""Readings that time a step of one size. Fewer may be short windows at the end of an epoch."""


def facts_of_runs(runs: Sequence[Run]) -> list[Facts]:
    """What the logs of several runs say, each beside the others.

    Raises:
        ValueError: for a log without a reading of the noise scale.
    """
    facts = zip(map(facts_of_run, runs), names_apart(runs), reached_by(runs), strict=True)
    return [replace(of_run, name=name, reached=at) for of_run, name, at in facts]


def facts_of_run(run: Run) -> Facts:
    """What the log of a run says of its batch size.

    Raises:
        ValueError: for a log without a reading of the noise scale.
    """
    if run.readings:
        return with_trial(_of_readings(run), run.path.parent)
    known = [(r, noise) for r in run.policy if (noise := logged_interval(r.metrics, PROMPT_NOISE)).low is not None]
    if not known:
        raise ValueError(
            f"{run.path} has no reading of the noise scale, which advice on the batch size rests on: train on, or "
            "attach a noise-scale probe"
        )
    return with_trial(_of_prompts(run, *known[-1]), run.path.parent)


def _of_readings(run: Run) -> Facts:
    last, probe = run.readings[-1], run.probe("reading")
    segment = [r for r in run.readings if r.segment == last.segment]
    return facts_of(
        last.metrics,
        probe.setup,
        now=last.now,
        window=last.window,
        pieces=last.pieces.get("per_window"),
        optimizer_changed=last.optimizer_changed,
        unit=probe.unit,
        name=run.name,
        batch_changed=_batch_changed(segment),
        curve=_timed(segment, probe),
        reason=last.reason,
        wait=last.advice,
    )


def _batches(segment: Sequence[Reading]) -> Iterator[tuple[float, Reading]]:
    """Units of a window, averaged over those between two readings; with the later reading."""
    seen = [(r, r.metrics.get("run/units_seen") or 0.0) for r in segment]
    for (before, units_before), (after, units) in itertools.pairwise(seen):
        if after.window > before.window:
            yield (units - units_before) / (after.window - before.window), after


def _batch_changed(segment: Sequence[Reading]) -> bool:
    """Whether windows at the end have another number of units than at the beginning. Short ones are not looked at."""
    batches = [batch for batch, _ in _batches(segment)]
    part = math.ceil(len(batches) / 3)
    ends = [statistics.median(each) for each in (batches[:part], batches[-part:]) if each]
    return bool(ends) and min(ends) > 0 and not are_alike(ends[0], ends[-1])


def _timed(segment: Sequence[Reading], probe: ProbeSetup) -> TimeCurve | None:
    """The median time of a step, for each size of micro-batches that several readings have; None without one."""
    if probe.setup.get("fixed_weights"):
        return None
    ranks = int(probe.setup.get("ranks") or 1)
    timed: list[Timing] = []
    for batch, reading in _batches(segment):
        rate, pieces = reading.metrics.get("run/units_per_second"), float(reading.pieces.get("per_window") or 1)
        # Measuring takes much of a short run's time, and none of the next run's that is not measured.
        measuring = reading.metrics.get("cost/seconds_per_window") or 0.0
        if rate and batch > 0 and (seconds := batch / rate - measuring) > 0:
            micro_batch, accumulation = batch / max(pieces, ranks), max(round(pieces / ranks), 1)
            timed.append(Timing(micro_batch, accumulation, ranks, seconds))
    sizes: list[list[Timing]] = []
    for each in sorted(timed, key=lambda t: (t.accumulation, t.micro_batch)):
        first = sizes[-1][0] if sizes else None
        if first and first.accumulation == each.accumulation and are_alike(first.micro_batch, each.micro_batch):
            sizes[-1].append(each)
        else:
            sizes.append([each])
    found = tuple(_median(same) for same in sizes if len(same) >= _FEWEST_READINGS)
    return TimeCurve(found) if found else None


def _median(same: Sequence[Timing]) -> Timing:
    size = nearly_whole(statistics.median(each.micro_batch for each in same))
    of_unit = statistics.median(each.seconds / each.micro_batch for each in same)
    return Timing(size, same[0].accumulation, same[0].ranks, of_unit * size)


def _of_prompts(run: Run, last: PolicyReading, noise: RatioInterval) -> Facts:
    """Of a policy whose noise scale was measured in prompts. Its level now is all that the log has."""
    setup = run.probe("policy").setup
    batch = float(last.metrics.get("gns_prompts/prompts_per_window") or setup.get("prompts_per_step") or 1)
    ranks = int(setup.get("ranks") or 1)
    _, share = run.series("gns_prompts/completions_share")  # the part of a step's noise that comes from completions
    return Facts(
        unit="prompts",
        batch=batch,
        now=noise,
        optimizer=str(setup.get("optimizer_kind") or ""),
        settings=tuple(setup.get("optimizer_settings") or ()),
        ranks=ranks,
        pieces=float(ranks),
        name=run.name,
        trainer=str(setup.get("trainer") or ""),
        completions=setup.get("completions_per_prompt"),
        completions_share=share[-1] if share else None,
    )
