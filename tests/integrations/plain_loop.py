"""The loop that anybody would write: the values that a trainer's integration must find."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import sonde

BY_PIECES: dict[str, Any] = {"every": 1, "per_example": "never", "verbose": False}
"""Options of runs that are compared: every window is measured, and read in pieces, not as their costs turn out."""


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def whole_weights(model: nn.Module) -> Tensor:
    """Of a model whose parameters may be cut over ranks."""
    return torch.cat([getattr(p, "full_tensor", lambda p=p: p)().detach().flatten() for p in model.parameters()])


@dataclass
class Piece:
    """A micro-batch of the plain loop, with its counts."""

    inputs: dict[str, Any]
    counts: dict[str, Any]
    weight: float
    """Of its mean loss, in the loss of the window."""
    n_items: Tensor | None = None
    """Loss tokens of the window."""


def optimizer_of(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    """Fused, as transformers takes it: in bf16, the last bit of another step would soon be another training."""
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)


def plain_loop(
    model: nn.Module,
    windows: Sequence[Sequence[Piece]],
    loss_of: Any = None,
    max_norm: float = 0.5,
    lr: float = 1e-2,
    parts: Sequence[float] = (1.0,),
    **options: Any,
) -> Any:
    """The reading of a loop that anybody would write.

    Args:
        model: at the beginning.
        windows: of pieces.
        loss_of: given the model and a piece, returns the loss; by default the model's mean times the piece's weight.
        max_norm: of the clip before each step.
        lr: learning rate.
        parts: of each loss, which have a forward and a backward each.
        **options: of `sonde.attach`.
    """
    model = copy.deepcopy(model).train()
    optimizer = optimizer_of(model, lr)
    probe = sonde.attach(model, optimizer, unit="rows", **(BY_PIECES | options))
    for window in windows:
        for piece in window:
            with probe.piece(**piece.counts, weight=piece.weight):
                for part in parts:
                    loss = model(**piece.inputs).loss * piece.weight if loss_of is None else loss_of(model, piece)
                    (loss if part == 1 else part * loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        probe.step()
        optimizer.step()
        optimizer.zero_grad()
    probe.close()
    return probe.reading()


def same_numbers(reading: Any, expected: Any, *, apart_in_16_bits: bool = False) -> bool:
    """To 1e-5: sums of fp32 squares in another order.

    Args:
        reading: of a trainer.
        expected: of the plain loop.
        apart_in_16_bits: whether two trainings in 16 bits are compared whose sums have another order. Their weights
            differ in the last bits of fp32, and some of these are rounded to another neighbour in bf16, 2⁻⁸ of the
            weight away. A layer of 16 inputs then returns something up to 2⁻¹⁰ else, and so do gradients. Which weights
            these are changes with the processor. Last bits moved at random moved such readings by up to 1.5e-3, so the
            numbers are the same to 5e-3.
    """
    names = ("b_simple", "low", "high", "grad_sq", "trace_cov", "units_per_window")
    pairs = [(getattr(reading, name), getattr(expected, name)) for name in names]
    rel = 5e-3 if apart_in_16_bits else 1e-5
    return reading.windows == expected.windows and all(
        a == b or (a is not None and b is not None and abs(a - b) <= rel * abs(b)) for a, b in pairs
    )
