"""The entropy of a policy's responses, exact from its logits; and how entropy varies with reward and length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch.distributed as dist
from torch import nn

from sonde.parallel.model_state import preserve_training_state
from sonde.parallel.process_groups import (
    check_group,
    data_parallel_group,
    gather_from_all_ranks,
    gather_objects,
    together,
)
from sonde.policy.entropy_checks import check_is_model
from sonde.policy.scoring.rollouts import Rollouts, TokenStatistics
from sonde.policy.scoring.scorer import Scorer
from sonde.policy.scoring.token_statistics import as_statistics, check_scorable
from sonde.policy.stats.columns import OF_ENTROPY
from sonde.policy.stats.policy_entropy import PolicyEntropy, policy_entropy
from sonde.record_values import whole_number
from sonde.stats.columns import Columns, taken


class PolicyEntropyProbe:
    """Measures the entropy of a policy on its own responses, by one forward without gradients.

    Each measurement stands alone, so the probe has no state to save for a restart.

    Args:
        model: the policy: plain, compiled, in DDP or FSDP2.
        token_statistics: scores responses; by default `CausalLMStatistics`, for a causal language model of
            transformers.
        micro_batch_prompts: number of prompts scored at a time.
        process_group: the ranks that hold different responses; by default those of DDP or FSDP2.

    Raises:
        ValueError: for an argument outside its range.
    """

    METRICS: ClassVar[Columns] = OF_ENTROPY

    def __init__(
        self,
        model: nn.Module,
        *,
        token_statistics: TokenStatistics | None = None,
        micro_batch_prompts: int = 8,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        micro_batch_prompts = whole_number("micro_batch_prompts must be a whole number", micro_batch_prompts)
        check_is_model(model)
        check_group(process_group)
        self._group = data_parallel_group(model) if process_group is None else process_group
        self._model = model
        self._statistics = as_statistics(token_statistics)
        self._scorer = Scorer(model, self._statistics, micro_batch_prompts, self._group)
        self._latest: PolicyEntropy | None = None

    def measure(self, rollouts: Rollouts) -> PolicyEntropy:
        """Entropy and lengths of all ranks' responses; each rank passes its own.

        The metrics are named for the responses that the optimizer step learns from: pass those. A forecast's metrics
        have the entropy on the evaluation responses.

        Raises:
            ValueError: if this rank has no response, or if the scores are not finite.
            RuntimeError: if another rank has raised an error.
        """
        with together(self._group):
            check_scorable("the responses", rollouts, self._statistics)
            has_advantage = gather_objects(self._group, lambda: rollouts.advantage is not None)
            if any(has_advantage) and not all(has_advantage):
                raise ValueError("some ranks gave responses with advantages, and others without: give them on all")
            with preserve_training_state(self._model):
                scored = self._scorer.scored(rollouts)
            if not scored.is_finite:
                raise ValueError("the policy's scores are not finite: has the training diverged?")
            advantage = None
            if has_advantage[0]:
                own = {"advantage": rollouts.per_token("advantage").cpu()}
                advantage = gather_from_all_ranks(self._group, lambda: own)["advantage"]
        self._latest = policy_entropy(scored.log_prob, scored.entropy, scored.responses, advantage)
        return self._latest

    def metrics(self) -> Mapping[str, float | None]:
        """The latest measurement by metric name; empty before the first measurement."""
        return {} if self._latest is None else taken(OF_ENTROPY, self._latest)

    def close(self) -> None:
        """Does nothing: the probe installs no hooks."""
