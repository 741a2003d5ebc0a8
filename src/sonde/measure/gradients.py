"""What is kept of a gradient: its squared norm per parameter, and the witness's elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.measure.metric import Metric
from sonde.measure.norms import Part, add_squares
from sonde.measure.witness import Witness


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


def summarize(
    grads: Sequence[Tensor | None], witness: Witness, metric: Metric, device: torch.device
) -> GradientSummary:
    """Read whole gradients, one per parameter.

    Args:
        grads: in the parameters' order, None where there is none; they may live on several devices.
        witness: which elements to copy.
        metric: how they are squared.
        device: where the summary goes.
    """
    present = [(i, g) for i, g in enumerate(grads) if g is not None]
    parts: list[Part] = []
    for where in dict.fromkeys(g.device for _, g in present):
        here = [(i, g) for i, g in present if g.device == where]
        indices = tuple(i for i, _ in here)
        parts.append((indices, metric.sq_norms(indices, [g for _, g in here]).sqrt_()))
    read = {i: witness.read(i, g) for i, g in present if i in witness}
    return GradientSummary(add_squares(len(grads), parts, device), witness.join(read, device))
