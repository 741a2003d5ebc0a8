"""What is kept of a gradient: its squared norm per parameter, and the witness's elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.measure.metric import Metric
from sonde.measure.norms import accumulation_dtype
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
    dtype = accumulation_dtype(device)
    of_each = [torch.zeros((), dtype=dtype, device=device)] * len(grads)
    present = [(i, g) for i, g in enumerate(grads) if g is not None]
    for where in dict.fromkeys(g.device for _, g in present):
        here = [(i, g) for i, g in present if g.device == where]
        indices, of_here = [i for i, _ in here], [g for _, g in here]
        for i, value in zip(indices, metric.sq_norms(indices, of_here), strict=True):
            of_each[i] = value if where == device else value.to(device, non_blocking=True)
    elements = [
        torch.zeros(size, dtype=dtype, device=device)
        if (grad := grads[i]) is None
        else witness.read(i, grad, dtype).to(device, non_blocking=True)
        for i, size in witness.sizes.items()
    ]
    return GradientSummary(sq_norms=torch.stack(of_each).to(dtype), witness=witness.join(elements))
