"""Windows of models that run in graphs, beside whole gradients in float64: what tests on a GPU and on a CPU run.

A graph writes its results, gradients too, to the same memory at each run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sonde
from tests.batch_size.loops import batch, flat_grad, mean_loss, small_model
from tests.oracles import window_by_hand

WINDOWS, PIECES, ROWS = 3, 2, 4


def graphed(device: torch.device) -> nn.Module:
    """A model that `make_graphed_callables` has put into a graph."""
    return torch.cuda.make_graphed_callables(small_model().to(device), (torch.randn(ROWS, 12, device=device),))  # type: ignore[no-any-return]


def graphed_layer(device: torch.device) -> nn.Module:
    """A model of which one layer is in a graph."""
    model = small_model().to(device)
    model[3] = torch.cuda.make_graphed_callables(model[3], (torch.randn(ROWS, 160, device=device, requires_grad=True),))
    return model


def layer() -> nn.Module:
    """A small model, quick to compile."""
    torch.manual_seed(0)
    return nn.Linear(12, 3)


def compiled(device: torch.device) -> nn.Module:
    """That model compiled into CUDA graphs; on a CPU the mode compiles without them."""
    torch._dynamo.reset()
    return torch.compile(layer().to(device), mode="reduce-overhead")  # type: ignore[no-any-return]


def windows_of(
    model: nn.Module,
    device: torch.device,
    *,
    alike: Callable[[], nn.Module] = small_model,
    n_backwards: int = 1,
    declared: bool = True,
    **options: Any,
) -> tuple[list[tuple[float, float] | None], list[tuple[float, float]], sonde.NoiseScaleReading]:
    """tr Σ and |G|² of each window as measured, None if it was dropped, and by hand; and the reading.

    Gradients are added up in memory of their own. (autograd takes over what a graph returns where `.grad` is None, and
    the graph's next run overwrites it.)

    Args:
        model: in a graph.
        device: that it is on.
        alike: makes the same model without a graph.
        n_backwards: of each piece, each of another batch.
        declared: in `piece()`; otherwise each backward is a piece.
        **options: of `attach`.
    """
    exact = alike().double()
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    options = {"unit": "rows", "units_per_piece": ROWS, "every": 1, "per_example": "never", "verbose": False} | options
    measured: list[tuple[float, float] | None] = []
    by_hand = []
    with sonde.attach(model, **options) as probe:
        for _ in range(WINDOWS):
            gradients = []
            for _ in range(PIECES):
                batches = [batch(ROWS, generator) for _ in range(n_backwards)]
                if declared:
                    with probe.piece(units=ROWS * n_backwards):
                        _backwards(model, batches, device)
                else:
                    _backwards(model, batches, device)
                gradients.append(_sum_of_gradients(exact, batches))
            probe.step()
            solved = probe.window()
            measured.append(None if solved is None else (solved.total.trace_cov, solved.total.grad_sq))
            units = [ROWS * n_backwards] * PIECES
            by_hand.append(window_by_hand(gradients, [1.0] * PIECES, units, torch.stack(gradients).sum(0)))
            model.zero_grad(set_to_none=False)
        return measured, by_hand, probe.reading()


def _backwards(model: nn.Module, batches: list[tuple[Tensor, Tensor]], device: torch.device) -> None:
    for x, y in batches:
        mean_loss(model, x.to(device), y.to(device)).backward()


def _sum_of_gradients(exact: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.stack([flat_grad(exact, mean_loss(exact, x.double(), y.double())) for x, y in batches]).sum(0)
