"""The noise scale of the run so far: tr Σ and |G|² of each step over the size of its gradient, then their ratio."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sonde.batch_size.stats.blocks import Block, on_host
from sonde.batch_size.stats.filter import Level
from sonde.stats.intervals import TOO_FEW_WINDOWS, fieller_interval

_FEWEST = 4
"""Fewest windows."""


def average_of_run(blocks: Sequence[Block]) -> Level:
    """Average the first series of a run, step by step.

    A block counts for all the steps that it stands for, however many of its windows were measured. Over the size |F|²,
    each step weighs by the progress that it makes (McCandlish et al. 2018, arXiv:1812.06162, appendix D).

    Args:
        blocks: of the whole run, in order.

    Returns:
        B_simple with Fieller's interval.
    """
    blocks = [block for block in blocks if block.n_windows > 1]  # a single window does not show its scatter
    n_windows = on_host([b.n_windows for b in blocks])
    if len(blocks) == 0 or n_windows.sum() < _FEWEST:
        return Level(TOO_FEW_WINDOWS)
    steps = on_host([b.n_steps for b in blocks])
    weights = steps / steps.sum()
    mean = weights @ torch.stack([b.means[0] for b in blocks])
    scatter = torch.stack([b.scatter[0] for b in blocks])
    of_blocks = scatter * (weights.square() / (n_windows * (n_windows - 1)))[:, None, None]
    covariance = of_blocks.sum(0)
    # Satterthwaite's degrees of freedom of a sum of variances, here that of |G|².
    parts = of_blocks[:, 1, 1]
    spread = float((parts.square() / (n_windows - 1)).sum())
    freedom = float(parts.sum().square()) / spread if spread > 0 else float(n_windows.sum() - len(blocks))
    trace_cov, grad_sq = mean.tolist()
    interval = fieller_interval(
        trace_cov,
        grad_sq,
        var_numerator=float(covariance[0, 0]),
        var_denominator=float(covariance[1, 1]),
        covariance=float(covariance[0, 1]),
        n_samples=max(freedom + 1.0, 2.0),
    )
    return Level(interval, trace_cov / grad_sq if interval.status == "resolved" and grad_sq > 0 else None)
