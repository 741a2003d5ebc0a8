"""Ratios of weighted means over prompts, and how much they change from one policy to another, with a standard error.

The value and the weight of a prompt are means over its responses. A rate is a sum of ratios, one for each column:

    R = Σ_k mean_n(value_nk)/mean_n(weight_nk)

Entropy per token has one column: Σ H over the tokens, and their number. The entropy of a whole response has one column
for each position, so that every position has weights of mean 1 of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class WeightedSums:
    """What one policy's rate is made of.

    Attributes:
        value: weighted values, fp64, [prompts, columns].
        weight: the weights, fp64, at least 0, [prompts, columns]. A common factor of a column's values and weights
            changes nothing.
    """

    value: Tensor
    weight: Tensor

    def ratios(self) -> Tensor:
        """The ratio of each column, [columns]."""
        return self.value.sum(0) / self.weight.sum(0)

    def ratios_without_each(self) -> Tensor:
        """The ratios of all other prompts, [prompts, columns]."""
        return (self.value.sum(0) - self.value) / (self.weight.sum(0) - self.weight)


@dataclass(frozen=True)
class RateChange:
    """The rate after an update minus the rate before it.

    Attributes:
        delta: the change.
        se: its standard error, by leaving out one prompt after the other (the jackknife); None with fewer than 2
            prompts, or where one prompt has all the weight.
        per_prompt: each prompt's share, [prompts]; their mean is `delta`.
        without_each: the change without each prompt, [prompts]; not finite where this prompt has all the weight.
        n_effective: effective number of prompts after the update, (Σw)²/Σw²; their number if they weigh the same.
    """

    delta: float
    se: float | None
    per_prompt: Tensor
    without_each: Tensor
    n_effective: float

    @property
    def degrees_of_freedom(self) -> float:
        """Of the standard error, for Student's t: one less than the effective number of prompts, and at least 1."""
        return max(self.n_effective - 1.0, 1.0)


def rate_change(before: WeightedSums, after: WeightedSums) -> RateChange:
    """How much a rate changes, if the same prompts, or even the same responses, give it before and after.

    What both have in common cancels in each prompt's difference. The standard error comes from these differences. Its
    degrees of freedom fall with the effective number of prompts: a few large weights make the scatter itself uncertain.
    """
    old, new = before.ratios(), after.ratios()
    # A prompt's share is how far its values lie above the old ratio: 0 on average before, the change on average after.
    shares = (after.value - old * after.weight) / after.weight.mean(0)
    shares = shares - (before.value - old * before.weight) / before.weight.mean(0)
    weight = (after.weight / after.weight.mean(0)).sum(1)
    without_each = (after.ratios_without_each() - before.ratios_without_each()).sum(1)
    variance = jackknife_covariance(without_each, without_each)
    return RateChange(
        float((new - old).sum()),
        None if variance is None else math.sqrt(variance),
        shares.sum(1),
        without_each,
        float(weight.sum().square() / weight.square().sum()),
    )


def effective_number(without_each: Tensor) -> float:
    """How many prompts carry the jackknife's variance, (Σd²)²/Σd⁴: a third of all if they are normal, and at least 1.

    As degrees of freedom they allow for the scatter itself being uncertain where a few prompts make most of it.

    Args:
        without_each: the estimate without each prompt, [prompts].
    """
    squares = (without_each - without_each.mean()).square()
    fourth = float(squares.square().sum())
    return max(float(squares.sum()) ** 2 / fourth, 1.0) if fourth else 1.0


def jackknife_covariance(a: Tensor, b: Tensor) -> float | None:
    """The covariance of two estimates, from both without each prompt; None with fewer than 2, or if any is not finite.

    Args:
        a: the first estimate without each prompt, [prompts].
        b: the second, [prompts].
    """
    n = len(a)
    if n < 2 or not bool((a.isfinite() & b.isfinite()).all()):
        return None
    return float(((a - a.mean()) * (b - b.mean())).sum()) * (n - 1) / n
