"""What a measurement must leave as it found it: modes, random numbers, buffers, checkpointing, cuts."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sonde.parallel.model_state import own_passes, preserve_buffers, preserve_modes_and_randomness


@contextlib.contextmanager
def preserve_training_state(model: nn.Module) -> Iterator[None]:
    """Modules are in evaluation mode inside. On exit, modules, buffers and random numbers are as before."""
    with own_passes(model), preserve_modes_and_randomness(model), preserve_buffers(model), _without_autocast_cache():
        set_evaluation_mode(model)
        yield


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Autocast converts weights anew inside, and keeps nothing.

    Inside one region of autocast, its cache gives the weights of the region's first forward again: those before a
    step to a forward after it, and those of a measurement to the training.
    """
    was_on = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_on)


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


def can_checkpoint(model: nn.Module) -> bool:
    """Whether layers of the model have a switch for gradient checkpointing, as those of transformers have."""
    return any(hasattr(module, "gradient_checkpointing") for module in model.modules())


def is_checkpointing(model: nn.Module) -> bool:
    """Whether gradient checkpointing is on."""
    return bool(_checkpointed(model))


def _checkpointed(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if vars(module).get("gradient_checkpointing") is True]


@contextlib.contextmanager
def checkpointing(model: nn.Module) -> Iterator[None]:
    """Gradient checkpointing is on inside, also in evaluation mode, in which layers of transformers skip it.

    transformers' own method would also put hooks on embeddings, and leave them there.
    """
    layers, inside = _checkpointed(model), dict[str, Any](training=True)  # the layer's own: dropout inside stays off
    if not layers:
        layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        by_torch = functools.partial(checkpoint, use_reentrant=False)
        inside |= {"gradient_checkpointing": True, "_gradient_checkpointing_func": by_torch}
    before = [{name: vars(layer)[name] for name in inside if name in vars(layer)} for layer in layers]
    try:
        for layer in layers:
            vars(layer).update(inside)
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            for name in inside:
                vars(layer).pop(name, None)
            vars(layer).update(own)
