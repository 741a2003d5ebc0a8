"""Gradient checkpointing of a model of transformers while the rest of it is in evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from sonde.parallel.wrappers import unwrap_model


def can_checkpoint(model: nn.Module) -> bool:
    """Whether it can be turned on from outside."""
    return callable(getattr(unwrap_model(model), "gradient_checkpointing_enable", None))


def is_checkpointing(model: nn.Module) -> bool:
    """Whether it is on."""
    return bool(getattr(unwrap_model(model), "is_gradient_checkpointing", False))


@contextlib.contextmanager
def checkpointing(model: nn.Module) -> Iterator[None]:
    """On meanwhile, also in evaluation mode, in which layers of transformers would not do it."""
    inner: Any = unwrap_model(model)
    was_on = is_checkpointing(model)
    if not was_on:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = [m for m in inner.modules() if getattr(m, "gradient_checkpointing", False)]
    modes = [layer.training for layer in layers]
    try:
        for layer in layers:
            layer.training = True  # of the layer alone, not of the dropout in it
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode
        if not was_on:
            inner.gradient_checkpointing_disable()
