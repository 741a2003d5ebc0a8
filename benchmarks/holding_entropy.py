"""Does the entropy hold with the coefficient that a forecast says, or without the prompts that cost it?

The run of `sonde demo entropy` trains on to a low entropy. Other runs of the same seed try to hold it at a target, each
by one rule and nothing else:

- the coefficient that `forecast.coefficient_to_hold` gives before each step, put into the next;
- the adaptive controller of TRL;
- each step without the prompts that cost most entropy, by `forecast.causes`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

import sonde
from benchmarks.machine import describe
from sonde.demos.arithmetic.run import COMPLETIONS, EntropyDemoOptions, make_trainer
from sonde.integrations import trl as integration
from sonde.integrations.guarded import WrappedMethods
from sonde.integrations.trl_rollouts import TrlRollouts
from sonde.parallel.model_state import preserve_training_state, seed_everything
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.token_statistics import CausalLMStatistics

TARGET = 1.0
"""Nats a token."""
BEGINS, COUNTS_FROM, STEPS = 20, 60, 160
"""Optimizer steps: the rules begin; entropies count from here; the end."""
RETURNS_IN = 20
"""Steps in which a rule wants the entropy back at its target."""
LAST = 40
"""Steps whose reward counts."""
_MOST_CREDIT = 0.15
"""Nats by which batches may have raised the entropy beyond what was wanted before the next one makes use of it."""
_PROMPTS = 32
WAYS = ("plain", "coefficient", "adaptive", "without")
_LABELS = {
    "plain": "nothing held",
    "coefficient": "the coefficient of the forecast",
    "adaptive": "TRL's adaptive controller, by 0.005 a step",
    "without": "without the costliest prompts",
}


@dataclass
class Step:
    """One step of a run: the entropy before it, with its standard error, and what was done."""

    step: int
    entropy: float
    se: float
    reward: float
    coefficient: float
    dropped: int = 0

    @property
    def holds_target(self) -> bool:
        """Whether the entropy's 95 % interval holds the target."""
        return abs(self.entropy - TARGET) <= 1.96 * self.se


class Watch(TrainerCallback):  # type: ignore[misc]
    """Notes each step; with a rule, sets the coefficient of the next one."""

    def __init__(self, way: str) -> None:
        self.way, self.steps = way, list[Step]()
        self.trainer: Any = None
        self.probes: Any = None
        self.dropping: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _, forecast = self.probes.forecasts[-1]
        reward = self.trainer._metrics["train"]["reward"][-1]
        dropped = 0 if self.dropping is None else self.dropping.n_dropped
        coefficient = self.probes._entropy_coefficient
        self.steps.append(Step(state.global_step, forecast.entropy, forecast.entropy_se, reward, coefficient, dropped))
        hold = forecast.coefficient_to_hold
        if self.way == "coefficient" and state.global_step >= BEGINS:
            coefficient = hold.for_change((TARGET - forecast.entropy) / RETURNS_IN)
            if coefficient is not None:
                self.trainer.entropy_coef = max(coefficient, 0.0)


class Dropping(TrainerCallback):  # type: ignore[misc]
    """Before each step, forecasts its causes, and takes the gradient again without the costliest prompts."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.n_dropped, self.balance = trainer, 0, 0.0
        self.rollouts = TrlRollouts(trainer, _PROMPTS)
        self.probe: Any = None

        def generated(original: Any, inputs: Any) -> Any:
            output = original(inputs)
            self.rollouts.generated(inputs, output)
            return output

        def micro_batch(original: Any, model: Any, inputs: Any) -> Any:
            self.rollouts.learned_from(inputs)
            return original(model, inputs)

        WrappedMethods(trainer, _generate_and_score_completions=generated, _compute_loss=micro_batch)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rollouts.begin_window()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.n_dropped = 0
        if state.global_step < BEGINS:
            return
        model, optimizer = kwargs["model"], kwargs["optimizer"].optimizer
        if self.probe is None:
            options = EntropyChangeOptions(micro_batch_prompts=_PROMPTS)
            self.probe = sonde.EntropyChangeProbe(model, optimizer, options, token_statistics=CausalLMStatistics())
        update = self.rollouts.window()
        with preserve_training_state(model):
            seed_everything(9_000_000 + state.global_step)
            chosen = self.rollouts.choose(9_000_000 + state.global_step, self.rollouts.learned_texts())
            evaluation = self.rollouts.fresh(chosen)
        forecast = self.probe.forecast(evaluation, update, causes=True)
        # A prompt's part of this step is the first of what its gradient does: the rest comes through the momentum.
        beta1 = optimizer.param_groups[0]["betas"][0]
        parts = [(cause.prompt, cause.change / (1 - beta1)) for cause in forecast.causes.prompts]
        wanted = (TARGET - forecast.entropy) / RETURNS_IN
        # Batches scatter: what earlier ones raised the entropy by beyond what was wanted, this one may lower it by.
        while parts and self.balance + sum(change for _, change in parts) < wanted:
            self.n_dropped += 1
            del parts[0]  # the costliest comes first
        self.balance = min(self.balance + sum(change for _, change in parts) - wanted, _MOST_CREDIT)
        if not self.n_dropped:
            return
        kept = torch.isin(update.prompt, torch.tensor([prompt for prompt, _ in parts], dtype=torch.long))
        model.zero_grad()
        if parts:
            rows = update.rows(kept.nonzero()[:, 0])
            s, _ = CausalLMStatistics()(model, rows)
            # The loss of dr_grpo, over the number of all completions.
            (-(rows.credit() * s).sum() / (len(update) * args.max_completion_length)).backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)


def run(way: str, seed: int) -> list[Step]:
    """Train by one rule."""
    more: dict[str, Any] = {}
    if way == "adaptive":
        more = {"use_adaptive_entropy": True, "entropy_target": TARGET}
    elif way == "coefficient":
        more = {"entropy_coef": 1e-12}  # above 0, so that TRL computes the bonus at all
    options = EntropyDemoOptions(steps=STEPS, seed=seed)
    watch = Watch(way)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(options, folder, **more)
        if way == "without":
            watch.dropping = Dropping(trainer)
            trainer.add_callback(watch.dropping)
        watch.trainer = trainer
        watch.probes = integration.attach(
            trainer,
            EntropyChangeOptions(micro_batch_prompts=_PROMPTS),
            evaluation_prompts=_PROMPTS,
            coefficient_to_hold=way == "coefficient",
            on_error="raise",
        )
        trainer.add_callback(watch)
        trainer.train()
    return watch.steps


def row(way: str, runs: Sequence[Sequence[Step]]) -> list[str]:
    """A line of the table."""
    late = [step for steps in runs for step in steps if step.step > COUNTS_FROM]
    entropies = [step.entropy for step in late]
    rewards = [[step.reward for step in steps[-LAST:]] for steps in runs]
    dropped = statistics.fmean(step.dropped for step in late)
    return [
        _LABELS[way],
        f"{statistics.fmean(entropies):.2f}",
        f"{statistics.pstdev(entropies):.2f}",
        f"{min(entropies):.2f} to {max(entropies):.2f}",
        f"{statistics.fmean(step.holds_target for step in late):.0%}",
        ", ".join(f"{statistics.fmean(each):.2f}" for each in rewards),
        f"{dropped:.1f}" if way == "without" else "–",
        f"{statistics.fmean(step.coefficient for step in late):.4f}" if way in ("coefficient", "adaptive") else "–",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[list[Step]]] = {way: [run(way, seed) for seed in range(arguments.seeds)] for way in WAYS}
    head = [
        "by",
        "entropy, mean",
        "sd",
        "range",
        "intervals that hold the target",
        f"reward of the last {LAST} steps, by seed",
        "prompts dropped a step, of 8",
        "coefficient, mean",
    ]
    text = "\n".join(
        [
            "# Holding the entropy of the demo",
            "",
            *(f"- {name}: {value}" for name, value in describe("cpu", compared=("trl", "transformers")).items()),
            "- again: `python -m benchmarks.holding_entropy`",
            "",
            f"The run of `sonde demo entropy`: 8 prompts of {COMPLETIONS} completions a step, {arguments.seeds} seeds. "
            f"The rules begin at step {BEGINS} and want {TARGET:g} nats a token. Entropies of steps {COUNTS_FROM + 1} "
            f"to {STEPS} count, each of {_PROMPTS} fresh prompts. The intervals are the entropies' own of 95 %, by "
            "standard errors over prompts.",
            "",
            *(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *(row(w, found[w]) for w in WAYS))),
            "",
        ]
    )
    print(text)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "holding_entropy.md").write_text(text)
    steps = {way: [[asdict(step) for step in steps] for steps in runs] for way, runs in found.items()}
    (arguments.out / "holding_entropy.json").write_text(json.dumps(steps) + "\n")


if __name__ == "__main__":
    main()
