"""What is asked of optimizers, whatever wraps them."""

from __future__ import annotations

from typing import Any

import torch


def innermost(optimizer: Any) -> Any:
    """The optimizer inside a wrapper such as Accelerate's, which steps only when it is due."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer
