"""The training state that a measurement must leave unchanged: modes, random numbers, sharding of parameters."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sonde.parallel.model_state import preserve_modes_and_randomness


@contextlib.contextmanager
def preserve_training_state(model: nn.Module) -> Iterator[None]:
    """Modules are in evaluation mode inside. On exit, modules and random generators have their former states."""
    with preserve_modes_and_randomness(model):
        set_evaluation_mode(model)
        yield


def set_evaluation_mode(model: nn.Module) -> None:
    """Put every module into evaluation mode. Unlike `model.eval()`, it runs no code of the modules."""
    for module in model.modules():
        module.training = False


def seed_everything(seed: int) -> None:
    """Seed every global generator that a sampler may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(seed % 2**32)
