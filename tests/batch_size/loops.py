"""Small training loops that the probe's tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sonde
from sonde import NoiseScaleProbe
from sonde.stats.sealed_state import unsealed


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


Rows = tuple[Tensor, Tensor]


def pieces_of(*sizes: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> list[Rows]:
    """The rows of pieces of these sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [batch(n, generator, dtype) for n in sizes]


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
    optimizer: torch.optim.Optimizer | None = None,
    *,
    windows: int = 1,
    sizes: Sequence[int] = (4, 4, 4),
    declared: bool = True,
    scale_loss: Callable[[Tensor], Tensor] = lambda loss: loss,
    before_step: Callable[[], object] = lambda: None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Windows of micro-batches of the given sizes; `before_step` runs between the last backward and `probe.step()`."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(windows):
        for n in sizes:
            with probe.piece(units=n) if declared else contextlib.nullcontext():
                scale_loss(mean_loss(model, *batch(n, generator, dtype))).backward()
        before_step()
        probe.step()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()


def windows_of_rows(probe: NoiseScaleProbe, model: nn.Module, windows: int) -> None:
    """Windows of two micro-batches of 4 rows for a model of 3 inputs, without an optimizer."""
    for _ in range(windows):
        for _ in range(2):
            with probe.piece(units=4):
                model(torch.randn(4, 3)).square().mean().backward()
        probe.step()
        model.zero_grad()


def attached(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    sinks: Any = (),
    log_every: int = 10,
    **options: Any,
) -> NoiseScaleProbe:
    options = {"unit": "rows", "verbose": False, "log": None, "every": 1, "per_example": "never"} | options
    options["log"] = options["log"] or sonde.RunLog(sinks, every=log_every)
    return sonde.attach(model, optimizer, **options)


def contents_of(probe: NoiseScaleProbe) -> dict[str, Any]:
    """What the text of a probe's state says; `sealed` makes a state of it again."""
    return unsealed("state", probe.state_dict())


def counted(probe: NoiseScaleProbe) -> tuple[int, int]:
    """How many windows the noise scale rests on, and the steps of training up to the last of them."""
    run = probe._tracker.run
    return run.blocks.n_windows, run.blocks.n_steps


def n_recent(probe: NoiseScaleProbe) -> int:
    """The number of last measured windows that a reading's tr Σ and |G|² are averaged over."""
    recent = probe._tracker.run.recent()
    assert recent is not None
    return recent.n_windows


def load_foreign_state(probe: NoiseScaleProbe) -> tuple[str, bool]:
    """What is said of the state of a probe of another model, and whether this probe stays as it was."""
    with attached(nn.Linear(3, 2)) as other:
        state = other.state_dict()
    before = contents_of(probe)
    try:
        probe.load_state_dict(state)
    except ValueError as error:
        return str(error), contents_of(probe) == before
    return "no error", False


def flat_grad(model: nn.Module, loss: Tensor) -> Tensor:
    """The whole gradient of a loss, without touching `.grad`: [parameters], float64."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([g.to_dense().flatten() if g.is_sparse else g.flatten() for g in grads]).double()


def assert_same(reading: sonde.NoiseScaleReading, expected: tuple[float, float], rel: float = 1e-5) -> None:
    # fp32 gradients, and the two sides round differently: a few 1e-7 of S and B, amplified by their difference.
    assert reading.windows == 1, reading.dropped
    assert reading.trace_cov == pytest.approx(expected[0], rel=rel)
    assert reading.grad_sq == pytest.approx(expected[1], rel=rel, abs=rel * expected[0])


def piece_losses(model: nn.Module, sizes: list[int], dtype: torch.dtype = torch.float32) -> list[Callable[[], Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (lambda x=x, y=y: mean_loss(model, x, y))
        for x, y in (batch(n, generator, dtype) for n in sizes)  # type: ignore[misc]
    ]


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def windows_of(
    model: nn.Module, probe: NoiseScaleProbe, n: int, *optimizers: torch.optim.Optimizer, ended: bool = True
) -> None:
    for _ in range(n):
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                loss().backward()
        if ended:
            probe.step()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
