"""Gradients of the evaluation responses' entropy, over all prompts or half of them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.optimizer_step import Direction
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.scorer import Scored, Scorer
from sonde.policy.stats.entropy_change import EntropyObjective
from sonde.policy.stats.entropy_gradient import Coefficients, on_same_prefixes_coefficients
from sonde.policy.stats.prefix_weights import prefix_weights


class EntropyGradients:
    """Takes gradients by backwards, a few prompts at a time.

    Args:
        options: the probe's options.
        scorer: runs the model over responses.
        base: E, scored at θ, with finite scores.
    """

    def __init__(self, options: EntropyChangeOptions, scorer: Scorer, base: Scored) -> None:
        self.options = options
        self._scorer = scorer
        self._base = base
        self.objective = EntropyObjective(options.objective, options.sequence_weights)

    @functools.cached_property
    def coefficients(self) -> Coefficients:
        """Those of X_n, the evaluation prompts' gradients of the entropy."""
        base = self._base
        return self.objective.coefficients(base.log_prob, base.entropy, base.responses, self.prefix_weights)

    @functools.cached_property
    def prefix_weights(self) -> Tensor | None:
        """Weights by which the evaluation responses represent the policy; None if they are its own."""
        base = self._base
        if base.sampled_log_prob is None:
            return None
        return prefix_weights(
            base.log_prob, base.sampled_log_prob, base.responses, self.options.weighting, self.options.clip_at
        )

    def entropy_gradient(self, half: Tensor | None = None) -> Direction:
        """X̄ over all prompts; or over a half of them, given as a mask of all ranks' responses."""
        return self._mean(self.coefficients, half)

    def token_entropy_gradient(self, half: Tensor) -> Direction:
        """∇H̄ over a half of the prompts: of the mean entropy of a sampled token on given prefixes, as in a bonus.

        A trainer's bonus takes its tokens as they were sampled: so this mean has no weights, whoever sampled them.
        """
        responses = self._base.responses
        mean = on_same_prefixes_coefficients(responses)
        # The tokens of a half are another number for each prompt than the tokens of all.
        tokens = responses.length * responses.share
        factor = float(tokens.mean() / responses.share.mean() / (tokens[half].sum() / responses.share[half].sum()))
        return self._mean(Coefficients(mean.on_entropy * factor, mean.on_log_prob), half)

    def gradient(
        self, rollouts: Rollouts, on_log_prob: Tensor, on_entropy: Tensor | None = None, rows: Tensor | None = None
    ) -> Direction:
        """∇ Σ (on_log_prob·s + on_entropy·H), as `Scorer.gradient` gives it."""
        return self._scorer.gradient(rollouts, on_log_prob, on_entropy, rows=rows, dtype=self.options.buffer_dtype)

    def put_away(self, direction: Direction) -> Direction:
        """The direction on the CPU, with offload=True."""
        return {p: v.cpu() for p, v in direction.items()} if self.options.offload else direction

    def at_work(self, direction: Direction) -> Direction:
        """The direction on the parameters' devices and in their dtypes, of 32 bits at least."""
        return {p: v.to(p.device, torch.promote_types(p.dtype, torch.float32)) for p, v in direction.items()}

    def _mean(self, coefficients: Coefficients, half: Tensor | None) -> Direction:
        base = self._base
        share = base.responses.share
        n_prompts = float(share.sum() if half is None else share[half].sum())
        on_log_prob = base.own(coefficients.on_log_prob) / n_prompts
        on_entropy = base.own(coefficients.on_entropy) / n_prompts
        return self.gradient(base.rollouts, on_log_prob, on_entropy, None if half is None else half[base.rows])
