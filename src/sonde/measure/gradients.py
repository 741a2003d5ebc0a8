"""What is kept of a gradient: its squared norm per parameter, and the witness's elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sonde.measure.norms import accumulation_dtype, norms
from sonde.measure.witness import Witness


@dataclass(frozen=True)
class GradientSummary:
    """What is kept of one gradient.

    Attributes:
        sq_norms: squared norm per parameter, 0 where it has none; [parameters].
        witness: the witness's elements, [witness.size].
    """

    sq_norms: Tensor
    witness: Tensor

    def scaled(self, factor: Tensor) -> GradientSummary:
        """The summary of `factor` times the gradient; factor: 0-dim."""
        return GradientSummary(sq_norms=self.sq_norms * factor.square(), witness=self.witness * factor)


def summarize(grads: Sequence[Tensor | None], witness: Witness, device: torch.device) -> GradientSummary:
    """Read whole gradients, one per parameter.

    Args:
        grads: in the parameters' order, None where there is none; they may live on several devices.
        witness: which elements to copy.
        device: where the summary goes.
    """
    dtype = accumulation_dtype(device)
    of_each = [torch.zeros((), dtype=dtype, device=device)] * len(grads)
    present = [(i, g) for i, g in enumerate(grads) if g is not None]
    for where in dict.fromkeys(g.device for _, g in present):
        here = [(i, g) for i, g in present if g.device == where]
        for (i, _), value in zip(here, norms([g for _, g in here]), strict=True):
            of_each[i] = value.to(device=device, dtype=dtype, non_blocking=True)
    elements = [
        torch.zeros(size, dtype=dtype, device=device)
        if (grad := grads[i]) is None
        else witness.read(i, grad, dtype).to(device, non_blocking=True)
        for i, size in witness.sizes.items()
    ]
    return GradientSummary(sq_norms=torch.stack(of_each).square(), witness=torch.cat(elements))
