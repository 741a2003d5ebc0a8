"""A loop with Accelerate on rows of unequal weight; import it only with Accelerate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from torch import Tensor, nn

from sonde.integrations import accelerate as integration
from tests.integrations.plain_loop import BY_PIECES, optimizer_of

ROWS, WIDTH = (4, 4, 2, 3, 4, 4, 4, 3), 5
"""Rows of the micro-batches of each epoch: two windows of three and one of two."""


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, WIDTH, generator=generator) for n in ROWS]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))


def tokens(batch: Tensor) -> Tensor:
    """As many as the first number of each row says: [rows]."""
    return (batch[:, 0].abs() * 10).ceil()


def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
    """The mean over tokens."""
    errors = (net(batch) - batch[:, :1] - 0.3).square()[:, 0]
    return (errors * tokens(batch)).sum() / tokens(batch).sum()


def loop(
    accelerator: Accelerator,
    attach: Callable[[Any, Any], Any] | None = None,
    *,
    epochs: int = 3,
    max_norm: float = 0.5,
    scale: Callable[[Tensor], float] = lambda batch: 1.0,
    begin: Callable[[], None] = lambda: None,
) -> nn.Module:
    """A loop of Accelerate's documentation. No line of it knows sonde."""
    data = torch.utils.data.DataLoader(batches(), batch_size=1, collate_fn=lambda one: one[0])  # type: ignore[arg-type]
    net = network()
    model, optimizer, loader = accelerator.prepare(net, optimizer_of(net), data)
    if attach is not None:
        attach(model, optimizer)
    begin()
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch) * scale(batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
                accelerator.log({"loss": loss.item()}, step=7)
    return model


def accelerator(**options: Any) -> Accelerator:
    GradientState._reset_state()
    return Accelerator(**({"gradient_accumulation_steps": 3, "cpu": True} | options))


class Attached:
    """Attaches, and keeps what it gets."""

    def __init__(self, to: Accelerator, **options: Any) -> None:
        self._to, self._options = to, {"unit": "rows", "on_error": "raise", **BY_PIECES} | options
        self.probe: Any = None

    def __call__(self, model: Any, optimizer: Any) -> None:
        self.probe = integration.attach(self._to, model, optimizer, **self._options)
