"""The gradient noise of reinforcement learning, in prompts: the part from prompts and the part from completions.

A prompt's completions depend on the same prompt, so the independent unit is the prompt with its group. Prompt p adds
h_p to the gradient F = Σ h_p, and its weight in the loss is w_p. With a_p = w_p/Σw, g_p = h_p/a_p scatters about G:

    tr Σ = (variance of a prompt's expected gradient) + (variance of g_p given the prompt).

The second term is measured by splitting each group. Its halves have n₁ and n₂ effective completions and mean gradients
m₁ and m₂. Around the prompt's expectation, m₁ and m₂ scatter independently, by q₁ = 1/n₁ and q₂ = 1/n₂ times the
variance of one completion; g_p scatters by q = (w₁²q₁ + w₂²q₂)/w² times this variance. So q|m₁ − m₂|²/(q₁ + q₂)
estimates the second term without bias. (Advantages that are centred within the group couple its halves: the estimate is
too large then, by a fraction of about 1/n.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.batch_size.stats.averages import WindowsOfRun
from sonde.batch_size.stats.noise_scale import Pieces, RatioAverage, WindowEstimate
from sonde.batch_size.stats.window_row import SolvedWindow
from sonde.stats.sealed_state import Stateful

_MEMORY = 100.0
"""Windows that the completions' share is averaged over: it hardly moves as training goes on."""


@dataclass(frozen=True)
class PromptWindow:
    """The estimates of one window.

    Attributes:
        noise: tr Σ per prompt, and |G|².
        from_completions: the part of tr Σ that more completions to the same prompts would reduce; None if no prompt
            has two.
        n_prompts: number of prompts, on all ranks.
        effective_prompts: (Σw)²/Σw²; their number if they weigh the same.
    """

    noise: WindowEstimate
    from_completions: float | None
    n_prompts: int
    effective_prompts: float


def solve_prompts(sq_norms: Tensor, counts: Tensor, sq_norm_big: float) -> PromptWindow:
    """tr Σ and |G|² of one window, and the completions' part of tr Σ.

    Args:
        sq_norms: |h_p|², |h_p1|² and |h_p2|² of the gradients that a prompt and its halves add, fp64, [prompts, 3].
        counts: the halves' weights in the loss, w_p1 and w_p2, and their effective numbers of completions, n₁ and n₂
            (Kish); 0 for the second half of a single completion; fp64, [prompts, 4].
        sq_norm_big: |F|².

    Raises:
        ValueError: for fewer than 2 prompts, or a prompt without weight.
    """
    n, weight = len(counts), counts[:, :2].sum(1)
    if n < 2:
        raise ValueError(f"need at least 2 prompts to tell noise from signal, got {n}: measure more prompts")
    if not float(weight.min()) > 0:
        raise ValueError(
            f"every prompt needs a positive weight in the loss, got {float(weight.min())}: leave this prompt out"
        )
    total = float(weight.sum())
    pieces = Pieces(
        weight=total, weight_over_units=total, sq_weight_over_units=float(weight.square().sum()), n_pieces=n
    )
    within, split = None, counts[:, 3] > 0
    if bool(split.any()):
        each = _within(sq_norms[split], counts[split]) * total**2 / weight[split]
        within = float(each.sum() / weight[split].sum())
    noise = WindowEstimate(*pieces.solve(float((sq_norms[:, 0] / weight).sum()), sq_norm_big))
    return PromptWindow(noise, within, n, total**2 / pieces.sq_weight_over_units)


def _within(sq_norms: Tensor, counts: Tensor) -> Tensor:
    """The variance of each h_p given the prompt: q|m₁ − m₂|²/(q₁ + q₂), times a_p²; [prompts]."""
    (whole, s1, s2), (w1, w2, n1, n2) = sq_norms.T, counts.T
    w1, w2, q1, q2 = w1 / (w1 + w2), w2 / (w1 + w2), 1.0 / n1, 1.0 / n2
    product = 0.5 * (whole - s1 - s2)  # ⟨h₁, h₂⟩
    sq_difference = s1 / w1**2 + s2 / w2**2 - 2.0 * product / (w1 * w2)  # |m₁ − m₂|² times a_p²
    found: Tensor = (w1**2 * q1 + w2**2 * q2) / (q1 + q2) * sq_difference
    return found


class RunningPromptNoise(Stateful):
    """The windows so far: the noise scale in prompts now, by the filter, and the completions' share of the noise."""

    STATE = ("windows", "within", "n_prompts")

    def __init__(self) -> None:
        self.windows = WindowsOfRun(())
        self.n_prompts = 0
        """Prompts of the last window."""
        self.within = RatioAverage(_MEMORY)
        """The completions' part of tr Σ over tr Σ, of windows that have both."""

    @property
    def n_windows(self) -> int:
        """How many windows there were."""
        return self.windows.blocks.n_windows

    def update(self, window: PromptWindow) -> None:
        """Add one window."""
        noise = window.noise
        estimates = torch.tensor([[noise.trace_cov], [noise.grad_sq]], dtype=torch.float64)
        self.windows.add(SolvedWindow(estimates, math.nan, window.effective_prompts, 1.0), self.n_windows + 1)
        self.n_prompts = window.n_prompts
        if window.from_completions is not None:
            self.within.update(window.from_completions, noise.trace_cov)

    @property
    def completions_share(self) -> float | None:
        """The part of tr Σ from completions; None before it is known. It is not clamped, and may exceed 1."""
        return self.within.x / self.within.y if self.within.y else None
