"""How often the alert on a spike of the update is raised in healthy trainings, and in such that are disturbed.

    python -m benchmarks.update_spikes [--tasks mlp digits] [--steps 3000] [--seeds 1] [--out FOLDER]

Healthy are the perceptron and the convolutional network of `benchmarks.recorded_runs`, or other tasks, with AdamW and
SGD with momentum, at a constant and at a falling rate. All windows are looked at, and every tenth, as a budget may have
it. In the middle of others, AdamW loses its state, as where a checkpoint lacks it; or a batch has 30 times the loss, so
that the gradient spikes first.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.machine import page
from benchmarks.recorded_runs import TASKS, Schedule, TaskName, rate
from sonde.batch_size.stats.norm_watch import NormWatch

SCHEDULES: tuple[Schedule, ...] = ("constant", "decay")


class Step(NamedTuple):
    """The norm of a step's gradient before the clip, by how far it moves the parameters, and its learning rate."""

    gradient: float
    update: float
    rate: float


def train(
    name: TaskName, optimizer_name: str, schedule: Schedule, n_steps: int, seed: int, disturbed: str = ""
) -> Iterator[Step]:
    """Train, and yield each step."""
    torch.manual_seed(seed)
    task = TASKS[name]()
    parameters, peak = list(task.model.parameters()), task.rates[optimizer_name]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, peak, momentum=0.9)
    if optimizer_name == "adamw":
        optimizer = torch.optim.AdamW(parameters, peak, (0.9, 0.99 if name == "lm" else 0.999))
    data = torch.Generator().manual_seed(1000 + seed)
    for step in range(n_steps):
        now = peak * rate(name, schedule, step, n_steps)
        is_middle = step == n_steps // 2
        optimizer.param_groups[0]["lr"] = now
        optimizer.zero_grad()
        (task.loss(task.draw(task.batch, data)) * (30.0 if is_middle and disturbed == "batch" else 1.0)).backward()
        gradient = float(nn.utils.clip_grad_norm_(parameters, task.max_norm))
        if is_middle and disturbed == "state":
            optimizer.state.clear()
        before = [p.detach().clone() for p in parameters]
        optimizer.step()
        squares = (float((p.detach() - b).double().square().sum()) for p, b in zip(parameters, before, strict=True))
        yield Step(gradient, math.sqrt(sum(squares)), now)


def spikes(steps: Sequence[Step]) -> int:
    """Measured windows that raise the alert."""
    watch, found, before = NormWatch(), 0, None
    for window, step in enumerate(steps, 1):
        alerts = watch.add(window, gradient=step.gradient, update_before=before, rate=step.rate)
        found += sum(name == "update_spike" for name, _ in alerts)
        before = step.update
    return found


def main() -> None:
    """Train all, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tasks", nargs="+", default=["mlp", "digits"], choices=TASKS)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, n_windows, n_false = [], 0, 0
    for name, optimizer, schedule in itertools.product(options.tasks, ("adamw", "sgd"), SCHEDULES):
        for seed in range(options.seeds):
            steps = list(train(name, optimizer, schedule, options.steps, seed))
            found = spikes(steps), spikes(steps[::10])
            n_windows, n_false = n_windows + len(steps) + len(steps[::10]), n_false + sum(found)
            rows.append(f"| {name} | {optimizer} | {schedule} | {seed} | {found[0]} | {found[1]} |")
            print(rows[-1], flush=True)
    lines = []
    for disturbed in ("state", "batch"):
        runs = [spikes(list(train("mlp", "adamw", "constant", 400, seed, disturbed))) for seed in range(10)]
        lines.append(f"| {disturbed} | {sum(n > 0 for n in runs)} of {len(runs)} |")
        print(lines[-1], flush=True)
    at_most = "" if n_false else f"; with 95 % certainty fewer than {3e4 / n_windows:.1f} in 10,000"
    tables = [
        f"Healthy trainings: {n_false} alerts in {n_windows:,} measured windows{at_most}.",
        "",
        "| task | optimizer | rate | seed | alerts, all windows | alerts, every tenth |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        "The perceptron with AdamW, disturbed at step 201 of 400:",
        "",
        "| disturbed | runs with the alert |",
        "|---|---|",
        *lines,
    ]
    (options.out / "update_spikes.md").write_text(
        page("Spikes of the update", "python -m benchmarks.update_spikes", "\n".join(tables))
    )


if __name__ == "__main__":
    main()
