"""The optimizers that step a model together, and what each of them steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sonde.parallel.unwrap import unwrap_optimizer

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
"""An optimizer, or several that step a model together, as Muon and AdamW do."""


def parameters_of(*optimizers: Any) -> list[Tensor]:
    """All tensors of some optimizers."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def given_optimizers(given: Optimizers) -> list[Any]:
    """The optimizers that a user has passed, without wrappers such as Accelerate's: one, several in a list, or None."""
    if given is None:
        return []
    return [unwrap_optimizer(each) for each in (given if isinstance(given, Sequence) else [given])]
