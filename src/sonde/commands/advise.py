"""`sonde advise RUN`: the next batch size, its learning rate, and how to set both. It needs no torch."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from tyro.conf import Positional, arg

from sonde.batch_size.stats.critical_batch import Estimate, Kind, batch_kind
from sonde.batch_size.stats.next_batch import (
    FROM_HERE_ON,
    RUN_LIKE_THIS,
    Advice,
    Aim,
    Plan,
    Present,
    advise_batch,
    in_words,
    plan_of,
)
from sonde.batch_size.stats.proxy import IN_RL, PUBLISHED, Factor, Range, factor_of
from sonde.batch_size.stats.rate_row import RateRow, rate_row
from sonde.commands.advise_tables import show
from sonde.commands.trainer_flags import SET_THEIR_RATES, in_trainer, trainer_named
from sonde.runs.reader import read_run
from sonde.runs.report.verdicts import judge_reading, looked_up
from sonde.runs.run import PROMPT_NOISE, PolicyReading, ProbeSetup, Run, logged_batch, logged_interval
from sonde.stats.intervals import RatioInterval
from sonde.wording import count, number, percent, plural

_STEPS = 1000
"""From here on, costs are those of what so many steps with the present batch would learn."""


@dataclass(frozen=True)
class AdviseOptions:
    """Say which batch size to take next, what it saves, which learning rate goes with it, and how to set it.

    Attributes:
        run: Folder of the run, or its records.jsonl.
        aim: balanced: as few steps and units as can be had together. fastest: the shortest time. cheapest: the least
            time of all ranks together.
        budget: The most that the training may cost. The fastest batch that keeps it is taken.
        cost_per_hour: Of all ranks of this run together, in any currency.
        units_per_second: Throughput of all ranks of this run together.
        ranks_at_most: Data-parallel ranks that the next run may use.
        batch: Say how to set this batch, in place of the best one.
        trainer: The trainer, such as transformers or Megatron.
        json: Print JSON.
    """

    run: Positional[Path]
    aim: Aim = "balanced"
    budget: Annotated[float | None, arg(metavar="MONEY", help_behavior_hint="(optional)")] = None
    cost_per_hour: Annotated[float | None, arg(metavar="MONEY", help_behavior_hint="(optional)")] = None
    units_per_second: Annotated[float | None, arg(metavar="N", help_behavior_hint="(default: as logged)")] = None
    ranks_at_most: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: as many as it had)")] = None
    batch: Annotated[float | None, arg(metavar="UNITS", help_behavior_hint="(optional)")] = None
    trainer: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: as logged)")] = None
    json: bool = False


@dataclass(frozen=True)
class Logged:
    """What a log says of the batch size.

    Attributes:
        unit: plural name of the unit.
        setup: of the probe.
        present: the training as it is.
        scopes: what advice is about, with its noise scale, the kind of the verdict, and steps.
        optimizer: as `proxy.kind_of` names it; empty where it is not known, or its options were changed.
        why_none: why nothing is advised yet; empty where something is.
        metric: of the noise scale.
        tokens: of one unit; None where they were not counted.
        units_seen: by the run.
    """

    unit: str
    setup: Mapping[str, Any]
    present: Present
    scopes: Mapping[str, tuple[Estimate, Kind, float]]
    optimizer: str
    why_none: str = ""
    metric: str = "euclidean"
    tokens: float | None = None
    units_seen: float = 0.0


@dataclass(frozen=True)
class Answer:
    """Everything that is advised.

    Attributes:
        logged: what the log says.
        words: a sentence for each thing that advice is about; none where it is too early.
        advice: the same, with all numbers.
        trainer: its name.
        batch: that `how` and `rates` are for; None where the present one is kept.
        how: to set it, in lines.
        rates: of each group of the optimizer.
        notes: what the numbers rest on.
    """

    logged: Logged
    words: Mapping[str, str]
    advice: Mapping[str, Advice]
    trainer: str
    batch: float | None
    how: tuple[str, ...]
    rates: tuple[RateRow, ...]
    notes: tuple[str, ...]


def run_advise(options: AdviseOptions) -> int:
    """Print the advice.

    Args:
        options: of the command line.

    Returns:
        The exit status.

    Raises:
        ValueError: for a log without readings, options outside their range, or bounds that contradict each other.
    """
    _check(options)
    run = read_run(options.run)
    found = answer(run, options)
    if options.json:
        sys.stdout.write(json.dumps(_finite(dataclasses.asdict(found)), ensure_ascii=False) + "\n")
    else:
        show(found, Console(highlight=False, markup=False, emoji=False))
    return 0


def answer(run: Run, options: AdviseOptions) -> Answer:
    """What to advise: of the same log and the same options, always the same.

    Args:
        run: as its log has it.
        options: of the command line.

    Raises:
        ValueError: as `run_advise`.
    """
    logged = _logged(run, options)
    advised = {} if logged.why_none else _advised(logged, options)
    trainer = trainer_named(options.trainer) if options.trainer else str(logged.setup.get("trainer") or "plain loop")
    notes = (*_notes(logged, advised), *(_of_rl(run) if logged.unit == "prompts" else ()))
    words = {scope: f"{scope.capitalize()}, {in_words(each, logged.unit)}." for scope, each in advised.items()}
    if (chosen := _chosen(logged, advised, options)) is None:
        return Answer(logged, words, advised, trainer, None, (), (), notes)
    plan, critical = chosen
    batch = plan.whole_batch
    notes += tuple(_on_the_way(logged, batch))
    groups = logged.setup.get("optimizer_settings") or [] if logged.optimizer else []
    has_rates = trainer not in SET_THEIR_RATES
    rates = tuple(rate_row(group, batch, logged.present.batch, critical) for group in groups if has_rates)
    how = in_trainer(
        trainer,
        plan,
        unit=logged.unit,
        present=logged.present.batch,
        units_seen=logged.units_seen,
        tokens=logged.tokens,
        completions=run.probe("policy").setup.get("completions_per_prompt"),
    )
    if options.batch not in (None, batch):
        asked = f"{options.batch:,.15g} does not split well into ranks and micro-batches"
        how = (f"{asked}: this sets {count(batch)}", *how)
    return Answer(logged, words, advised, trainer, batch, how, rates, notes)


def _check(options: AdviseOptions) -> None:
    for name in ("budget", "cost_per_hour", "units_per_second", "ranks_at_most", "batch"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be positive and finite, got {value:g}")
    if options.budget is not None and options.aim == "cheapest":
        raise ValueError("--budget takes the fastest batch that keeps it, got --aim cheapest: leave out one of the two")


# What the log says.


def _logged(run: Run, options: AdviseOptions) -> Logged:
    if run.readings:
        return _of_readings(run, options)
    for reading in reversed(run.policy):
        if (known := logged_interval(reading.metrics, PROMPT_NOISE)).status != "unresolved":
            return _of_prompts(run, options, reading, known)
    raise ValueError(
        f"{run.path} has no reading of the noise scale, which advice on the batch size rests on: train on, or attach a "
        "noise-scale probe"
    )


def _of_readings(run: Run, options: AdviseOptions) -> Logged:
    last, probe = run.readings[-1], run.probe("reading")
    units, (batch, _) = last.metrics.get("gns/units_per_window"), logged_batch(last.metrics, probe.unit)
    verdict, why_none = judge_reading(last, probe), ""
    if not (batch and units) or verdict.kind == verdict.kind_now == "unknown":
        batch = units = units or 1.0
        why_none = f"{verdict.headline} {verdict.detail}"
    trains, scale = not probe.setup.get("fixed_weights"), units / batch
    scopes: dict[str, tuple[Estimate, Kind, float]] = {}
    if trains and last.average.status != "unresolved":
        n_steps = last.window - round(last.metrics.get("gns/first_step") or 1) + 1
        scopes[RUN_LIKE_THIS] = (_estimate(last.average).times(scale), verdict.kind, n_steps)
    if last.now.status != "unresolved":
        scopes[FROM_HERE_ON] = (_estimate(last.now).times(scale), verdict.kind_now, _STEPS)
    optimizer, metric = looked_up(last, probe)
    pieces = float(last.pieces.get("per_window") or 1) if trains else 1.0  # windows at fixed weights are no batches
    tokens = last.metrics.get("gns/units_per_window_tokens")
    segment = [r for r in run.readings if r.segment == last.segment]
    rates = [rate for r in segment if trains and (rate := r.metrics.get("run/units_per_second"))]
    return Logged(
        unit=probe.unit,
        setup=probe.setup,
        present=_present(probe, options, units, pieces, rates),
        scopes=scopes,
        why_none=why_none,
        optimizer=optimizer,
        metric=metric,
        tokens=tokens / units if tokens else None,
        units_seen=last.metrics.get("run/units_seen") or 0.0,
    )


def _of_prompts(run: Run, options: AdviseOptions, last: PolicyReading, noise: RatioInterval) -> Logged:
    """Of a policy whose noise scale was measured in prompts. Its level now is all that the log has."""
    probe, known = run.probe("policy"), _estimate(noise)
    batch = float(last.metrics.get("gns_prompts/prompts_per_window") or probe.setup.get("prompts_per_step") or 1)
    return Logged(
        unit="prompts",
        setup=probe.setup,
        present=_present(probe, options, batch, float(probe.setup.get("ranks") or 1), []),
        scopes={FROM_HERE_ON: (known, batch_kind(batch, known), _STEPS)},
        optimizer=str(probe.setup.get("optimizer_kind") or ""),
        units_seen=batch * last.window,
    )


def _estimate(known: RatioInterval) -> Estimate:
    return Estimate(known.ratio, known.low, known.high)


def _present(probe: ProbeSetup, options: AdviseOptions, units: float, pieces: float, rates: list[float]) -> Present:
    throughput = options.units_per_second or (statistics.median(rates) if rates else None)
    if throughput is None and options.cost_per_hour is not None:
        raise ValueError("--cost-per-hour needs the throughput, which the log lacks: pass --units-per-second too")
    ranks = int(probe.setup.get("ranks") or 1)
    most = options.ranks_at_most or ranks
    return Present(units, 0.0, max(pieces, ranks), ranks, throughput, options.cost_per_hour, most)


# What to do.


def _advised(logged: Logged, options: AdviseOptions) -> dict[str, Advice]:
    scopes = {name: scope for name, scope in logged.scopes.items() if options.budget is None or name == RUN_LIKE_THIS}
    if not scopes:
        raise ValueError("--budget is for a whole run like this one, whose average noise scale is not in the log")
    return {
        scope: advise_batch(
            dataclasses.replace(logged.present, steps=steps),
            known,
            kind,
            _factor(logged, scope),
            aim=options.aim,
            budget=options.budget,
        )
        for scope, (known, kind, steps) in scopes.items()
    }


def _factor(logged: Logged, scope: str) -> Factor:
    """The critical batch size over the noise scale."""
    if logged.unit == "prompts":
        return IN_RL["SGD" if logged.optimizer.startswith("SGD") else "Adam"]
    return factor_of(logged.optimizer, logged.metric, from_here_on=scope == FROM_HERE_ON) or PUBLISHED


def _chosen(logged: Logged, advised: Mapping[str, Advice], options: AdviseOptions) -> tuple[Plan, Range] | None:
    """The batch to say more of, the user's or the first that is better than the present, and B_crit."""
    first = next((advice for advice in advised.values() if options.batch or advice.best is not None), None)
    if first is None:
        return None
    if options.batch:
        return plan_of(dataclasses.replace(logged.present, steps=_STEPS), options.batch, first.critical), first.critical
    assert first.best is not None
    return first.best, first.critical


def _notes(logged: Logged, advised: Mapping[str, Advice]) -> Iterator[str]:
    """What the numbers rest on, in short: docs/advice.md has all of it."""
    if any(advice.factor == PUBLISHED for advice in advised.values()):
        yield "This optimizer, or this metric, was not in sonde's study: B_crit is taken to be 0.1 to 20 B_simple."
    elif advised and logged.unit != "prompts":  # of policies, the study has eight cases alone
        yield "Ranges hold about 9 times in 10, where your training is like those of the study of small tasks."
    if advised and logged.present.units_per_second is not None:
        most = plural(logged.present.ranks_at_most, "rank")
        yield f"Time: all rows, the present batch too, are on up to {most}, with perfect data parallelism."


def _on_the_way(logged: Logged, batch: float) -> Iterator[str]:
    """Whether the batch should grow while a run trains, by what the study found with this optimizer."""
    present, optimizer = logged.present.batch, logged.optimizer
    if batch < 2 * present or factor_of(optimizer, logged.metric) is None or logged.unit == "prompts":
        return
    if optimizer == "SGD (β = 0)":
        ramp = ", ".join(number(present * 2**k, 4) for k in range(int(math.log2(batch / present)) + 1))
        yield f"A new run may grow: batches of {ramp}, each for the same number of {logged.unit}."
    elif not optimizer.startswith("SGD"):
        yield "A constant batch will do: in sonde's study with AdamW and Muon, one that grew was no better."


def _of_rl(run: Run) -> Iterator[str]:
    """What the study found of policies, and what this log says of prompts and completions."""
    last = next((r for r in reversed(run.policy) if r.metrics.get("gns_prompts/completions_share") is not None), None)
    if last is not None:
        share = percent((last.metrics["gns_prompts/completions_share"] or 0.0) / 2)
        yield (
            f"Prompts or completions: twice the completions to each prompt would cut the noise of a step by {share}, "
            "twice the prompts by 50\N{NO-BREAK SPACE}%, both with twice the tokens."
        )
    yield "More prompts come first: groups of 16 completions needed 1.1 to 2.3 times the rollouts of groups of 4."
    yield "Reuse: with four updates on each batch, B_crit was 3 to 15 times as large, and the law does not hold."


def _finite(value: Any) -> Any:
    """JSON has no infinity: it becomes null."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


COMMAND = (AdviseOptions, run_advise)
