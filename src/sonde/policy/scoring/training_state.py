"""The training state that a measurement must leave as it was: modes, random numbers, gathered parameters."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sonde.parallel.placements import reshard


@contextlib.contextmanager
def preserve_training_state(model: nn.Module) -> Iterator[None]:
    """Modules are in evaluation mode meanwhile; then each has its mode back, and every random generator its state."""
    reshard(model)
    modes = [(module, module.training) for module in model.modules()]
    # All of them: seeding seeds all.
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    numpy: Any = sys.modules.get("numpy")
    of_numpy, of_python = numpy and numpy.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=devices):
        try:
            set_evaluation_mode(model)  # not eval(), which a module may have made do more
            yield
        finally:
            reshard(model)
            for module, mode in modes:
                module.training = mode
            random.setstate(of_python)
            if numpy:
                numpy.random.set_state(of_numpy)


def set_evaluation_mode(model: nn.Module) -> None:
    """Put every module into evaluation mode, inside `preserve_training_state`: samplers leave it in training mode."""
    for module in model.modules():
        module.training = False


def seed_everything(seed: int) -> None:
    """Every global generator that a sampler may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(seed % 2**32)
