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
from sonde.policy.stats.entropy_gradient import Coefficients
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
        return prefix_weights(base.log_prob, base.sampled_log_prob, base.responses, *self.options.weights)

    def entropy_gradient(self, half: Tensor | None = None) -> Direction:
        """X̄ over all prompts; or over a half of them, given as a mask of all ranks' responses."""
        return self.mean(self.coefficients, half)

    def gradient(
        self, rollouts: Rollouts, on_log_prob: Tensor, on_entropy: Tensor | None = None, rows: Tensor | None = None
    ) -> Direction:
        """∇ Σ (on_log_prob·s + on_entropy·H), as `Scorer.gradient` gives it."""
        dtype = self.options.gradients.buffer_dtype
        assert isinstance(dtype, torch.dtype)
        return self._scorer.gradient(rollouts, on_log_prob, on_entropy, rows=rows, dtype=dtype)

    def put_away(self, direction: Direction) -> Direction:
        """The direction on the CPU, with offload."""
        return {p: v.cpu() for p, v in direction.items()} if self.options.gradients.offload else direction

    def at_work(self, direction: Direction) -> Direction:
        """The direction on the parameters' devices and in their dtypes, of 32 bits at least."""
        return {p: v.to(p.device, torch.promote_types(p.dtype, torch.float32)) for p, v in direction.items()}

    def mean(self, coefficients: Coefficients, half: Tensor | None = None) -> Direction:
        """The gradient of coefficients, a mean over all prompts or over a half of them."""
        base = self._base
        share = base.responses.share
        n_prompts = float(share.sum() if half is None else share[half].sum())
        on_log_prob = base.own(coefficients.on_log_prob) / n_prompts
        on_entropy = base.own(coefficients.on_entropy) / n_prompts
        return self.gradient(base.rollouts, on_log_prob, on_entropy, None if half is None else half[base.rows])
