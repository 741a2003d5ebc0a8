"""Is my number of prompts right? The gradient noise scale of reinforcement learning, in prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonde.batch_size.stats.noise_scale import effective_units
from sonde.parallel.process_groups import data_parallel_group, gather_from_all_ranks
from sonde.parallel.unwrap import unwrap_model
from sonde.policy.scoring.prompt_norms import NestedNorms
from sonde.policy.scoring.rollouts import Rollouts, TokenStatistics
from sonde.policy.scoring.scorer import Scorer
from sonde.policy.scoring.token_statistics import CausalLMStatistics
from sonde.policy.scoring.training_state import preserve_training_state
from sonde.policy.stats.prompt_noise import PromptNorms, RunningPromptNoise, solve_prompts
from sonde.probe import Metric
from sonde.stats.intervals import Status


@dataclass(frozen=True)
class PromptNoiseReading:
    """The noise scale in prompts, as far as it is known: a running average, which lags while training moves.

    Attributes:
        b_simple: B_simple = tr Σ/|G|² in prompts; None unless resolved.
        low: lower end of its 95 % interval; 0 for an upper bound, None if unresolved.
        high: upper end; infinite for a lower bound, None if unresolved.
        status: "resolved", "lower_bound" (B_simple > low), "upper_bound" (B_simple < high) or "unresolved".
        reason: why B_simple is not resolved; empty if it is.
        trace_cov: running tr Σ of one prompt; None before the first window.
        grad_sq: running |G|², which may be negative; None before the first window.
        completions_share: the part of tr Σ that more completions to each prompt would reduce. Only more prompts reduce
            the rest. None if no prompt has two completions.
        prompts_per_window: number of prompts in the last window, on all ranks.
        windows: number of windows averaged.
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
    """Measures the noise scale of a policy gradient in prompts, and the completions' part of it.

    Trainers shuffle a prompt's completions over micro-batches, so micro-batches are not independent samples. This probe
    runs its own forward and backward for each half of every prompt's group: call it in some windows, not in all. During
    a measurement it holds two vectors of parameter size.

    Its noise scale is the ratio of two exponential averages over the measured windows. It is not the noise scale now,
    as a reading of `sonde.attach` is: while |G|² shrinks, old windows outweigh new ones, and the ratio lags.

    Args:
        model: the policy: plain or in DDP.
        token_statistics: scores responses; by default `CausalLMStatistics`, for a causal language model of
            transformers.
        weighs: "completions" if every completion has the same weight in the loss: as a sum, or as a mean over its own
            tokens. "tokens" if the loss is divided by the number of all tokens, so that long responses weigh more.
        horizon: length of the exponential averages, in measured windows. A shorter one lags less and is noisier.
        process_group: the ranks that hold different responses; by default those of DDP.

    Raises:
        ValueError: for an argument outside its range, or a sharded model.

    Reference:
        docs/batch-size.md; McCandlish et al. 2018, arXiv:1812.06162, for the noise scale.
    """

    METRICS: ClassVar[Mapping[str, Metric]] = {
        "gns_prompts/b_simple": Metric("prompts", "gradient noise scale tr Σ/|G|² in prompts, running average"),
        "gns_prompts/b_simple_low": Metric("prompts", "lower end of the noise scale's 95 % interval"),
        "gns_prompts/b_simple_high": Metric("prompts", "upper end of the noise scale's 95 % interval, if there is one"),
        "gns_prompts/grad_sq": Metric("gradient²", "squared norm of the true gradient |G|², unclamped"),
        "gns_prompts/trace_cov": Metric("gradient² · prompts", "variance of one prompt's gradient, tr Σ"),
        "gns_prompts/completions_share": Metric("fraction", "part of tr Σ that more completions a prompt would reduce"),
        "gns_prompts/prompts_per_window": Metric("prompts", "prompts in a window"),
    }

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
            ValueError: without responses or advantages; if responses are scored at another temperature than they were
                sampled at; if two ranks hold completions of one prompt; or if two forwards of the model do not agree.
        """
        norms = NestedNorms(self._model)
        self._scorer.on_all_ranks(rollouts.check_not_empty)
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

        rows = gather_from_all_ranks(self._group, work)
        sq_norm_big = float(norms.reduce_all(self._group))
        if len(rows["prompt"].unique()) < len(rows["prompt"]):
            raise ValueError("completions of one prompt are on several ranks: its group must be whole on one of them")
        window = solve_prompts([_prompt_norms(row) for row in rows["norms"].tolist()], sq_norm_big)
        self._n_prompts = len(rows["prompt"])
        self._running.update(window)
        return self.reading()

    def reading(self) -> PromptNoiseReading:
        """The noise scale so far."""
        noise = self._running.noise
        interval = noise.interval()
        is_resolved = interval.status == "resolved"
        trace_cov, grad_sq = noise.trace_cov, noise.grad_sq
        return PromptNoiseReading(
            b_simple=trace_cov / grad_sq if is_resolved and trace_cov is not None and grad_sq else None,
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
        reading = self.reading()
        if not reading.windows:
            return {}
        return {
            "gns_prompts/b_simple": reading.b_simple,
            "gns_prompts/b_simple_low": reading.low,
            "gns_prompts/b_simple_high": None if reading.high == math.inf else reading.high,
            "gns_prompts/grad_sq": reading.grad_sq,
            "gns_prompts/trace_cov": reading.trace_cov,
            "gns_prompts/completions_share": reading.completions_share,
            "gns_prompts/prompts_per_window": float(reading.prompts_per_window),
        }

    def close(self) -> None:
        """Does nothing: the probe installs no hooks."""

    def _one_prompt(self, norms: NestedNorms, rollouts: Rollouts, credit: Tensor, index: Tensor) -> list[float]:
        """|h|², |h₁|², |h₂|², w₁, w₂, n₁, n₂. A single completion is the first half, and the second half is 0."""
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


def _prompt_norms(row: list[float]) -> PromptNorms:
    whole, s1, s2, w1, w2, n1, n2 = row
    if not n2:
        return PromptNorms(whole, w1)
    return PromptNorms(whole, w1 + w2, (s1, s2), (w1, w2), (n1, n2))
