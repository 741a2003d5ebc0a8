"""Steps of a hundred microseconds, and a model of 10,000 tensors: right, and nothing grows."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sonde
from sonde.batch_size.pace import MOST_EVERY
from sonde.stats.sealed_state import sealed
from tests.batch_size.loops import contents_of, flat_grad
from tests.oracles import window_by_hand


def pieces(n_inputs: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Two micro-batches of three rows; [3, n_inputs] each."""
    drawn = torch.randn(2, 3, n_inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return [x.to(dtype) for x in drawn]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).squeeze(-1) - x[:, 0]).square().mean()


def attached(model: nn.Module, budget: float = 0.01) -> sonde.NoiseScaleProbe:
    options: dict[str, Any] = {"per_example": "never", "budget": budget, "allowance": 0.0, "verbose": False}
    return sonde.attach(model, unit="rows", units_per_piece=3, **options)


def train(model: nn.Module, probe: sonde.NoiseScaleProbe, inputs: list[Tensor], windows: int) -> None:
    """Windows of the same pieces, in turn in this order and in the other, at the same weights."""
    for window in range(windows):
        for x in inputs[:: -1 if window % 2 else 1]:
            with probe.piece():
                loss(model, x).backward()
        probe.step()
        for p in model.parameters():
            p.grad = None


def by_hand(model: nn.Module, n_inputs: int) -> tuple[float, float]:
    exact = model.double()
    gradients = [flat_grad(exact, loss(exact, x)) for x in pieces(n_inputs, torch.float64)]
    return window_by_hand(gradients, [1.0] * 2, [3] * 2, gradients[0] + gradients[1])


def test_steps_of_a_hundred_microseconds() -> None:
    """Most windows are left out, the reading is right, and two thousand more windows keep no objects."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    # The windows that are not measured cost about 1 % of such a step: more than 0.1 % on any machine.
    with attached(model, budget=0.001) as probe:
        train(model, probe, pieces(4), 4000)  # until what is remembered of costs is full
        reading = probe.reading()
        gc.collect()
        before = len(gc.get_objects())
        train(model, probe, pieces(4), 2000)
        probe.reading()
        gc.collect()
        grown = len(gc.get_objects()) - before
        state = contents_of(probe)
    # At least 16 windows are measured while a run doubles: it is resumed where that is less than one in 1,000.
    with attached(model, budget=0.001) as probe:
        probe.load_state_dict(sealed(state | {"windows": 10**6}))
        for _ in range(15):
            if "over_budget" not in probe.alerts:
                train(model, probe, pieces(4), 2000)
        cost = probe.cost()
    assert cost.every > MOST_EVERY / 2
    assert cost.share is not None
    assert 0.01 < cost.share < 0.5
    assert "even at one window in 1000" in probe.alerts["over_budget"]
    assert reading.windows < 1000
    assert sum(reading.dropped.values()) == 0
    assert grown < 100  # of 2,000 windows
    expected = by_hand(model, 4)
    assert (reading.trace_cov, reading.grad_sq) == pytest.approx(expected, rel=1e-5)
