"""Sets of ratios at which one of several quartics is not positive, found without their roots.

A confidence set of a ratio B with one nuisance parameter is such a set: for each value of the parameter, the ratios for
which a quartic in B is not positive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HOST: Any = {"dtype": torch.float64, "device": "cpu"}
"""Of all tensors made here, whatever default device the user has set."""


def product(p: Tensor, q: Tensor) -> Tensor:
    """The product of polynomials; coefficients lie along the last dim, lowest power first."""
    product = p.new_zeros(*p.shape[:-1], p.shape[-1] + q.shape[-1] - 1)
    for i in range(p.shape[-1]):
        product[..., i : i + q.shape[-1]] += p[..., i : i + 1] * q
    return product


def holds(quartic: Tensor, log_ratio: Tensor) -> Tensor:
    """Whether each ratio is in its series' set, for any of the drifts tried; [series, ratios]."""
    ratio = log_ratio.exp()[:, None, :]
    value = quartic[..., 4:5]
    for i in (3, 2, 1, 0):
        value = torch.addcmul(quartic[..., i : i + 1], value, ratio)
    return value.amin(1) <= 0


def refined_end(quartic: Tensor, grid: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """The end of a set between a point of the grid inside it and the next one outside; [series]."""
    n = grid.shape[1]
    inner, outer = (grid.gather(1, i.clamp(0, n - 1)[:, None]) for i in (inside, outside))
    for _ in range(3):  # each pass cuts the uncertainty to an eighth
        points = inner + (outer - inner) * torch.linspace(0, 1, 9, **HOST)
        step = holds(quartic, points).long().cumprod(1).sum(1, keepdim=True).clamp(1, 8)
        inner, outer = points.gather(1, step - 1), points.gather(1, step)
    return ((inner + outer) / 2)[:, 0].exp()
