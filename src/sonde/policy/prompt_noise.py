"""Is my number of prompts right? The gradient noise scale of reinforcement learning, in prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonde.batch_size.stats.noise_scale import effective_units
from sonde.parallel.process_groups import data_parallel_group, gather_from_all_ranks
from sonde.parallel.wrappers import unwrap_model
from sonde.policy.scoring.prompt_norms import NestedNorms
from sonde.policy.scoring.rollouts import Rollouts, TokenStatistics
from sonde.policy.scoring.scorer import Scorer
from sonde.policy.scoring.token_statistics import CausalLMStatistics
from sonde.policy.scoring.training_state import preserve_training_state
from sonde.policy.stats.prompt_noise import PromptNorms, RunningPromptNoise, solve_prompts
from sonde.stats.intervals import Status


@dataclass(frozen=True)
class PromptNoiseReading:
    """What is known of the noise scale in prompts.

    Attributes:
        b_simple: B_simple = tr Σ/|G|² in prompts; None unless resolved.
        low: lower end of its 95 % interval; None when unresolved.
        high: upper end; infinite for a lower bound.
        status: "resolved", "lower_bound" or "unresolved".
        reason: why it is not resolved; empty when it is.
        trace_cov: running tr Σ of one prompt; None before the first window.
        grad_sq: running |G|², which may be negative.
        completions_share: the part of tr Σ that more completions to each prompt would reduce; the rest only more
            prompts do. None where no prompt has two completions.
        prompts_per_window: in the last window, of all ranks.
        windows: windows averaged.
    """

    b_simple: float | None
    low: float | None
    high: float | None
    status: Status
    reason: str
    trace_cov: float | None
    grad_sq: float | None
    completions_share: float | None
    prompts_per_window: int
    windows: int


class PromptNoiseProbe:
    """Measures the noise scale of a policy gradient in prompts, and how much of it is from completions.

    Trainers shuffle a prompt's completions over micro-batches, which are no independent samples then. This probe takes
    a forward and a backward of its own for each half of every prompt's group: call it in some windows, not in all. It
    holds two vectors of parameter size meanwhile.

    Args:
        model: plain or in DDP.
        token_statistics: scores responses; by default that of a causal language model of transformers.
        weighs: "completions" where each adds to the loss as it is, or is averaged over its own tokens; "tokens" where
            the loss is divided by the number of all tokens, so that long responses weigh more.
        horizon: of the exponential average, in windows measured.
        process_group: ranks that hold responses of their own; by default DDP's.

    Raises:
        ValueError: for an argument outside its range, or a sharded model.

    Reference:
        docs/batch-size.md; McCandlish et al. 2018, arXiv:1812.06162, for the noise scale.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        token_statistics: TokenStatistics | None = None,
        weighs: Literal["completions", "tokens"] = "completions",
        horizon: float = 100.0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if weighs not in ("completions", "tokens"):
            raise ValueError(f"weighs must be 'completions' or 'tokens', got {weighs!r}")
        self._running = RunningPromptNoise(horizon)
        self._model = model
        self._statistics = CausalLMStatistics() if token_statistics is None else token_statistics
        self._weighs = weighs
        self._group = data_parallel_group(model) if process_group is None else process_group
        self._scorer = Scorer(model, self._statistics, 1, self._group)
        self._is_repeatable = False
        self._n_prompts = 0

    def measure(self, rollouts: Rollouts) -> PromptNoiseReading:
        """Add one window: the responses that this rank learns from, with advantages.

        All completions of a prompt must be on one rank.

        Raises:
            ValueError: without advantages, at another temperature than they are scored at, when two ranks hold
                completions of one prompt, or when two forwards of the model do not agree.
        """
        norms = NestedNorms(self._model)
        if not self._is_repeatable:
            with preserve_training_state(self._model):
                self._scorer.check_repeatable(rollouts)
            self._is_repeatable = True
        temperature = getattr(self._statistics, "temperature", rollouts.temperature)

        def work() -> dict[str, Tensor]:
            if rollouts.temperature != temperature:
                raise ValueError(
                    f"responses were sampled at temperature {rollouts.temperature}, and are scored at {temperature}: "
                    f"token_statistics=CausalLMStatistics(temperature={rollouts.temperature})"
                )
            credit = rollouts.credit()
            with preserve_training_state(self._model):
                rows = [self._one_prompt(norms, rollouts, credit, index) for index in rollouts.order(1)]
            return {
                "prompt": torch.tensor([int(rollouts.prompt[index[0]]) for index in rollouts.order(1)]),
                "norms": torch.tensor(rows, dtype=torch.float64),
            }

        found = gather_from_all_ranks(self._group, work)
        sq_norm_big = float(norms.reduce_all(self._group))
        if len(found["prompt"].unique()) < len(found["prompt"]):
            raise ValueError("completions of one prompt are on several ranks: its group must be whole on one of them")
        window = solve_prompts([_norms_of(row) for row in found["norms"].tolist()], sq_norm_big)
        self._n_prompts = len(found["prompt"])
        self._running.update(window)
        return self.reading()

    def reading(self) -> PromptNoiseReading:
        """What is known now."""
        noise = self._running.noise
        interval = noise.interval()
        resolved = interval.status == "resolved"
        trace_cov, grad_sq = noise.trace_cov, noise.grad_sq
        return PromptNoiseReading(
            b_simple=trace_cov / grad_sq if resolved and trace_cov is not None and grad_sq else None,
            low=interval.low,
            high=interval.high,
            status=interval.status,
            reason=interval.reason,
            trace_cov=trace_cov,
            grad_sq=grad_sq,
            completions_share=self._running.completions_share,
            prompts_per_window=self._n_prompts,
            windows=noise.windows,
        )

    def metrics(self) -> Mapping[str, float | None]:
        """The reading by metric name; empty before the first window."""
        found = self.reading()
        if not found.windows:
            return {}
        return {
            "gns_prompts/b_simple": found.b_simple,
            "gns_prompts/b_simple_low": found.low,
            "gns_prompts/b_simple_high": None if found.high == math.inf else found.high,
            "gns_prompts/grad_sq": found.grad_sq,
            "gns_prompts/trace_cov": found.trace_cov,
            "gns_prompts/completions_share": found.completions_share,
            "gns_prompts/prompts_per_window": float(found.prompts_per_window),
        }

    def close(self) -> None:
        """Nothing is held."""

    def _one_prompt(self, norms: NestedNorms, rollouts: Rollouts, credit: Tensor, index: Tensor) -> list[float]:
        """|h|², |h₁|², |h₂|², w₁, w₂, n₁, n₂; one completion is a first half without a second."""
        halves = [half for half in (index[::2], index[1::2]) if len(half)]

        def objective(half: Tensor) -> Tensor:
            s, _ = self._statistics(unwrap_model(self._model), rollouts.rows(half))
            mask = rollouts.mask[half].bool().to(s.device)
            total: Tensor = (credit[half].to(s) * torch.where(mask, s, 0.0)).sum()
            return total

        whole, squares = norms.add_whole(objective, halves)
        weights = [self._row_weights(rollouts, half) for half in halves]
        sq_norms = [float(square) for square in squares]
        w, n = [sum(each) for each in weights], [effective_units(each) for each in weights]
        if len(halves) == 1:
            for column in (sq_norms, w, n):
                column.append(0.0)
        return [float(whole), *sq_norms, *w, *n]

    def _row_weights(self, rollouts: Rollouts, rows: Tensor) -> list[float]:
        if self._weighs == "completions":
            return [1.0] * len(rows)
        lengths: list[float] = rollouts.mask[rows].sum(1).double().tolist()
        return lengths


def _norms_of(row: list[float]) -> PromptNorms:
    whole, s1, s2, w1, w2, n1, n2 = row
    if not n2:
        return PromptNorms(whole, w1)
    return PromptNorms(whole, w1 + w2, (s1, s2), (w1, w2), (n1, n2))
