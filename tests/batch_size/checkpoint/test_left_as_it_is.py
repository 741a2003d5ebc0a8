"""A measurement leaves everything bit for bit as it was, also after an error, and training goes on as without it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

import sonde
from tests.batch_size.checkpoint.regression import Batch, batches, loss


class Queue(nn.Module):
    """Keeps buffers that each forward changes: one in place, one by another tensor in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("last", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1.0
        self.last = x.detach().mean(0)[:2]
        return x


def stateful_model() -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), Queue(), nn.Linear(16, 4), nn.Linear(4, 2)
    )
    model[4].requires_grad_(False)
    model[2].eval()
    return model


def accumulated(model: nn.Module) -> None:
    """Leave gradients of half a step behind, and one parameter without a gradient."""
    loss(model, batches([6], seed=9)[0]).backward()
    model[5].bias.grad = None  # type: ignore[index, union-attr]


def everything(model: nn.Module) -> dict[str, Any]:
    """All state that a training run depends on."""
    return {
        "weights": [p.detach().clone() for p in model.parameters()],
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1],
        "python": random.getstate(),
        "grad_mode": torch.is_grad_enabled(),
        "hooks": [len(p._backward_hooks or ()) for p in model.parameters()],
        "module_hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "optimizer_hooks": len(torch_optimizer._global_optimizer_pre_hooks),
    }


def assert_same(now: Any, before: Any) -> None:
    if isinstance(before, dict):
        assert now.keys() == before.keys()
        for name in before:
            assert_same(now[name], before[name])
    elif isinstance(before, list):
        assert len(now) == len(before)
        for one, other in zip(now, before, strict=True):
            assert_same(one, other)
    elif isinstance(before, Tensor):
        assert torch.equal(now, before)
    elif isinstance(before, np.ndarray):
        assert (now == before).all()
    else:
        assert now == before


def unruly_loss(model: Any, batch: Batch) -> Tensor:
    """Draws random numbers of all kinds, changes modes and freezes a parameter."""
    random.random()
    np.random.rand()
    model[2].train()
    model[0].bias.requires_grad_(False)
    return loss(model, (batch[0] + 0.01 * torch.randn_like(batch[0]), batch[1]))


def test_everything_is_as_before() -> None:
    model = stateful_model()
    accumulated(model)
    tensors = [p.grad for p in model.parameters()], list(model.buffers())
    before = everything(model)
    measurement = sonde.measure(model, unruly_loss, batches([4] * 42), unit="rows", verbose=False)
    assert measurement.reading.windows > 0
    assert_same(everything(model), before)
    # And the same tensors, not copies: an optimizer or DDP may hold them.
    assert all(p.grad is g for p, g in zip(model.parameters(), tensors[0], strict=True))
    assert all(b is c for b, c in zip(model.buffers(), tensors[1], strict=True))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["loss", "data", "on_window"])
def test_everything_is_as_before_after_an_error(error: type[BaseException], where: str) -> None:
    model = stateful_model()
    accumulated(model)
    before = everything(model)
    n_calls = 0

    def failing_loss(model: Any, batch: Batch) -> Tensor:
        nonlocal n_calls
        n_calls += 1
        if where == "loss" and n_calls == 9:
            raise error("on purpose")
        return unruly_loss(model, batch)

    def data() -> Iterator[Batch]:
        yield from batches([4] * 7)
        if where == "data":
            raise error("on purpose")
        yield from batches([4] * 7)

    def on_window(_: object) -> None:
        if where == "on_window":
            raise error("on purpose")

    with pytest.raises(error, match="on purpose"):
        sonde.measure(model, failing_loss, data(), unit="rows", verbose=False, on_window=on_window)
    assert_same(everything(model), before)
