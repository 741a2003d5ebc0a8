"""A loop whose pieces have other numbers of rows, with the units that it declares or leaves to be counted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sonde
from tests.batch_size.loops import batch, mean_loss

SIZES = (4, 7, 2)
"""Rows of the pieces of each window: unequal, so that a wrong count gives another number."""


def train(
    probe: Any,
    model: nn.Module,
    *,
    declares: Callable[[int], dict[str, Any]] | None = None,
    windows: int = 6,
    before_window: Callable[[Tensor], object] = lambda x: None,
    seed: int = 0,
) -> None:
    """Windows at weights that move; each piece is declared with what the function says of its rows."""
    optimizer, generator = torch.optim.SGD(model.parameters(), lr=0.005), torch.Generator().manual_seed(seed)
    for _ in range(windows):
        before_window(batch(5, generator)[0])
        for n in SIZES:
            x, y = batch(n, generator)
            with probe.piece(**declares(n)) if declares else contextlib.nullcontext():
                mean_loss(model, x, y).backward()
        if probe is not None:
            probe.step()
        optimizer.step()
        optimizer.zero_grad()


def known(reading: sonde.NoiseScaleReading) -> tuple[Any, ...]:
    return reading.windows, reading.trace_cov, reading.grad_sq, reading.units_per_window, reading.u


def rows(n: int) -> dict[str, Any]:
    return {"units": n}
