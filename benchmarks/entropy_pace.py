"""Does an entropy halve when sonde says so? `python -m benchmarks.entropy_pace`.

Three tasks are trained with many seeds: the demo's GRPO run, and two policies whose entropy is known exactly. Where a
fall is clear from its scatter, sonde states after a measurement how fast the entropy fell, with an interval, and from
which step on it may have halved. Both are compared with what happened. No latest step is stated: many falls slow down,
or end.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import torch

import sonde
from benchmarks.tiny_policies import Markov, Recurrent, TinyPolicy, learn, sampled, statistics
from sonde.policy.stats.entropy_course import entropy_course
from sonde.policy.stats.forecast_point import Point, StepsKept, forecast_point
from sonde.policy.stats.policy_alerts import PolicyAlerts

EVERY = 5
"""Steps from one measurement to the next."""


@dataclass(frozen=True)
class Recorded:
    """A run: its measurements, and the true entropy at each."""

    task: str
    seed: int
    points: list[Point]
    truth: list[float]


def demo(seed: int, steps: int) -> Recorded:
    """The run of `sonde demo entropy`. Its truth is the median of three neighbouring measurements."""
    import sonde.integrations.trl
    from sonde.demos.arithmetic.run import EntropyDemoOptions, make_trainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(EntropyDemoOptions(steps=steps, every=EVERY, seed=seed), folder)
        options = sonde.EntropyChangeOptions(every=EVERY, micro_batch_prompts=16)
        probes = sonde.integrations.trl.attach(trainer, options, evaluation_prompts=32, on_error="raise")
        trainer.train()
        probes.close()
    points = [forecast_point(step, f.metrics(), reason=f.reason) for step, f in probes.forecasts]
    values = [p.entropy or 0.0 for p in points]
    return Recorded("demo", seed, points, [median(values[max(i - 1, 0) : i + 2]) for i in range(len(values))])


def tiny(task: str, policy: TinyPolicy, seed: int, steps: int, learning_rate: float) -> Recorded:
    """A tiny policy with a loop of its own."""
    assert isinstance(policy, torch.nn.Module)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.0)
    options = sonde.EntropyChangeOptions(micro_batch_prompts=16)
    probe = sonde.EntropyChangeProbe(policy, optimizer, options, token_statistics=statistics)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    points, truth = [], []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        learn(policy, sampled(policy, 8, generator))
        if (step - 1) % EVERY == 0:
            truth.append(policy.rate())
            evaluation = sampled(policy, 16, generator)
            forecast = probe.forecast(evaluation)
            points.append(forecast_point(step, forecast.metrics(), reason=forecast.reason))
        optimizer.step()
    return Recorded(task, seed, points, truth)


def record(task: str, seed: int, steps: int) -> Recorded:
    """Train a task. Seeds of the tiny policies take three learning rates in turn."""
    times = (0.5, 1.0, 2.0)[seed % 3]
    if task == "demo":
        return demo(seed, steps)
    if task == "recurrent":
        return tiny(task, Recurrent(seed), seed, steps, 1e-2 * times)
    return tiny(task, Markov(seed), seed, steps, 1.5e-2 * times)


@dataclass(frozen=True)
class Stated:
    """What sonde stated at a measurement, and what happened.

    Attributes:
        held: whether the true entropy fell as fast as the interval says, over the steps that it is about.
        earliest: steps until it may have halved.
        at_pace: steps in which it halves if the pace lasts.
        left: steps that the run still had.
        halved: steps in which the true entropy halved; None if it did not.
    """

    held: bool
    earliest: float
    at_pace: float
    left: int
    halved: int | None


def stated(run: Recorded) -> list[Stated]:
    """After each measurement of a run."""
    found, keeper = [], StepsKept()
    steps = [p.step for p in run.points]
    for i, point in enumerate(run.points):
        keeper.add(point)
        pace = entropy_course(keeper.points).pace if i else None
        if pace is None:
            continue
        begin = steps.index(steps[i] - pace.n_steps)
        logs = [math.log(t) for t in run.truth[begin : i + 1]]
        happened = linear_regression(steps[begin : i + 1], logs).slope
        later = zip(steps[i:], run.truth[i:], strict=True)
        halved = next((step - steps[i] for step, t in later if t <= run.truth[i] / 2), None)
        held = abs(happened - pace.log_per_step) <= pace.half
        found.append(Stated(held, pace.earliest, pace.halves_in, steps[-1] - steps[i], halved))
    return found


def table(runs: Sequence[Recorded]) -> list[str]:
    """A row for each task."""
    lines = [
        "| task | runs | measurements with a pace | its interval held the true fall | it did not halve before the "
        "stated step | halved, over the time at that pace: 5 %, median, 95 % of the cases that halved | did not halve "
        "within 3 times that |",
        "|---|---|---|---|---|---|---|",
    ]
    for task in sorted({run.task for run in runs}):
        own = [run for run in runs if run.task == task]
        found = [s for run in own for s in stated(run)]
        judged = [s for s in found if s.left >= s.earliest]
        n_held = sum(s.halved is None or s.halved >= s.earliest for s in judged)
        ratios = sorted(s.halved / s.at_pace for s in found if s.halved is not None)
        ends = [ratios[int(q * (len(ratios) - 1))] for q in (0.05, 0.5, 0.95)] if ratios else []
        long = [s for s in found if s.left >= 3 * s.at_pace]
        n_late = sum(s.halved is None or s.halved > 3 * s.at_pace for s in long)
        lines.append(
            f"| {task} | {len(own)} | {len(found)} of {sum(len(run.points) for run in own)} | "
            f"{_share(sum(s.held for s in found), len(found))} | {_share(n_held, len(judged))} | "
            f"{', '.join(f'{r:.2f}' for r in ends) or '–'} | {_share(n_late, len(long))} |"
        )
    return lines


def alerts(runs: Sequence[Recorded]) -> list[str]:
    """When each run was first said to be collapsing, or to have collapsed."""
    lines = [
        "| task | seed | first alert | true entropy then, of that at the start | lowest later |",
        "|---|---|---|---|---|",
    ]
    for run in runs:
        found = PolicyAlerts()
        for i, point in enumerate(run.points):
            found.add(point)
            if "entropy_collapse" in found.messages():
                then, lowest = (t / run.truth[0] for t in (run.truth[i], min(run.truth[i:])))
                lines.append(f"| {run.task} | {run.seed} | step {point.step} | {then:.2f} | {lowest:.2f} |")
                break
    return lines


def _share(n: int, of: int) -> str:
    return f"{100 * n / of:.1f} % of {of}" if of else "–"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("entropy_pace.json"), help="where runs are kept")
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--steps", type=int, nargs=3, default=(200, 1000, 1000), help="of each task")
    parser.add_argument("--page", type=Path, default=Path(__file__).parent / "results" / "entropy_pace.md")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # of other packages
    torch.set_num_threads(1)
    runs = [_from_json(run) for run in json.loads(chosen.runs.read_text())] if chosen.runs.exists() else []
    known = {(run.task, run.seed) for run in runs}
    for task, steps in zip(("demo", "recurrent", "markov"), chosen.steps, strict=True):
        for seed in range(chosen.seeds):
            if (task, seed) not in known:
                runs.append(record(task, seed, steps))
                chosen.runs.write_text(json.dumps([asdict(run) for run in runs]))
                print(task, seed, [round(v, 3) for v in runs[-1].truth[::10]], flush=True)
    lines = ["# Does an entropy halve when sonde says so?", "", "`python -m benchmarks.entropy_pace`", ""]
    lines += [
        str(__doc__).split("\n\n", 1)[1].strip(),
        "",
        *table(runs),
        "",
        "## Alerts of a collapse",
        "",
        *alerts(runs),
    ]
    chosen.page.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _from_json(run: dict[str, Any]) -> Recorded:
    kept = {f.name for f in fields(Point)} - {"own_policy", "sampler"}
    points = [Point(**{name: value for name, value in point.items() if name in kept}) for point in run["points"]]
    return Recorded(run["task"], run["seed"], points, run["truth"])


if __name__ == "__main__":
    main()
