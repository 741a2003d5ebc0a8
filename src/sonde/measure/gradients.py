"""What is kept of a gradient: its squared norm per parameter, and the witness's elements."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GradientSummary:
    """What is kept of one gradient.

    Attributes:
        sq_norms: squared norm per parameter in some `Metric`, 0 where it has none; [parameters].
        witness: the witness's elements, [witness.size].
    """

    sq_norms: Tensor
    witness: Tensor

    def scaled(self, factor: Tensor) -> GradientSummary:
        """The summary of `factor` times the gradient; factor: 0-dim."""
        return GradientSummary(sq_norms=self.sq_norms * factor.square(), witness=self.witness * factor)
