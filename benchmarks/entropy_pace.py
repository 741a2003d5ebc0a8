"""Does an entropy halve when sonde says so? `python -m benchmarks.entropy_pace`.

Three tasks are trained with many seeds: the demo's GRPO run, and two policies whose entropy is known exactly. After each
measurement sonde may state in how many steps the entropy halves at its present pace. Each stated range is compared with
what then happened.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import sonde
from benchmarks.tiny_policies import Markov, Recurrent, TinyPolicy, learn, sampled, statistics
from sonde.policy.stats.forecast_point import Point, forecast_point

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
    from sonde.demos.arithmetic.options import EntropyDemoOptions
    from sonde.demos.arithmetic.run import make_trainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(EntropyDemoOptions(steps=steps, every=EVERY, seed=seed), folder)
        probe = {"entropy_probe": {"enabled": True, "every": EVERY, "micro_batch_prompts": 16}}
        probes = sonde.integrations.trl.attach(trainer, probe, evaluation_prompts=32, on_error="raise")
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("entropy_pace.json"))
    parser.add_argument("--record", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 12))
    parser.add_argument("--steps", type=int, default=300)
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = json.loads(chosen.runs.read_text()) if chosen.runs.exists() else []
    for task in chosen.record:
        for seed in range(*chosen.seeds):
            runs.append(asdict(record(task, seed, chosen.steps)))
            chosen.runs.write_text(json.dumps(runs))
            print(task, seed, [round(v, 3) for v in runs[-1]["truth"]][::6], flush=True)


if __name__ == "__main__":
    main()
