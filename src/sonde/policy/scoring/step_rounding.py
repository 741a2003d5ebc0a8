"""How much of the optimizer's real step parameters of 16 bits do not hold, by a few hundred elements of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sonde.policy.scoring.optimizer_step import forecast_step, sampled_elements, why_no_forecast
from sonde.policy.scoring.precision import NARROW


class StepRounding:
    """Forecasts the step on entry, and compares what was taken with it on exit.

    Args:
        optimizer: whose step it is.
        parameters: all that may move; those of 16 bits count, if their step can be forecast.
        gradient_scale: factor that gradients are still multiplied by before the step.
    """

    def __init__(self, optimizer: Any, parameters: Iterable[Tensor], gradient_scale: float) -> None:
        self._samples: list[tuple[Tensor, Tensor, Tensor]] = []
        """A parameter, the elements of θ and those of Δ."""
        for p in () if why_no_forecast(optimizer) else parameters:
            grad = p.grad
            if p.dtype not in NARROW or grad is None or grad.is_sparse:
                continue
            # One parameter at a time: a whole step has the size of the parameters.
            for delta in forecast_step(optimizer, gradient_scale=gradient_scale, of=[p]).values():
                self._samples.append((p, sampled_elements(p).clone(), sampled_elements(delta).clone()))

    @torch.no_grad()
    def sq_norms(self) -> tuple[float, float, float, float]:
        """Squared norms over this rank's elements; waits for the device.

        Returns:
            Of θ⁺ − θ − Δ; of Δ; of θ⁺ minus what θ + Δ is in 16 bits, which is 0 if Δ was the step that was taken; and
            of what θ + Δ is in 16 bits minus θ.
        """
        sums = torch.zeros(4, dtype=torch.float64)
        for p, before, delta in self._samples:
            after, theta, step = sampled_elements(p).double(), before.double(), delta.double()
            rounded = (theta + step).to(p.dtype).double()
            parts = (after - theta - step, step, after - rounded, rounded - theta)
            sums += torch.stack([part.square().sum() for part in parts]).cpu()
        lost, whole, other, moved = sums.tolist()
        return lost, whole, other, moved
