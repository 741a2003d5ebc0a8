"""The model and the optimizer inside the wrappers that trainers put around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module inside DDP and torch.compile, in any nesting. Calling it issues none of DDP's collectives."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif (inner := dict(model.named_children()).get("_orig_mod")) is not None:
            model = inner
        else:
            return model


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer inside a wrapper such as Accelerate's, which steps only when a step is due."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer
