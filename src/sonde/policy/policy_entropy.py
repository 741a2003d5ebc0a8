"""The entropy of a policy's responses, exact from its logits; and how entropy varies with reward and length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist
from torch import nn

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
from sonde.policy.scoring.training_state import preserve_training_state
from sonde.policy.stats.policy_entropy import QUANTILES, PolicyEntropy, policy_entropy
from sonde.probe import Metric, Partners
from sonde.record_values import whole_number


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

    METRICS: ClassVar[Mapping[str, Metric]] = {
        "entropy/update_token_weighted": Metric("nats a token", "entropy of responses, each token weighing the same"),
        "entropy/update_token_weighted_se": Metric("nats a token", "standard error of this entropy, over prompts"),
        "entropy/update_token_weighted_surprise_sd": Metric("nats", "scatter of −log π around it; almost 0 if uniform"),
        "entropy/update_sequence_weighted": Metric("nats a token", "entropy of responses, each weighing the same"),
        "entropy/update_response_sd": Metric("nats a token", "scatter of a response's mean entropy, over responses"),
        **{
            f"entropy/update_response_q{q:02}": Metric("nats a token", f"mean entropy of a response: {q} % have less")
            for q in QUANTILES
        },
        "entropy/update_sequence_sum": Metric("nats a response", "entropy of a whole response"),
        "entropy/update_advantage_correlation": Metric("ratio", "correlation of a response's entropy and advantage"),
        "entropy/update_advantage_correlation_low": Metric("ratio", "lower end of that correlation's 95 % interval"),
        "entropy/update_advantage_correlation_high": Metric("ratio", "upper end of that correlation's 95 % interval"),
        "entropy/update_cov_log_prob_advantage": Metric("nats · advantage", "Cov(log π, A) over sampled tokens"),
        "length/update_mean": Metric("tokens", "mean length of a response"),
        "length/update_sd": Metric("tokens", "standard deviation of the length over responses"),
        "length/update_longest": Metric("tokens", "length of the longest response"),
        "length/update_at_limit": Metric("fraction", "share of responses that are as long as the mask is wide"),
    }

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
            ValueError: if this rank has no response, if the responses are scored at another temperature than they were
                sampled at, or if the scores are not finite.
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
        if (latest := self._latest) is None:
            return {}
        correlation = latest.advantage_correlation
        return {
            "entropy/update_token_weighted": latest.token_weighted,
            "entropy/update_token_weighted_se": latest.token_weighted_se,
            "entropy/update_token_weighted_surprise_sd": latest.surprise_sd,
            "entropy/update_sequence_weighted": latest.sequence_weighted,
            "entropy/update_response_sd": latest.response_sd,
            **{f"entropy/update_response_q{q:02}": value for q, value in latest.response_quantiles.items()},
            "entropy/update_sequence_sum": latest.sequence_sum,
            "entropy/update_advantage_correlation": correlation.r if correlation else None,
            "entropy/update_advantage_correlation_low": correlation.low if correlation else None,
            "entropy/update_advantage_correlation_high": correlation.high if correlation else None,
            "entropy/update_cov_log_prob_advantage": latest.log_prob_advantage,
            "length/update_mean": latest.mean_length,
            "length/update_sd": latest.sd_length,
            "length/update_longest": float(latest.longest),
            "length/update_at_limit": latest.at_limit,
        }

    def close(self) -> None:
        """Does nothing: the probe installs no hooks."""


@dataclass(frozen=True)
class PolicyEntropyProbeConfig:
    """`policy_entropy_probe:` in a configuration.

    Attributes:
        enabled: whether the probe is wanted.
        micro_batch_prompts: prompts scored at a time.
        temperature: at which responses are scored, where `attach` is given no token statistics; None for that of the
            responses.
    """

    enabled: bool = False
    micro_batch_prompts: int = 8
    temperature: float | None = None

    def attach(self, partners: Partners) -> PolicyEntropyProbe:
        """Make the probe."""
        return PolicyEntropyProbe(
            partners.model,
            token_statistics=as_statistics(partners.token_statistics, self.temperature),
            micro_batch_prompts=self.micro_batch_prompts,
            process_group=partners.process_group,
        )
