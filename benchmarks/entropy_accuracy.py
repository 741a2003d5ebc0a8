"""Accuracy of forecasts of the entropy's change, along a real GRPO run: the run of `sonde demo entropy`."""

from __future__ import annotations

import math
import tempfile
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import sonde
from sonde.demos.arithmetic.run import COMPLETIONS, EntropyDemoOptions, make_trainer
from sonde.parallel.model_state import preserve_training_state, seed_everything
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.optimizer_step import forecast_step, taken
from sonde.policy.scoring.scorer import Scored, Scorer
from sonde.policy.scoring.token_statistics import CausalLMStatistics
from sonde.policy.stats.entropy_change import EntropyObjective
from sonde.policy.stats.importance import resampled_change

SCALES = (1.0, 0.1)
WAYS = ("finite step", "first order")


@dataclass(frozen=True)
class Plan:
    """The size of the measurement.

    Attributes:
        steps: the optimizer steps that are measured, counted from 0.
        batches: number of independent evaluation batches at each step.
        prompts: number of prompts in a batch, drawn with replacement from all sums: a standard error assumes
            independent prompts.
        truths: number of independent measurements of the step's effect, by fresh rollouts to all sums.
        responses: number of responses to each sum in each of these measurements.
    """

    steps: tuple[int, ...] = (0, *range(20, 121, 5))
    batches: int = 8
    prompts: int = 32
    truths: int = 8
    responses: int = 16


@dataclass(frozen=True)
class Trial:
    """One forecast and its truth.

    Attributes:
        step: the optimizer step.
        scale: factor of this step.
        how: "finite step", or "first order" by derivatives along the step.
        delta: the change, in nats a token.
        se: its standard error.
        low: lower end of its interval.
        high: upper end.
        is_valid: whether the forecast reports that it is to be trusted.
        truth: the change by fresh rollouts to all prompts.
        truth_se: standard error of the truth, by independent repeats.
    """

    step: int
    scale: float
    how: str
    delta: float
    se: float
    low: float
    high: float
    is_valid: bool
    truth: float
    truth_se: float

    def held(self, low: float, high: float) -> bool:
        """Whether an interval held the truth. The truth's own standard error widens the interval."""
        end = low if self.truth < self.delta else high
        return abs(self.truth - self.delta) <= math.hypot(end - self.delta, 1.96 * self.truth_se)


def trials(plan: Plan) -> list[Trial]:
    """Train, and at each of the plan's steps forecast and measure its effect, whole and scaled down."""
    from transformers import TrainerCallback

    found: list[Trial] = []

    class Measuring(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in plan.steps:
                found.extend(_at_step(trainer, kwargs["optimizer"], state.global_step, plan))

    options = EntropyDemoOptions(steps=max(plan.steps) + 1)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(options, folder)
        trainer.add_callback(Measuring())
        trainer.train()
    return found


def _at_step(trainer: Any, optimizer: Any, step: int, plan: Plan) -> list[Trial]:
    model = trainer.model
    optimizer = getattr(optimizer, "optimizer", optimizer)
    probe = sonde.EntropyChangeProbe(model, optimizer, EntropyChangeOptions(micro_batch_prompts=16))
    rates = [group["lr"] for group in optimizer.param_groups]
    found = []
    with preserve_training_state(model):
        batches = []
        for k in range(plan.batches):
            seed_everything(1000 * step + k)
            drawn = torch.randint(len(trainer.train_dataset), (plan.prompts,)).tolist()
            batches.append(_respond(trainer, drawn, COMPLETIONS))
        before = _everything(trainer, step, plan)
        for scale in SCALES:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = scale * rate  # a step of AdamW, decay included, is proportional to it
            forecasts = [probe.forecast(batch, causes=True) for batch in batches]
            with taken(forecast_step(optimizer, of=list(model.parameters())), model):
                after = _everything(trainer, step, plan)
            truths = [
                resampled_change(b, a, EntropyObjective("per_token")).delta for b, a in zip(before, after, strict=True)
            ]
            truth, truth_se = float(np.mean(truths)), float(np.std(truths, ddof=1) / math.sqrt(len(truths)))
            for f in forecasts:
                for how, estimate in (("finite step", f.finite_step), ("first order", f.first_order)):
                    found.append(
                        Trial(
                            step=step,
                            scale=scale,
                            how=how,
                            **asdict(estimate),
                            is_valid=f.is_valid,
                            truth=truth,
                            truth_se=truth_se,
                        )
                    )
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    return found


def _everything(trainer: Any, step: int, plan: Plan) -> list[Scored]:
    """Responses to all sums, several times over, with the same random numbers in each call for one step."""
    scorer = Scorer(trainer.model, CausalLMStatistics(), 100, None)
    found = []
    for k in range(plan.truths):
        seed_everything(7_000_000 + 1000 * step + k)
        found.append(scorer.scored(_respond(trainer, list(range(len(trainer.train_dataset))), plan.responses)))
    return found


@torch.no_grad()
def _respond(trainer: Any, rows: list[int], n_each: int) -> sonde.Rollouts:
    """Responses with the model's own probabilities and torch's random numbers; each row is a separate prompt."""
    tokens = trainer.processing_class
    texts = [trainer.train_dataset[i]["prompt"] for i in rows for _ in range(n_each)]
    prompts = tokens(texts, return_tensors="pt", padding=True)
    ids, attention = prompts["input_ids"], prompts["attention_mask"]
    mask = []
    is_over = torch.zeros(len(ids), dtype=torch.bool)
    width = ids.shape[1]
    for _ in range(trainer.max_completion_length):
        logits = _next(trainer.model, ids, attention)
        # Inverse transform: a small change of the policy changes few tokens.
        chosen = (logits.double().softmax(-1).cumsum(-1) < torch.rand(len(ids), 1, dtype=torch.float64)).sum(-1)
        chosen = torch.where(is_over, tokens.pad_token_id, chosen.clamp(max=logits.shape[-1] - 1))
        mask.append(~is_over)
        ids = torch.cat([ids, chosen[:, None]], 1)
        attention = torch.cat([attention, (~is_over).long()[:, None]], 1)
        is_over = is_over | (chosen == tokens.eos_token_id)
    assert ids.shape[1] == width + len(mask)
    numbers = torch.arange(len(rows)).repeat_interleave(n_each)
    return sonde.Rollouts({"input_ids": ids, "attention_mask": attention}, torch.stack(mask, 1), numbers)


def _next(model: nn.Module, ids: Tensor, attention: Tensor) -> Tensor:
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    logits: Tensor = model(input_ids=ids, attention_mask=attention, position_ids=positions).logits[:, -1]
    return logits


def summary(found: list[Trial]) -> dict[str, Any]:
    """Summary of the trials by scale and way; step 0 separately."""
    return {
        "by_scale": {
            str(scale): {
                how: _summary([t for t in found if (t.scale, t.how) == (scale, how) and t.step > 0]) for how in WAYS
            }
            for scale in SCALES
        },
        "at_step_0": _summary([t for t in found if (t.scale, t.how) == (1.0, "finite step") and t.step == 0]),
        "trials": [asdict(t) for t in found],
    }


def _summary(some: list[Trial]) -> dict[str, Any]:
    clear = [t for t in some if abs(t.delta) > 2 * t.se]
    trusted = [t for t in some if t.is_valid]
    return {
        "forecasts": len(some),
        "trusted": len(trusted),
        "clear": len(clear),
        "sign_agreement": _share([t.delta * t.truth > 0 for t in clear]),
        "correlation": _correlation(some),
        "coverage": _share([t.held(t.low, t.high) for t in some]),
        "median_size": float(np.median([abs(t.truth) for t in some])),
        "median_se": float(np.median([t.se for t in some])),
        "median_truth_se": float(np.median([t.truth_se for t in some])),
    }


def _share(which: list[bool]) -> float | None:
    return sum(which) / len(which) if which else None


def _correlation(some: list[Trial]) -> float | None:
    if len(some) < 3:
        return None
    return float(np.corrcoef([t.delta for t in some], [t.truth for t in some])[0, 1])
