"""Small training loops that the probe's tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sonde import NoiseScaleProbe


def small_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two layers of different size, one of them large enough to be reduced inside its hook."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 160), nn.Tanh(), nn.LayerNorm(160), nn.Linear(160, 160), nn.Linear(160, 3)).to(
        dtype
    )


def batch(n: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs [n, 12] and noisy targets [n, 3]."""
    x = torch.randn(n, 12, generator=generator, dtype=torch.float64)
    y = x[:, :3] + 0.5 * torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().sum(-1).mean()


@dataclass
class Recording:
    """A sink that keeps everything."""

    records: list[dict[str, Any]] = field(default_factory=list)
    closed: int = 0

    def write(self, record: Any) -> None:
        self.records.append(dict(record))

    def close(self) -> None:
        self.closed += 1

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [r for r in self.records if r["kind"] == kind]


def train(
    model: nn.Module,
    probe: NoiseScaleProbe,
    optimizer: torch.optim.Optimizer,
    *,
    windows: int,
    sizes: Sequence[int] = (4, 4, 4),
    scale_loss: Callable[[Tensor], Tensor] = lambda loss: loss,
    before_step: Callable[[], object] = lambda: None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Windows of micro-batches of the given sizes; `before_step` runs between the last backward and `probe.step()`."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(windows):
        for n in sizes:
            with probe.piece(units=n):
                scale_loss(mean_loss(model, *batch(n, generator, dtype))).backward()
        before_step()
        probe.step()
        optimizer.step()
        optimizer.zero_grad()
