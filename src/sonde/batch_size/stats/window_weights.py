"""How much each past window weighs in the noise scale now: an exponential kernel, cut off at a few horizons."""

from __future__ import annotations

import math

import torch
from torch import Tensor

REACH = 4.0
"""Horizons within which windows count; older ones would have less than 2 % of the present one's weight."""
_SPAN = 0.8
"""The horizon is at most this part of the windows seen. Chosen by coverage, as the shapes and the range of c."""


def effective_windows(ages: Tensor, counts: Tensor, horizon: float) -> float:
    """How many equally weighted windows the moments are worth: 1/Σω² of the kernel's normalised weights ω.

    Args:
        ages: of the entries, in windows; [entries].
        counts: windows in each entry; [entries].
        horizon: in windows.
    """
    weights = kernel(ages, local_horizon(ages, horizon))
    return float(counts.dot(weights) ** 2 / counts.dot(weights.square()))


def most_effective_windows(horizon: float) -> float:
    """The same once the horizon is filled: with q = e^(−1/h), (Σ q^a)² / Σ q^(2a) over ages a below 4 h."""
    return math.inf if math.isinf(horizon) else math.tanh(REACH / 2) / math.tanh(1 / (2 * horizon))


def local_horizon(ages: Tensor, horizon: float) -> float:
    """The horizon in use: at most a part of the windows seen, whose number the oldest age tells."""
    return min(horizon, _SPAN * (float(ages.max()) + 1.0))


def kernel(ages: Tensor, horizon: float) -> Tensor:
    """Weights up to a factor: that of the youngest window is 1, however old it is."""
    return torch.exp((ages.min() - ages) / horizon)
